"""Fleets, planned by the real libllama: every set within every margin, and what the command says and records."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import fitter
from fitter.errors import UsageError
from fitter.machine.speed import named
from fitter.output.keywords import fit_kwargs
from fitter.parameters.targets import FLEET_FORMATS
from fitter.regression.lockfile import read_lock
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tools.fleets.cases import FLEETS, FleetExample
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

EXAMPLES = {example.name: example for example in FLEETS}
LONG = ("six large models on eight cards", "eight models on two cards")


@functools.cache
def planned(name: str) -> fitter.Fleet:
    example = EXAMPLES[name]
    return fitter.fleet(example.models, **example.keywords)


def of_process(description: str) -> int:
    """What a process takes of a card before it loads anything, by the catalogue."""
    return max(
        (0 if card.unified else (card.usable or card.total) - card.free for card in named(description)), default=0
    )


def used(plan: Mapping[str, Any], place: str) -> int:
    """The bytes of a plan's document at a place, without what it keeps free for others."""
    beside = sum(
        sum(row[kind] for kind in ("model", "context", "compute"))
        for use in plan["shared"]
        if use["kind"] in ("reserve", "beside")
        for row in use["memory"]
        if (row["device"] or "host") == place
    )
    uses = {use["name"]: use["used"] for use in plan["devices"]} | {"host": plan["host"]["used"]}
    return int(uses.get(place, 0)) - beside


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in EXAMPLES]
)
def test_every_set_is_within_every_margin(name: str) -> None:
    fleet = planned(name)
    assert fleet.fits
    document = json.loads(json.dumps(fleet.to_dict()))
    plans = {model["name"]: model["plan"] for model in document["models"]}
    staying = {model.name for model in fleet.models if model.stays}
    for each in document["sets"]:
        inside = [plans[model] for model in each["models"]]
        assert staying <= set(each["models"])
        for device in inside[0]["devices"]:
            uses = [size for plan in inside if (size := used(plan, device["name"]))]
            others = max(0, len(uses) - 1) * of_process(device["description"])
            assert sum(uses) + others <= device["free"] - device["margin"]
        host = inside[0]["host"]
        if host["free"] is not None:
            assert sum(used(plan, "host") for plan in inside) <= host["free"] - host["margin"]
        for pool in inside[0]["pools"]:
            both = sum(used(plan, member) for plan in inside for member in pool["members"])
            assert both <= pool["free"] - pool["margin"]
    assert fleet.bound_seconds <= fleet.seconds + 1e-9
    forbidden = {
        frozenset((one, other)) for one, words in EXAMPLES[name].models.items() for other in words.get("never_with", ())
    }
    for each in fleet.sets:
        assert not any(frozenset(pair) in forbidden for pair in itertools.combinations(each.models, 2))


def test_each_plan_stands_beside_the_plans_of_its_set(tmp_path: Path) -> None:
    fleet = planned("four models on two unequal cards")
    example = EXAMPLES["four models on two unequal cards"]
    (first, *_) = fleet.sets
    files = {}
    for name in first.models:
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(fleet.model(name).plan.to_dict()))
    for name in first.models:
        plan = fleet.model(name).plan
        fixed = {word: value for word, value in fit_kwargs(plan).items() if word not in ("reserve", "cache_ram")}
        beside = [file for other, file in files.items() if other != name]
        again = fitter.fit(
            example.models[name]["model"], beside=beside, **{**example.keywords, **fixed, "program": "llama-server"}
        )
        assert again.fits
        assert again.breakdown.rows == plan.breakdown.rows


def test_the_same_fleet_has_the_same_answer() -> None:
    name = "two models too large together on a small card"
    example = EXAMPLES[name]
    again = fitter.fleet(example.models, jobs=1, **example.keywords)

    def told(fleet: fitter.Fleet) -> Any:
        document = fleet.to_dict()
        for model in document["models"]:
            del model["plan"]["search"]
        return {key: value for key, value in document.items() if key != "dummy_loads"}

    assert told(again) == told(planned(name))


GOALS = {
    # of these three only one way has all in memory
    "time": lambda fleet: fleet.seconds,
    "resident": lambda fleet: -len(fleet.sets[0].models),
    "alone": lambda fleet: max(model.seconds / model.alone_seconds for model in fleet.models),
}


def test_each_goal_is_reached_best_by_asking_for_it() -> None:
    example = EXAMPLES["a large expert model and two small ones"]
    fleets = {goal: fitter.fleet(example.models, goal=goal, **example.keywords) for goal in GOALS}
    for goal, value in GOALS.items():
        assert value(fleets[goal]) == min(map(value, fleets.values())), goal
    assert GOALS["alone"](fleets["alone"]) == 1


