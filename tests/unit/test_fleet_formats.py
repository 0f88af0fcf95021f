"""Fleets in the files of other programs, read back as these programs read them: by schema, grammar and rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fitter.errors import PlanError, UsageError
from fitter.llama.types import Params, TensorBuftOverride
from fitter.output.arguments import with_absolute_paths
from fitter.output.formats import render_fleet
from fitter.parameters.targets import FLEET_FORMATS
from fitter.planning.fleet.fleet import Fleet
from fitter.planning.plan.plan import Plan
from tests.support.cases import cases, named_cases
from tests.support.fleets import make_fleet, plan_of
from tests.support.plans import make_plan
from tests.unit.test_formats_of_servers import PATHS, printable_paths, read, split

NAMES = ("chat", "true", "1.5", "<<", "a:b", "#c", "it's", '"q"', "$HOME", "%n", "back\\", "模型/é.gguf")
"""Names that a file may take for something else; none has a space."""
names = st.text(
    st.characters(blacklist_categories=("C", "Z"), blacklist_characters="()[]"), min_size=1, max_size=8
).filter(lambda name: "${" not in name)
SPILLED = Params(
    n_ctx=32768,
    n_gpu_layers=33,
    tensor_buft_overrides=(TensorBuftOverride(r"^blk\.(1|2)\.ffn_(up|gate)_exps.weight$", "CPU"),),
)


@st.composite
def fleets(draw: st.DrawFn, names: Sequence[str] = "abcde") -> Fleet:
    """A fleet of two to five models, of which some stay and some may not be together."""
    chosen = names[: draw(st.integers(2, len(names)))]
    needs = {name: draw(st.integers(1, 9)) for name in chosen}
    residents = [name for name in chosen if draw(st.integers(0, 5)) == 0]
    kept = [name for name in chosen if draw(st.integers(0, 9)) == 0]
    stay = {*residents, *kept}
    others = [name for name in chosen if name not in stay]
    never = [(a, b) for a in others for b in others if a < b and draw(st.integers(0, 4)) == 0]
    parts = {name: draw(st.integers(0, 5)) for name in chosen}
    total = sum(parts.values())
    shares = {name: parts[name] / total for name in chosen} if total else None
    least = sum(needs[name] for name in stay) + max((needs[name] for name in others), default=0)
    room = draw(st.integers(least, sum(needs.values())))
    return make_fleet(needs, room, residents=residents, kept=kept, never=never, shares=shares)


def hostile(path: str = "/m/a.gguf") -> Fleet:
    """A fleet with ``NAMES``, of which ``chat`` stays and the others take turns."""
    needs = {name: 1 if name == "chat" else 2 for name in NAMES}
    plan = make_plan(SPILLED, devices=("CUDA0",))
    plans = {name: replace(plan, model=replace(plan.model, path=path)) for name in needs}
    return make_fleet(needs, 3, residents=["chat"], plans=plans)


def sets_of(fleet: Fleet) -> list[frozenset[str]]:
    return [frozenset(each.models) for each in fleet.sets]


def words_of(plan: Plan) -> list[str]:
    return [word for each in with_absolute_paths(plan) for word in each.words]


# --- all formats


def test_what_is_no_format() -> None:
    choices = "choose from ini, llama-swap, llama-swap-groups, compose, systemd"
    with pytest.raises(UsageError, match=f"^unknown format 'yaml': {choices}"):
        render_fleet(make_fleet({"a": 1}, 1), "yaml")


@pytest.mark.parametrize("name", FLEET_FORMATS)
def test_what_does_not_fit_is_not_written(name: str) -> None:
    fleet = replace(make_fleet({"a": 1}, 1), models=(), sets=(), problems=("'a' does not fit: x", "y"))
    with pytest.raises(PlanError, match=r"^the models do not fit: 'a' does not fit: x$"):
        render_fleet(fleet, name)


@pytest.mark.parametrize(("name", "path"), [(name, "/m/a;b" if name == "ini" else "/m/a\nb") for name in FLEET_FORMATS])
def test_a_path_that_a_format_cannot_express(name: str, path: str) -> None:
    with pytest.raises(PlanError, match="rename the file"):
        render_fleet(make_fleet({"a": 1, "b": 1}, 2, plans={"b": plan_of(path)}), name)


@cases(("ini", "a-b"), ("compose", "a-b"), ("systemd", "llama-a-b"))
def test_two_names_that_become_the_same(name: str, called: str) -> None:
    message = f"^this format would call both 'a:b' and 'a/b' {called}: rename one of them$"
    with pytest.raises(PlanError, match=message):
        render_fleet(make_fleet({"a": 1, "a:b": 1, "a/b": 1}, 3), name)


# --- llama-swap


def solve(matrix: Mapping[str, Any], asked: str, running: Collection[str], order: Sequence[str]) -> set[str]:
    """What llama-swap evicts: of the sets with ``asked``, the first whose evictions cost least stays."""
    if asked in running:
        return set()
    costs = {matrix["vars"][key]: cost for key, cost in matrix["evict_costs"].items()}
    assert all(cost > 0 for cost in costs.values())
    best = None
    for name in order:
        words = matrix["sets"][name].split()
        assert set(words[1::2]) <= {"&"}
        models = {matrix["vars"][word] for word in words[::2]}
        if asked in models:
            cost = sum(costs.get(model, 1) for model in running if model not in models)
            if best is None or cost < best[0]:
                best = cost, set(running) - models
    return set(running) if best is None else best[1]


@settings(max_examples=60, deadline=None)
@given(fleet=fleets())
@example(fleet=make_fleet(dict.fromkeys("abcdef", 1), 3))
def test_the_matrix_evicts_as_the_fleet_says(fleet: Fleet) -> None:
    matrix = read(render_fleet(fleet, "llama-swap"), "llama-swap")["matrix"]
    # llama-swap sorts them before it reads their order
    for order in (list(matrix["sets"]), sorted(matrix["sets"])):
        for swap in fleet.swaps:
            assert solve(matrix, swap.asked, swap.running, order) == set(swap.evicted)


def test_the_matrix_of_a_fleet() -> None:
    fleet = make_fleet({"chat": 4, "code": 3, "embed": 1}, 5, residents=["embed"])
    document = read(render_fleet(fleet, "llama-swap"), "llama-swap")
    costs = [model.evict_cost for model in fleet.models]
    assert document["matrix"] == {
        "vars": {"m1": "chat", "m2": "code", "m3": "embed"},
        "evict_costs": dict(zip(("m1", "m2", "m3"), costs, strict=True)),
        "sets": {"s1": "m1 & m3", "s2": "m2 & m3"},
    }
    assert len(set(costs)) == 3
    assert document["hooks"] == {"on_startup": {"preload": ["embed"]}}
    assert {name: model.get("ttl") for name, model in document["models"].items()} == {
        "chat": None,
        "code": None,
        "embed": 0,
    }
    assert set(document) == {"hooks", "models", "matrix"}


@pytest.mark.parametrize("form", ["llama-swap", "llama-swap-groups"])
@pytest.mark.parametrize("path", PATHS)
def test_llama_swap_reads_every_name_and_path(form: str, path: str) -> None:
    fleet = hostile(path)
    document = read(render_fleet(fleet, form), "llama-swap")
    assert list(document["models"]) == [model.name for model in fleet.models]
    assert document["hooks"]["on_startup"]["preload"] == ["chat"]
    for model in fleet.models:
        command = split(document["models"][model.name]["cmd"])
        assert command == ["llama-server", "--port", "${PORT}", *words_of(model.plan)]
    if form == "llama-swap":
        assert list(document["matrix"]["vars"].values()) == [model.name for model in fleet.models]
    else:
        assert {name for group in document["groups"].values() for name in group["members"]} == set(document["models"])


@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(names, min_size=2, max_size=3, unique=True))
def test_llama_swap_reads_any_name(drawn: list[str]) -> None:
    fleet = make_fleet(dict.fromkeys(drawn, 1), 2, residents=drawn[:1])
    for form in ("llama-swap", "llama-swap-groups"):
        assert list(read(render_fleet(fleet, form), "llama-swap")["models"]) == drawn


@cases("llama-swap", "llama-swap-groups")
def test_llama_swap_has_no_escape_for_macros_in_names(form: str) -> None:
    message = r"^llama-swap would take '\$\{' in 'a\$\{b}' for a macro: rename the model$"
    with pytest.raises(PlanError, match=message):
        render_fleet(make_fleet({"a${b}": 1}, 1), form)


@cases((60.0, None), (60.2, 121))
def test_llama_swap_waits_for_slow_loads(seconds: float, expected: int | None) -> None:
    fleet = make_fleet({"a": 1, "b": 1}, 2, loads={"a": seconds, "b": 1.0})
    for form in ("llama-swap", "llama-swap-groups"):
        assert read(render_fleet(fleet, form), "llama-swap").get("healthCheckTimeout") == expected


# --- llama-swap with groups


def unloaded(groups: Mapping[str, Any], asked: str, running: Collection[str]) -> set[str]:
    """What llama-swap unloads for ``asked``, by its groups (``internal/router/group.go:70`` at 0bdb372)."""
    (own,) = (group for group in groups.values() if asked in group["members"])
    siblings = set(own["members"]) if own["swap"] else set()
    protected = {name for group in groups.values() if group["persistent"] for name in group["members"]}
    others = set(running) - set(own["members"]) - protected if own["exclusive"] else set()
    return ((siblings & set(running)) | others) - {asked}


def states(groups: Mapping[str, Any], models: Collection[str]) -> set[frozenset[str]]:
    """Every set of models that any requests can bring into memory together."""
    found, waiting = {frozenset[str]()}, [frozenset[str]()]
    while waiting:
        running = waiting.pop()
        for asked in models:
            then = frozenset({asked, *running} - unloaded(groups, asked, running))
            if then not in found:
                found.add(then)
                waiting.append(then)
    return found


def largest(groups: Mapping[str, Any], models: Collection[str]) -> frozenset[frozenset[str]]:
    """The sets of models that may be in memory together, without those that are a part of another."""
    found = states(groups, models)
    return frozenset(one for one in found if not any(one < other for other in found))


def partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    if not names:
        yield []
        return
    for rest in partitions(names[1:]):
        yield [[names[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [names[0], *part], *rest[index + 1 :]]


@cache
def expressible(names: str) -> frozenset[frozenset[frozenset[str]]]:
    """Everything that groups can say about these models: each division into groups, each group of every kind."""
    found = set()
    keys = ("swap", "exclusive", "persistent")
    for parts in partitions(list(names)):
        kinds = (product((True,) if len(part) == 1 else (False, True), *[(False, True)] * 2) for part in parts)
        for chosen in product(*kinds):
            each = zip(parts, chosen, strict=True)
            groups = {
                str(index): {**dict(zip(keys, kind, strict=True)), "members": part}
                for index, (part, kind) in enumerate(each)
            }
            found.add(largest(groups, names))
    return frozenset(found)


def unsaid(text: str) -> set[frozenset[str]]:
    """The sets of which a comment says that groups cannot keep them."""
    return {frozenset(json.loads(f"[{line}]")) for line in comments(text) if line.startswith("  ")}


@settings(max_examples=200, deadline=None)
@given(fleet=fleets("abcd"))
@example(fleet=make_fleet(dict.fromkeys("abcd", 1), 2))
@example(fleet=make_fleet(dict.fromkeys("abcd", 1), 4, never=[("a", "b"), ("b", "c")]))
@example(fleet=make_fleet(dict.fromkeys("abcd", 1), 4, never=[("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]))
def test_groups_say_all_sets_wherever_groups_can(fleet: Fleet) -> None:
    text = render_fleet(fleet, "llama-swap-groups")
    models = [model.name for model in fleet.models]
    allowed = largest(read(text, "llama-swap")["groups"], models)
    planned = frozenset(sets_of(fleet))
    assert (allowed == planned) == (planned in expressible("".join(models)))
    assert unsaid(text) == planned - allowed
    assert any("matrix" in line for line in comments(text)) == (allowed != planned)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_groups_unload_only_what_cannot_stay(data: st.DataObject) -> None:
    """Where groups can say all sets, however many: one place where sets take turns, and models beside it."""
    names = data.draw(st.permutations("abcdefg"))
    places = data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7))
    blocks = data.draw(st.lists(st.integers(0, 2), min_size=7, max_size=7))
    turn = {
        name: (place, block if place == 0 else name) for name, place, block in zip(names, places, blocks, strict=True)
    }
    never = [(a, b) for a, b in combinations(sorted(names), 2) if turn[a][0] == turn[b][0] and turn[a] != turn[b]]
    fleet = make_fleet(dict.fromkeys(sorted(names), 1), 7, never=never)
    text = render_fleet(fleet, "llama-swap-groups")
    groups = read(text, "llama-swap")["groups"]
    assert largest(groups, names) == frozenset(sets_of(fleet))
    assert not comments(text)[1:]
    for running in states(groups, names):
        for asked in set(names) - running:
            rivals = {other for other in running if (asked, other) in never or (other, asked) in never}
            assert unloaded(groups, asked, running) == rivals


def test_groups_list_no_more_sets_than_a_reader_reads() -> None:
    text = render_fleet(make_fleet(dict.fromkeys("abcdef", 1), 3), "llama-swap-groups")
    allowed = largest(read(text, "llama-swap")["groups"], "abcdef")
    *listed, last = (line for line in comments(text) if line.startswith("  "))
    assert len(listed) == 12 < 20 - len(allowed)
    assert last == f"  and {20 - len(allowed) - 12} more: 'fitter fleet' lists what fits together"


@settings(max_examples=150, deadline=None)
@given(fleet=fleets())
@example(fleet=make_fleet(dict.fromkeys("abcde", 1), 2))
@example(fleet=make_fleet(dict.fromkeys("abcd", 1), 3, never=[("a", "b")]))
def test_groups_bring_nothing_together_that_does_not_fit(fleet: Fleet) -> None:
    groups = read(render_fleet(fleet, "llama-swap-groups"), "llama-swap")["groups"]
    members = [name for group in groups.values() for name in group["members"]]
    assert sorted(members) == sorted(model.name for model in fleet.models)
    found = states(groups, members)
    for state in found:
        assert any(state <= one for one in sets_of(fleet)), f"{set(state)} does not fit"
    stay = {model.name for model in fleet.models if model.stays}
    for state in found:
        assert all(not stay & unloaded(groups, asked, state) for asked in members)
    # what fits together needs no swap
    if len(fleet.sets) == 1:
        assert frozenset(members) in found and len(groups) == 1


def groups_of(fleet: Fleet) -> dict[str, str]:
    text = render_fleet(fleet, "llama-swap-groups")
    groups = read(text, "llama-swap")["groups"]
    kinds = {
        "stay": (False, False, True),
        "turns": (True, True, False),
        "together": (False, True, False),
        "beside": (True, False, True),
    }
    for name, group in groups.items():
        assert (group["swap"], group["exclusive"], group["persistent"]) == kinds[name.rstrip("0123456789")]
    return {name: "".join(group["members"]) for name, group in groups.items()}


THREE = dict.fromkeys("abc", 1)


@named_cases(
    ("all fit", make_fleet({"a": 1, "b": 2}, 3), {"stay1": "ab"}),
    ("one at a time", make_fleet({"a": 2, "b": 2, "c": 2}, 3), {"turns1": "abc"}),
    ("one stays", make_fleet({"a": 2, "s": 1, "b": 2}, 3, residents=["s"]), {"stay1": "s", "turns1": "ab"}),
    ("one may not be evicted", make_fleet({"a": 2, "s": 1, "b": 2}, 3, kept=["s"]), {"stay1": "s", "turns1": "ab"}),
    ("two against one", make_fleet({"a": 1, "b": 1, "c": 2}, 2), {"turns1": "c", "together1": "ab"}),
    ("two and two", make_fleet({"a": 4, "b": 4, "c": 1, "d": 1}, 5), {"turns1": "cd", "beside1": "ab"}),
    (
        *("the one that costs most to load", make_fleet(THREE, 2, loads={"a": 1.0, "b": 5.0, "c": 6.0})),
        {"stay1": "c", "turns1": "ab"},
    ),
    (
        *("the one that is asked for most", make_fleet(THREE, 2, shares={"a": 0.3, "b": 0.6, "c": 0.1})),
        {"stay1": "b", "turns1": "ac"},
    ),
)
def test_the_groups_of_a_fleet(fleet: Fleet, expected: dict[str, str]) -> None:
    assert groups_of(fleet) == expected


@settings(max_examples=30, deadline=None)
@given(fleet=fleets())
def test_groups_load_no_more_than_one_group_of_all(fleet: Fleet) -> None:
    """No request unloads more than if all models that do not stay took turns."""
    stay = {model.name for model in fleet.models if model.stays}
    others = [model.name for model in fleet.models if not model.stays]
    single = {
        "stay": {"swap": False, "exclusive": False, "persistent": True, "members": sorted(stay)},
        "turns": {"swap": True, "exclusive": True, "persistent": False, "members": others},
    }
    chosen = read(render_fleet(fleet, "llama-swap-groups"), "llama-swap")["groups"]
    for asked, running in ((a, b) for a in others for b in states(single, [*stay, *others]) if a not in b):
        assert unloaded(chosen, asked, running) <= unloaded(single, asked, running)


# --- llama-server's router


def preset(text: str) -> dict[str, dict[str, str]]:
    """The sections of a preset, by llama-server's grammar: ``;`` and ``#`` begin comments, in values as well."""
    sections: dict[str, dict[str, str]] = {"default": {}}
    current = "default"
    for line in text.split("\n"):
        if re.fullmatch(r"[ \t]*([;#].*)?", line):
            continue
        if header := re.fullmatch(r"\[[ \t]*([^]]+?)[ \t]*][ \t]*([;#].*)?", line):
            current = header[1]
            assert current not in sections and current != "*" and ":" not in current
            sections[current] = {}
            continue
        pair = re.fullmatch(r"([a-zA-Z_][\w.-]*)[ \t]*=[ \t]*(.*?)[ \t]*([;#].*)?", line, re.ASCII)
        assert pair, f"llama-server cannot read {line!r}"
        sections[current][pair[1]] = pair[2]
    return sections


