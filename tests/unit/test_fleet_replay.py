"""Requests replayed with the ways of several programs to run models on one machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from fitter.planning.fleet.residency import FleetRoom, Member, Rules, Runs, Way, models_of
from tests.support.cases import named_cases
from tools.fleets.replay import (
    PATTERNS,
    Asked,
    Policy,
    ReplayModel,
    Setup,
    draw,
    fleet,
    lemonade,
    main,
    ollama,
    plain,
    read_log,
    replay,
    router,
)

CARD = "CUDA0"


def model(
    name: str,
    needs: int | Mapping[str, int],
    *,
    kind: str = "llm",
    planned: int | None = None,
    predicted: int | None = None,
    reload: float = 10.0,
) -> ReplayModel:
    places = {CARD: needs} if isinstance(needs, int) else dict(needs)
    alone = Way(places, 1.0, reload)
    ours = alone if planned is None else Way({CARD: planned}, 2.0, reload)
    return ReplayModel(name, kind, alone, ours, sum(places.values()) if predicted is None else predicted, 100.0)


def setup(
    *models: ReplayModel, room: int | Mapping[str, int] = 100, sets: tuple[str, ...] = (), costs: str = ""
) -> Setup:
    """Give each model the digit of ``costs`` at its place."""
    return Setup(
        {each.name: each for each in models},
        FleetRoom({CARD: room} if isinstance(room, int) else room),
        tuple(frozenset(each) for each in sets),
        {each.name: int(cost) for each, cost in zip(models, costs or "1" * len(models), strict=True)},
    )


def asked(names: str, gap: float = 1.0) -> list[Asked]:
    """Ask for each letter, ``gap`` seconds after the one before."""
    return [Asked(at * gap, name) for at, name in enumerate(names)]


FOUR = [model(name, 30) for name in "abcd"]
KINDS = [model("a", 60), model("b", 60), model("e", 20, kind="embedding"), model("f", 20, kind="embedding")]
TWO_CARDS = {CARD: 100, "CUDA1": 100}


@named_cases(
    ("plain keeps all", plain, setup(*FOUR), "abcabc", 6, 3, 0, 0),
    ("plain loses what has no room", plain, setup(*FOUR), "abcdad", 4, 3, 0, 2),
    ("router has room for four", router, setup(*FOUR, room=200), "abcdabcd", 8, 4, 0, 0),
    ("router does not look at memory", router, setup(*FOUR, room=110), "abcd", 3, 3, 0, 1),
    ("router evicts the least recent", lambda given: router(given, 2), setup(*FOUR), "abaca", 5, 3, 1, 0),
    ("router without a limit", lambda given: router(given, 0), setup(*FOUR), "abcdd", 3, 3, 0, 2),
    ("lemonade has one of each type", lemonade, setup(*KINDS), "aeaeae", 6, 2, 0, 0),
    ("lemonade evicts within the type", lemonade, setup(*KINDS), "aebfa", 5, 5, 3, 0),
    ("lemonade unloads all and retries", lambda given: lemonade(given, 2), setup(*KINDS), "aebe", 4, 4, 2, 1),
    ("too large", lambda given: lemonade(given, -1), setup(*KINDS[:1], model("b", 101)), "aba", 2, 2, 1, 1),
    ("ollama at 80 % of the rest", ollama, setup(model("a", 90), model("b", 8)), "abab", 4, 2, 0, 0),
    ("ollama above 80 %", ollama, setup(model("a", 90), model("b", 9)), "abab", 4, 4, 3, 0),
    ("ollama has three models a device", ollama, setup(*FOUR[:3], room=200), "bcacb", 5, 3, 0, 0),
    ("ollama evicts the first by name", ollama, setup(*FOUR, room=400), "bcadb", 5, 4, 1, 0),
    ("ollama's other card", ollama, setup(model("a", 90), model("b", 60), room=TWO_CARDS), "abab", 4, 2, 0, 0),
    ("ollama spreads", ollama, setup(model("a", 50), model("b", 110), room=TWO_CARDS), "aba", 3, 2, 0, 0),
    ("ollama's wrong guess", ollama, setup(model("a", 50), model("b", 60, predicted=30)), "ab", 2, 2, 1, 1),
    (
        *("ollama's wrong guess of a card", ollama),
        *(setup(model("a", 50), model("b", 110, predicted=70), room=TWO_CARDS), "ab", 1, 1, 1, 1),
    ),
    (
        *("ollama without a card looks at no memory", ollama),
        *(setup(*(model(name, {"host": 30}) for name in "abcd"), room={"host": 100}), "abcabcd", 7, 4, 1, 0),
    ),
    ("fleet keeps a set", fleet, setup(*FOUR, sets=("abc", "abd"), costs="1111"), "abcdabdc", 8, 5, 2, 0),
    ("fleet keeps the dear", fleet, setup(*FOUR, sets=("ac", "bc", "ab"), costs="1911"), "abcb", 4, 3, 1, 0),
)
def test_a_policy_loads_and_unloads(
    make: Callable[[Setup], Policy],
    given: Setup,
    names: str,
    answered: int,
    loads: int,
    evictions: int,
    out_of_memory: int,
) -> None:
    found = replay(asked(names), make(given), given)
    assert (found.requests, found.answered) == (len(names), answered)
    assert (found.loads, found.evictions, found.out_of_memory) == (loads, evictions, out_of_memory)
    assert found.seconds == answered + 10 * loads
    assert found.tokens == 100 * answered
    assert found.tokens_per_second == pytest.approx(100 * answered / (answered + 10 * loads))


def test_ollama_unloads_what_was_idle_for_five_minutes() -> None:
    given = setup(*FOUR)
    at_309 = [Asked(0, "a"), Asked(5, "b"), Asked(310.9, "a")]
    at_311 = [Asked(0, "a"), Asked(5, "b"), Asked(311, "a")]
    # the first answer ends after 11 seconds
    assert [replay(log, ollama(given), given).evictions for log in (at_309, at_311)] == [0, 1]
    assert replay(at_311, ollama(given, keep_alive=1e9), given).evictions == 0


def test_the_fleet_has_its_own_plans_and_a_log_its_own_tokens() -> None:
    given = setup(model("a", 60, planned=40), model("b", 60, planned=40), sets=("ab",), costs="11")
    found = replay([Asked(0, "a", 7.0), Asked(1, "b", 0.0), Asked(2, "a")], fleet(given), given)
    assert (found.seconds, found.tokens, found.evictions) == (3 * 2 + 2 * 10, 107, 0)
    assert replay(asked("aba"), plain(given), given).out_of_memory == 1


def test_a_replay_agrees_with_the_chain_of_random_requests() -> None:
    models = [model(name, need, reload=20.0 * need) for name, need in zip("abcde", (50, 40, 30, 20, 10), strict=True)]
    rules = Rules(tuple(Member(each.name, 0.2) for each in models), FleetRoom({CARD: 100}))
    expected = Runs(rules, [each.fleet for each in models]).best()
    sets = tuple("".join(models[index].name for index in models_of(mask)) for mask in expected.sets)
    costs = dict(zip("abcde", expected.evict_costs, strict=True))
    given = Setup({each.name: each for each in models}, rules.room, tuple(map(frozenset, sets)), costs)
    found = replay(draw("uniform", models, 20_000), fleet(given), given)
    assert found.answered == found.requests
    assert found.loads / found.requests == pytest.approx(sum(expected.misses) / 5, rel=0.03)
    assert found.seconds / found.requests == pytest.approx(expected.seconds, rel=0.03)


DRAWN = [model("chat", 40), model("coder", 70), model("embed", 5, kind="embedding"), model("rank", 5, kind="rerank")]


def _counts(pattern: str) -> Counter[str]:
    return Counter(each.model for each in draw(pattern, DRAWN, 4000))


def _repeats(pattern: str) -> float:
    names = [each.model for each in draw(pattern, DRAWN, 4000)]
    return sum(one == other for one, other in pairwise(names)) / len(names)


@named_cases(
    ("uniform", lambda: _counts("uniform")["rank"], 900, 1100),
    ("zipf", lambda: _counts("zipf")["chat"] / _counts("zipf")["coder"], 1.8, 2.2),
    ("rare large", lambda: _counts("rare large")["coder"], 50, 110),
    ("sessions stay with a model", lambda: _repeats("sessions"), 0.85, 0.92),
    ("two sessions at the same time", lambda: _repeats("two tenants"), 0.4, 0.5),
    ("bursts", lambda: _repeats("bursts"), 0.95, 0.99),
    ("round robin", lambda: _repeats("round robin"), 0, 0),
    ("agent asks in turn", lambda: _counts("agent")["embed"] - _counts("agent")["rank"], 0, 1),
    ("day", lambda: sum(each.model in ("chat", "coder") for each in draw("day and night", DRAWN, 150)), 125, 145),
    ("night", lambda: sum(each.model in ("chat", "coder") for each in draw("day and night", DRAWN, 300)[150:]), 5, 25),
)
def test_a_drawn_log_has_its_pattern(figure: Callable[[], float], low: float, high: float) -> None:
    assert low <= figure() <= high


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_log_is_drawn_again_from_its_seed(pattern: str) -> None:
    log = draw(pattern, DRAWN, 300)
    assert log == draw(pattern, DRAWN, 300)
    assert len(log) == 300 and log == sorted(log, key=lambda each: each.seconds)
    assert [each.seconds for each in log] != [each.seconds for each in draw(pattern, DRAWN, 300, seed=2)]


def test_nine_logs_are_drawn_and_one_model_suffices() -> None:
    assert len(PATTERNS) == 9
    assert all({each.model for each in draw(pattern, DRAWN[:1], 50)} == {"chat"} for pattern in PATTERNS)


def test_the_command_replays_a_log_with_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("seconds,model,tokens\n0.5,a,7\n2,b,\n")
    assert read_log(log) == [Asked(0.5, "a", 7.0), Asked(2.0, "b")]
    way = {"needs": {CARD: 60}, "seconds": 1, "reload_seconds": 3}
    models = [{"name": n, "kind": "llm", "alone": way, "fleet": way, "predicted": 60, "tokens": 9} for n in ("a", "b")]
    document = {"models": models, "room": {CARD: 100}, "sets": [["a"], ["b"]], "evict_costs": {"a": 1, "b": 1}}
    (tmp_path / "setup.json").write_text(json.dumps(document))
    assert main([str(tmp_path / "setup.json"), "--log", str(log), "--requests", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "log,policy,requests,answered,seconds,loads,evictions,out_of_memory,tokens,tokens_per_second"
    assert len(lines) == 1 + 10 * 5
    assert lines[-5:] == [
        "log.csv,plain,2,1,4.0,1,0,1,7.0,1.75",
        "log.csv,ollama,2,2,8.0,2,1,0,16.0,2.0",
        "log.csv,lemonade,2,2,8.0,2,1,0,16.0,2.0",
        "log.csv,router,2,1,4.0,1,0,1,7.0,1.75",
        "log.csv,fleet,2,2,8.0,2,1,0,16.0,2.0",
    ]