def test_more_memory_and_a_faster_disk_make_no_fleet_slower() -> None:
    models = {name: {"model": f"shape://{name}"} for name in ("llama-3.1-8b", "qwen2-7b", "gemma-2-9b")}
    seconds = []
    for gpu, disk in (("8GiB", "1GB/s"), ("8GiB", "4GB/s"), ("16GiB", "4GB/s"), ("24GiB", "4GB/s")):
        fleet = fitter.fleet(models, gpus=gpu, host_memory="64GiB", disk_bandwidth=disk, cache_ram=512)
        seconds.append(fleet.seconds)
    assert seconds == sorted(seconds, reverse=True)


REFUSED = {
    "one model": ({"a": {}}, "a fleet has 2 to 12 models, and this one 1: add another one"),
    "thirteen models": (
        {f"m{index}": {"model": "shape://qwen2-7b"} for index in range(13)},
        "a fleet has 2 to 12 models, and this one 13: leave some out",
    ),
    "no model": ({"a": {"model": ""}, "b": {}}, "'a' has no model: give a path or an address as model"),
    "a model that is gone": (
        {"a": {"model": "gone.gguf"}, "b": {"model": "shape://qwen2-7b"}},
        "the model of 'a' is gone: gone.gguf does not exist",
    ),
    "a keyword that fit has not": (
        {"a": {"model": "shape://qwen2-7b", "n_ctxx": 1}, "b": {"model": "shape://qwen2-7b"}},
        "'a': fit has no keyword n_ctxx: did you mean n_ctx?",
    ),
    "never with nobody": (
        {"a": {"model": "shape://qwen2-7b", "never_with": ["c"]}, "b": {"model": "shape://qwen2-7b"}},
        "'a' is never with 'c', which is no model of the fleet",
    ),
    "a share of text": (
        {"a": {"model": "shape://qwen2-7b", "share": "x"}, "b": {"model": "shape://qwen2-7b"}},
        "the share of 'a' is 'x': give a number of at least 0",
    ),
}


@cases(REFUSED)
def test_bad_input_is_one_line(models: Any, message: str) -> None:
    if len(models) == 1:
        models = {"a": {"model": "shape://qwen2-7b"}}
    with pytest.raises(UsageError) as error:
        fitter.fleet(models, gpus="24GiB")
    assert str(error.value) == message


def chat_and_coder(**coder: Any) -> dict[str, dict[str, Any]]:
    return {
        "chat": {"model": "shape://qwen3-32b", "n_ctx": 8192, "resident": True},
        "coder": {"model": "shape://qwen2.5-14b", "n_ctx": 8192, "resident": True, **coder},
    }


SMALL = {"gpus": "16GiB", "host_memory": "12GiB"}
UNFIT = {
    "two that must stay": (
        chat_and_coder(),
        SMALL,
        r"the models that always stay \(chat, coder\) do not fit together: \w+ lacks \d+ MiB; it fits if 'chat' and "
        "'coder' may be evicted",
    ),
    "one beside one that must stay": (
        chat_and_coder(resident=False),
        SMALL,
        r"'coder' does not fit beside the models that always stay \(chat\): \w+ lacks \d+ MiB; it fits if 'chat' may "
        "be evicted",
    ),
    "two that must stay and are never together": (
        chat_and_coder(never_with=["chat"]),
        SMALL,
        "'chat' always stays in memory, but must never be with 'coder': let it be evicted",
    ),
    "one alone": (
        {"chat": {"model": "shape://llama-3.1-70b"}, "coder": {"model": "shape://qwen2-7b"}},
        {"gpus": "8GiB", "host_memory": "16GiB"},
        "'chat' does not fit on this machine, even alone: .*",
    ),
}


@cases(UNFIT)
def test_what_does_not_fit_is_one_line_with_a_remedy(models: Any, machine: Any, message: str) -> None:
    fleet = fitter.fleet(models, cache_ram=512, **machine)
    assert not fleet
    (problem,) = fleet.problems
    assert re.fullmatch(message, problem)
    assert str(fleet) == f"does not fit: {problem}"


# --- the command