def comments(text: str) -> list[str]:
    return [line.removeprefix("# ") for line in text.split("\n") if line.startswith("#")]


def test_a_preset() -> None:
    text = render_fleet(make_fleet({"chat": 2, "code": 2, "embed": 1}, 3, residents=["embed"]), "ini")
    assert text.splitlines()[:10] == [
        "# llama-server --models-preset FILE --models-max 1",
        "# Some two of these models do not fit together, so it has only one in memory.",
        "# llama-server only counts them: it unloads the least recently used one before it loads one more.",
        "# It cannot be told which sets of models fit together, nor which model must stay.",
        "version = 1",
        "",
        "[chat]",
        "model = /m/0.gguf",
        "ctx-size = 4096",
        "n-gpu-layers = 33",
    ]
    sections = preset(text)
    assert list(sections) == ["default", "chat", "code", "embed"]
    assert {name: each.get("load-on-startup") for name, each in sections.items() if name != "default"} == {
        "chat": None,
        "code": None,
        "embed": "true",
    }


def test_a_preset_of_models_that_all_fit() -> None:
    text = render_fleet(make_fleet({"a": 1, "b": 1}, 2, residents=["a", "b"]), "ini")
    assert comments(text) == ["llama-server --models-preset FILE --models-max 2", "All models fit together."]
    assert [each.get("load-on-startup") for each in preset(text).values()] == [None, "true", "true"]


def test_a_preset_loads_no_more_at_the_start_than_it_may_have() -> None:
    # llama-server would not start
    fleet = make_fleet({"a": 1, "b": 1, "big": 4, "huge": 5}, 7, residents=["a", "b"])
    assert fleet.any_together == 1
    text = render_fleet(fleet, "ini")
    assert comments(text)[-1] == "It loads 1 of 2 models at the start, because it may have no more."
    assert [name for name, each in preset(text).items() if "load-on-startup" in each] == ["a"]


@cases((2, 2), (3, 3), (4, 4))
def test_a_preset_says_how_many(room: int, most: int) -> None:
    text = render_fleet(make_fleet(dict.fromkeys("abcd", 1), room), "ini")
    assert comments(text)[0] == f"llama-server --models-preset FILE --models-max {most}"


@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(names, min_size=2, max_size=3, unique_by=lambda name: re.sub(r"[^\w.+-]+", "-", name)))
@example(drawn=list(NAMES[:4]))
@example(drawn=["#c", "a:b", "模型", "d[e"])
def test_a_preset_has_a_section_for_any_name(drawn: list[str]) -> None:
    fleet = make_fleet(dict.fromkeys(drawn, 1), 2)
    sections = preset(render_fleet(fleet, "ini"))
    assert list(sections) == ["default", *(re.sub(r"[^\w.+-]+", "-", name) for name in drawn)]
    assert [each["model"] for each in list(sections.values())[1:]] == [model.plan.model.path for model in fleet.models]