TOML = """
[defaults]
gpu = ["8GiB"]
host_memory = "64GiB"
cache_ram = 512
program = "llama-server"
[cases.chat]
model = "shape://llama-3.1-8b"
n_ctx = 8192
[cases.embed]
model = "shape://nomic-embed-text-v1.5"
embedding = true
[fleet.models.embed]
share = 3
resident = true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fitter.toml").write_text(TOML)
    return tmp_path


def test_the_command_prints_tables_json_and_every_format(folder: Path) -> None:
    table = run_fitter("fleet", cwd=folder)
    assert (table.returncode, table.stderr) == (0, "")
    assert "embed (stays)" in table.stdout
    document = json.loads(run_fitter("fleet", "--json", cwd=folder).stdout)
    assert [model["name"] for model in document["models"]] == ["chat", "embed"]
    for name in FLEET_FORMATS:
        done = run_fitter("fleet", "--format", name, cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
    config = yaml.safe_load(run_fitter("fleet", "--format", "llama-swap", cwd=folder).stdout)
    assert set(config["models"]) == {"chat", "embed"}


def test_here_is_this_machine_whatever_the_cases_name(tmp_path: Path) -> None:
    for model in (TINY_MOE, TINY_DENSE):
        write_tiny(tmp_path / f"{model.name.replace(' ', '-')}.gguf", model)
    names = sorted(path.name for path in tmp_path.glob("*.gguf"))
    cases = "".join(f'[cases.m{index}]\nmodel = "{name}"\n' for index, name in enumerate(names))
    (tmp_path / "fitter.toml").write_text(f'[defaults]\ngpu = ["rtx-4090"]\n{cases}[fleet]\n')
    described = json.loads(run_fitter("fleet", "--json", cwd=tmp_path).stdout)
    here = json.loads(run_fitter("fleet", "--json", "--here", cwd=tmp_path).stdout)
    assert [use["name"] for use in described["sets"][0]["memory"]] == ["CUDA0", "host"]
    assert [use["name"] for use in here["sets"][0]["memory"]] == ["host"]
    assert here["sets"][0]["models"] == ["m0", "m1"]
    assert here["sets"][0]["memory"][0]["room"] > 0


def test_the_command_says_what_does_not_fit(folder: Path) -> None:
    (folder / "fitter.toml").write_text(TOML.replace("n_ctx = 8192", "n_ctx = 131072\nn_gpu_layers = 33"))
    done = run_fitter("fleet", "--format", "ini", cwd=folder)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fitter: does not fit: 'chat' does not fit on this machine, even alone: ")


def test_the_command_needs_a_fleet(tmp_path: Path) -> None:
    done = run_fitter("fleet", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fitter: error: fitter.toml does not exist: ")
    (tmp_path / "fitter.toml").write_text('[cases.a]\nmodel = "a.gguf"\n')
    done = run_fitter("fleet", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == 'fitter: error: fitter.toml has no fleet: add [fleet] with goal = "time"\n'


def test_a_model_that_grows_fails_the_set_by_name(folder: Path) -> None:
    assert run_fitter("lock", cwd=folder).returncode == 0
    lock = read_lock(folder / "fitter.lock").fleet
    assert lock is not None
    assert lock.sets == (("chat", "embed"),)
    same = run_fitter("check", "-v", cwd=folder)
    assert (same.returncode, same.stderr) == (0, "")
    assert "fleet/chat+embed same" in same.stdout
    (folder / "fitter.toml").write_text(TOML.replace("n_ctx = 8192", "n_ctx = 30720\nmax_growth = '100%'"))
    grown = run_fitter("check", "--json", cwd=folder)
    assert grown.returncode == 4
    (failed,) = [case for case in json.loads(grown.stdout)["cases"] if case["name"].startswith("fleet/")]
    assert failed["status"] == "failed"
    assert failed["failures"][0].startswith("chat, embed no longer fit together: CUDA0 takes ")
    assert any(cause["what"] == "chat on CUDA0" for cause in failed["causes"])


def test_a_check_needs_no_log(folder: Path) -> None:
    toml = TOML.replace("share = 3\n", "").replace(
        "[fleet.models.embed]", '[fleet]\nlog = "router.log"\n[fleet.models.embed]'
    )
    (folder / "fitter.toml").write_text(toml)
    line = "srv  proxy_reques: proxying request to model {} on port 40001\n"
    (folder / "router.log").write_text(line.format("chat") + line.format("embed") * 3)
    document = json.loads(run_fitter("fleet", "--json", cwd=folder).stdout)
    assert {model["name"]: model["share"] for model in document["models"]} == {"chat": 0.25, "embed": 0.75}
    assert run_fitter("lock", cwd=folder).returncode == 0
    (folder / "router.log").unlink()
    assert run_fitter("check", cwd=folder).returncode == 0
    done = run_fitter("fleet", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.endswith("router.log does not exist: give the log of a server\n")


def test_a_check_needs_the_fleet_in_the_lock(folder: Path) -> None:
    (folder / "fitter.toml").write_text(TOML.partition("[fleet")[0])
    assert run_fitter("lock", cwd=folder).returncode == 0
    (folder / "fitter.toml").write_text(TOML)
    done = run_fitter("check", cwd=folder)
    assert done.returncode == 2
    assert "the fleet in fitter.toml is not in fitter.lock: run 'fitter lock'" in done.stderr


def test_one_updated_case_leaves_the_fleet_in_the_lock(folder: Path) -> None:
    assert run_fitter("lock", cwd=folder).returncode == 0
    before = read_lock(folder / "fitter.lock").fleet
    assert run_fitter("lock", "--update", "chat", cwd=folder).returncode == 0
    assert read_lock(folder / "fitter.lock").fleet == before
    (folder / "fitter.toml").write_text(TOML.partition("[fleet")[0])
    done = run_fitter("check", cwd=folder)
    assert "fitter: error: fleet: the case is in fitter.lock, but not in fitter.toml" in done.stderr
    assert run_fitter("lock", "--prune", cwd=folder).returncode == 0
    assert read_lock(folder / "fitter.lock").fleet is None


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fleet of a lock, without the cases: each of its models is only in the fleet."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "fitter.toml").write_text(TOML)
    assert run_fitter("lock", cwd=folder).returncode == 0
    text = (folder / "fitter.lock").read_text()
    return "schema = 1\n" + text[text.index("[fleet]") :]


@named_cases(
    ("a build in the cases", ("./evil", ""), "llama_cpp is './evil', which is native code"),
    ("a build in the lock", ("", "llama_cpp = './evil'"), "'chat' has llama_cpp in the lock, which no fleet records"),
    ("a backend in the lock", ("", "profile = 'library:/x'"), "'chat' has profile in the lock, which no fleet records"),
    ("a server in the lock", ("", "rpc = 'evil:1'"), "'chat' has rpc in the lock, which no fleet records"),
    ("a file in the lock", ("", "mmproj = '/etc/x'"), "'chat' has mmproj in the lock, which no fleet records"),
)
def test_neither_file_runs_what_nobody_trusts(words: tuple[str, str], message: str, lock: str, tmp_path: Path) -> None:
    build, keyword = words
    toml = TOML.replace("[defaults]\n", f"[defaults]\nllama_cpp = '{build}'\n") if build else TOML
    head = "[fleet.models.chat.keywords]\n"
    assert head in lock
    (tmp_path / "fitter.toml").write_text(toml)
    (tmp_path / "fitter.lock").write_text(lock.replace(head, f"{head}{keyword}\n"))
    (tmp_path / "evil").mkdir()
    done = run_fitter("check", cwd=tmp_path, FITTER_TRUST=None)
    assert done.returncode == 2
    assert message in done.stderr


def test_sizes_may_be_words_and_a_timeout_is_the_workers() -> None:
    models = {name: {"model": "shape://qwen2.5-0.5b", "fit_ctx": "8k"} for name in ("a", "b")}
    fleet = fitter.fleet(models, gpus="24GiB", host_memory="32GiB", cache_ram=0, timeout=200)
    assert all(model.plan.params.n_ctx >= 8192 for model in fleet.models)


def test_the_users_order_of_devices_is_kept() -> None:
    models = {name: {"model": "shape://llama-3.1-8b", "devices": ["CUDA1", "CUDA0"]} for name in ("a", "b", "c")}
    fleet = fitter.fleet(models, gpus=["8GiB", "8GiB"], host_memory="32GiB", cache_ram=0)
    assert fleet.fits
    for model in fleet.models:
        assert model.plan.breakdown.devices in (("CUDA1", "CUDA0"), ("CUDA1",))


def test_a_budget_counts_no_memory_of_the_others(tmp_path: Path) -> None:
    model = 'model = "shape://llama-3.1-8b"\n'
    toml = TOML.replace("n_ctx = 8192\n", "").replace("cache_ram = 512", "cache_ram = 1024")
    contexts = []
    for budget in ("", '[cases.chat.budget]\nhost = "2GiB"\n'):
        (tmp_path / "fitter.toml").write_text(toml.replace(model, model + budget))
        (chat, _) = json.loads(run_fitter("fleet", "--json", cwd=tmp_path).stdout)["models"]
        contexts.append(chat["plan"]["params"]["n_ctx"])
    # the embedder takes more than the rest of the 2 GiB, which is not the chat's; more context is no longer request
    assert contexts[0] == contexts[1] > 8192


def test_examples_have_all_kinds_of_machines() -> None:
    counts = [len(example.models) for example in EXAMPLES.values()]
    assert (min(counts), max(counts), len(counts)) == (2, 8, 12)
    assert all(isinstance(example, FleetExample) for example in EXAMPLES.values())