# --- compose


def services(text: str) -> dict[str, Any]:
    """The services of a compose file."""
    return dict(read(text, "compose-spec")["services"])


def test_compose_starts_all_that_fit_together() -> None:
    text = render_fleet(make_fleet({"chat": 2, "embed": 1}, 3), "compose")
    found = services(text)
    assert list(found) == ["chat", "embed"] and comments(text) == []
    assert [each["ports"] for each in found.values()] == [["127.0.0.1:8080:8080"], ["127.0.0.1:8081:8080"]]
    for each in found.values():
        assert "profiles" not in each
        # the image checks the health there
        assert each["command"][-4:] == ["--host", "0.0.0.0", "--port", "8080"]


def test_compose_starts_what_stays() -> None:
    text = render_fleet(make_fleet({"chat": 2, "c": 2, "embed": 1}, 3, residents=["embed"]), "compose")
    assert {name: each.get("profiles") for name, each in services(text).items()} == {
        "chat": ["chat"],
        "model-c": ["model-c"],
        "embed": None,
    }
    assert comments(text) == [
        "docker compose up -d starts embed.",
        "docker compose up -d NAME starts another model, and docker compose stop NAME ends one.",
        "Compose ends none by itself. These fit together:",
        "  chat, embed",
        "  model-c, embed",
    ]


def test_compose_starts_nothing_where_nothing_stays() -> None:
    text = render_fleet(make_fleet({"chat": 2, "code": 2}, 3), "compose")
    assert all("profiles" in each for each in services(text).values())
    assert comments(text) == [
        "docker compose up -d NAME starts another model, and docker compose stop NAME ends one.",
        "Compose ends none by itself. One of them fits, and no more.",
    ]


def test_compose_says_that_any_two_fit() -> None:
    text = render_fleet(make_fleet(dict.fromkeys("abc", 1), 2), "compose")
    assert comments(text)[1:] == ["Compose ends none by itself. Any 2 of them fit together, and no more."]


@pytest.mark.parametrize("path", PATHS)
def test_compose_reads_every_name_and_path(path: str) -> None:
    needs = dict.fromkeys(("true", "1.5", "a:b", "$HOME", "'q'", "-x", "..", "models/é.gguf"), 1)
    fleet = make_fleet(needs, 1, plans={name: plan_of(path) for name in needs})
    found = services(render_fleet(fleet, "compose"))
    assert list(found) == ["true", "1.5", "a-b", "HOME", "q-", "model-x", "model", "models-.gguf"]
    for each in found.values():
        assert each["volumes"][0]["source"] == path.replace("$", "$$")
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", each["profiles"][0])


# --- systemd


def units(text: str) -> dict[str, str]:
    """The units by their files' names, cut at the comments above them."""
    parts = re.split(r"^# (\S+\.service)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def settings_of(unit: str) -> dict[str, str]:
    """The settings of a unit, each of which it has once."""
    assert not re.search(r"\\$", unit, re.MULTILINE), "the next line would be joined"
    pairs = [line.split("=", 1) for line in unit.splitlines() if line and not line.startswith(("[", "#"))]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def command(line: str) -> list[str]:
    """The words of a command line, as systemd reads it: quotes and escapes first, then ``%`` and ``$``."""
    words, rest = list[str](), line
    while rest := rest.lstrip(" \t"):
        quote = rest[0] if rest[0] in "'\"" else ""
        end = quote or r"[ \t]"
        found = re.match(rf"{quote}((?:\\.|(?!{end}).)*){quote}(?=[ \t]|$)", rest)
        assert found, f"a quote has no end: {rest}"
        assert quote or not re.search("['\"]", found[1]) or not found[1].startswith(("'", '"'))
        word = re.sub(r"\\(.)", lambda each: {"\\": "\\", '"': '"', "'": "'", "s": " "}[each[1]], found[1])
        assert "%" not in word.replace("%%", ""), f"systemd would replace a specifier in {word}"
        word = word.replace("%%", "%")
        assert not re.search(r"\$\{|^\$\w", word.replace("$$", "")), f"systemd would replace a variable in {word}"
        words.append(word.replace("$$", "$"))
        rest = rest[found.end() :]
    return words


def test_a_unit() -> None:
    text = render_fleet(make_fleet({"chat": 2, "code": 2, "embed": 1}, 3, residents=["embed"]), "systemd")
    assert comments(text)[:5] == [
        "Save each unit in ~/.config/systemd/user, in a file with the name above it, and then:",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now llama-embed.service",
        "llama-server is looked for in /usr/local/bin and /usr/bin: write its path if it is elsewhere.",
        "A model that is started stops those that it does not fit together with.",
    ]
    found = units(text)
    assert found["llama-code.service"].strip().splitlines() == [
        "[Unit]",
        "Description=code with llama-server",
        "Conflicts=llama-chat.service",
        "After=llama-chat.service",
        "",
        "[Service]",
        "Type=exec",
        "ExecStart=llama-server -m /m/1.gguf -c 4096 -ngl 33 -np 1 -fit off --port 8081",
        "Restart=on-failure",
    ]
    assert [name for name, u in found.items() if "[Install]\nWantedBy=default.target" in u] == ["llama-embed.service"]
    assert [settings_of(unit)["ExecStart"].split()[-1] for unit in found.values()] == ["8080", "8081", "8082"]


@settings(max_examples=60, deadline=None)
@given(fleet=fleets())
def test_units_stop_those_that_they_do_not_fit_with(fleet: Fleet) -> None:
    found = {
        name.removeprefix("llama-").removesuffix(".service"): settings_of(unit)
        for name, unit in units(render_fleet(fleet, "systemd")).items()
    }
    assert list(found) == [model.name for model in fleet.models]
    listed = {key: {name: each.get(key, "").split() for name, each in found.items()} for key in ("Conflicts", "After")}
    for one in found:
        for other in found:
            fits = any({one, other} <= each for each in sets_of(fleet))
            assert (f"llama-{other}.service" in listed["Conflicts"][one]) == (not fits)
            # systemd ends the one before it starts the other if either says After, and both would be a circle
            said = (f"llama-{other}.service" in listed["After"][one], f"llama-{one}.service" in listed["After"][other])
            assert sum(said) == (not fits)


@cases(
    (make_fleet(dict.fromkeys("abc", 1), 3), []),
    (make_fleet(dict.fromkeys("abc", 1), 2), ["a, b and c do not fit together, although any two of them do"]),
    (make_fleet(dict.fromkeys("abc", 1), 1), []),
    (make_fleet(dict.fromkeys("abcd", 1), 3), ["a, b, c and d do not fit together, although any three of them do"]),
    (
        make_fleet(dict.fromkeys("abcd", 1), 2, never=[("a", "b")]),
        [
            "a, c and d do not fit together, although any two of them do",
            "b, c and d do not fit together, although any two of them do",
        ],
    ),
)
def test_units_say_what_pairs_cannot_express(fleet: Fleet, expected: list[str]) -> None:
    said = [line for line in comments(render_fleet(fleet, "systemd")) if " although " in line]
    named = [re.sub(r"\b([a-d])\b", r"llama-\1", each) for each in expected]
    assert said == [f"{each}: systemd stops none of them, so stop one yourself." for each in named]


def test_units_that_all_fit_stop_none() -> None:
    text = render_fleet(make_fleet({"a": 1, "b": 1}, 2), "systemd")
    assert "Conflicts=" not in text
    assert comments(text)[2:4] == [
        "systemctl --user start llama-a.service",
        "llama-server is looked for in /usr/local/bin and /usr/bin: write its path if it is elsewhere.",
    ]
    assert comments(text)[4] == "llama-a.service"


def test_units_say_no_more_than_a_reader_reads() -> None:
    said = comments(render_fleet(make_fleet(dict.fromkeys("abcdef", 1), 2), "systemd"))
    assert len([line for line in said if " although " in line]) == 12
    assert "8 more such groups are not listed: 'fitter fleet' lists what fits together." in said


@pytest.mark.parametrize("path", PATHS)
def test_systemd_reads_every_name_and_path(path: str) -> None:
    fleet = hostile(path)
    found = units(render_fleet(fleet, "systemd"))
    assert len(found) == len(fleet.models)
    for number, (model, unit) in enumerate(zip(fleet.models, found.values(), strict=True)):
        each = settings_of(unit)
        assert each["Description"] == f"{model.name.replace('%', '%%')} with llama-server"
        assert command(each["ExecStart"]) == ["llama-server", *words_of(model.plan), "--port", str(8080 + number)]


@settings(max_examples=40, deadline=None)
@given(path=printable_paths | st.text(" \\\"'$%;a", min_size=1).map(lambda name: f"/m/{name}"))
def test_systemd_reads_any_path(path: str) -> None:
    plan = plan_of(path)
    (unit,) = units(render_fleet(make_fleet({"a": 1}, 1, plans={"a": plan}), "systemd")).values()
    assert command(settings_of(unit)["ExecStart"]) == ["llama-server", *words_of(plan), "--port", "8080"]


@pytest.fixture
def verify(tmp_path: Path) -> Iterator[Callable[[Mapping[str, str]], str]]:
    """What systemd-analyze says about units, with another program in place of llama-server, which it would look for."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")

    def said(units: Mapping[str, str]) -> str:
        paths = []
        for name, unit in units.items():
            paths.append(tmp_path / name)
            paths[-1].write_text(unit.replace("ExecStart=llama-server", "ExecStart=/bin/true"))
        done = subprocess.run([program, "verify", "--man=no", *paths], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    yield said


def test_systemd_accepts_the_units(verify: Callable[[Mapping[str, str]], str]) -> None:
    for path in (PATHS[1], PATHS[2], PATHS[3], PATHS[5], "/m/%Q %h;.gguf"):
        assert verify(units(render_fleet(hostile(path), "systemd"))) == ""
    unit = units(render_fleet(hostile("/m/%Q.gguf"), "systemd"))["llama-chat.service"]
    assert "Failed to resolve unit specifiers" in verify({"llama-chat.service": unit.replace("%%Q", "%Q")})
