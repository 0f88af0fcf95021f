"""Fleets, planned by the real libllama: every set within every margin, and what the command says and records."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import fitter
from examples.tiny_moe import TinyModel
from fitter.errors import UsageError
from fitter.machine.speed import named
from fitter.output.formats import render_fleet
from fitter.output.keywords import fit_kwargs
from fitter.parameters.targets import FLEET_FORMATS
from fitter.planning.fleet.fleet import Fleet
from fitter.programs.running_server import resident
from fitter.regression.lockfile import read_lock
from tests.support.cases import cases, named_cases, refused
from tests.support.command import Command, run_fitter
from tests.support.patience import SECONDS, all_end, is_running, until
from tools.comparisons import upstream
from tools.fleets.cases import FLEETS, FleetExample
from tools.loopback.rpc_servers import free_port
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

EXAMPLES = {example.name: example for example in FLEETS}
LONG = ("six large models on eight cards", "eight models on two cards", "a large expert model and two small ones")


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
    models = {name: {"model": f"shape://{name}"} for name in ("llama-3.1-8b", "gemma-2-9b")}
    seconds = []
    for gpu, disk in (("8GiB", "1GB/s"), ("8GiB", "4GB/s"), ("24GiB", "4GB/s")):
        fleet = fitter.fleet(models, gpus=gpu, host_memory="64GiB", disk_bandwidth=disk, cache_ram=512)
        seconds.append(fleet.seconds)
    assert seconds == sorted(seconds, reverse=True)


SHAPE = {"model": "shape://qwen2-7b"}
THIRTEEN = {f"m{index}": SHAPE for index in range(13)}


@named_cases(
    ("one model", {"a": SHAPE}, "a fleet has 2 to 12 models, and this one 1: add another one"),
    ("thirteen models", THIRTEEN, "a fleet has 2 to 12 models, and this one 13: leave some out"),
    ("no model", {"a": {"model": ""}, "b": {}}, "'a' has no model: give a path or an address as model"),
    (
        "a model that is gone",
        {"a": {"model": "gone.gguf"}, "b": SHAPE},
        "the model of 'a' is gone: gone.gguf does not exist",
    ),
    (
        "a keyword that fit has not",
        {"a": {**SHAPE, "n_ctxx": 1}, "b": SHAPE},
        "'a': fit has no keyword n_ctxx: did you mean n_ctx?",
    ),
    (
        "never with nobody",
        {"a": {**SHAPE, "never_with": ["c"]}, "b": SHAPE},
        "'a' is never with 'c', which is no model of the fleet",
    ),
    (
        "a share of text",
        {"a": {**SHAPE, "share": "x"}, "b": SHAPE},
        "the share of 'a' is 'x': give a number of at least 0",
    ),
)
def test_bad_input_is_one_line(models: Any, message: str) -> None:
    with refused(UsageError, message):
        fitter.fleet(models, gpus="24GiB")


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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with cases, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fitter.toml").write_text(TOML)
    return tmp_path


def test_the_command_prints_tables_json_and_every_format(folder: Path, command: Command) -> None:
    table = run_fitter("fleet", cwd=folder)
    assert (table.returncode, table.stderr) == (0, "")
    assert "embed (stays)" in table.stdout
    assert [model["name"] for model in command("fleet", "--json").document["models"]] == ["chat", "embed"]
    formats = {name: command("fleet", "--format", name) for name in FLEET_FORMATS}
    assert not {name: each for name, each in formats.items() if each.status or each.err or not each.out}
    assert set(yaml.safe_load(formats["llama-swap"].out)["models"]) == {"chat", "embed"}


def test_here_is_this_machine_whatever_the_cases_name(folder: Path, command: Command) -> None:
    for number, model in enumerate((TINY_MOE, TINY_DENSE)):
        write_tiny(folder / f"{number}.gguf", model)
    cases = "".join(f'[cases.m{number}]\nmodel = "{number}.gguf"\n' for number in (0, 1))
    (folder / "fitter.toml").write_text(f'[defaults]\ngpu = ["rtx-4090"]\n{cases}[fleet]\n')
    described = command("fleet", "--json").document
    here = command("fleet", "--json", "--here").document
    assert [use["name"] for use in described["sets"][0]["memory"]] == ["CUDA0", "host"]
    assert [use["name"] for use in here["sets"][0]["memory"]] == ["host"]
    assert here["sets"][0]["models"] == ["m0", "m1"]
    assert here["sets"][0]["memory"][0]["room"] > 0


def test_the_command_says_what_does_not_fit(folder: Path, command: Command) -> None:
    (folder / "fitter.toml").write_text(TOML.replace("n_ctx = 8192", "n_ctx = 131072\nn_gpu_layers = 33"))
    status, out, err = command("fleet", "--format", "ini")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("fitter: does not fit: 'chat' does not fit on this machine, even alone: ")


def test_the_command_needs_a_fleet(folder: Path, command: Command) -> None:
    (folder / "fitter.toml").write_text('[cases.a]\nmodel = "a.gguf"\n')
    said = 'fitter: error: fitter.toml has no fleet: add [fleet] with goal = "time"\n'
    assert command("fleet") == (2, "", said)
    (folder / "fitter.toml").unlink()
    status, _, err = command("fleet")
    assert status == 2 and err.startswith("fitter: error: fitter.toml does not exist: ")


def test_a_model_that_grows_fails_the_set_by_name(folder: Path, command: Command) -> None:
    assert command("lock").status == 0
    lock = read_lock(folder / "fitter.lock").fleet
    assert lock is not None and lock.sets == (("chat", "embed"),)
    same = command("check", "-v")
    assert (same.status, same.err) == (0, "") and "fleet/chat+embed same" in same.out
    # one updated case leaves the fleet in the lock
    assert command("lock", "--update", "chat").status == 0
    assert read_lock(folder / "fitter.lock").fleet == lock
    (folder / "fitter.toml").write_text(TOML.replace("n_ctx = 8192", "n_ctx = 30720\nmax_growth = '100%'"))
    grown = command("check", "--json")
    (failed,) = [case for case in grown.document["cases"] if case["name"].startswith("fleet/")]
    assert (grown.status, failed["status"]) == (4, "failed")
    assert failed["failures"][0].startswith("chat, embed no longer fit together: CUDA0 takes ")
    assert any(cause["what"] == "chat on CUDA0" for cause in failed["causes"])


def test_a_check_needs_no_log(folder: Path, command: Command) -> None:
    toml = TOML.replace("share = 3\n", "").replace(
        "[fleet.models.embed]", '[fleet]\nlog = "router.log"\n[fleet.models.embed]'
    )
    (folder / "fitter.toml").write_text(toml)
    line = "srv  proxy_reques: proxying request to model {} on port 40001\n"
    (folder / "router.log").write_text(line.format("chat") + line.format("embed") * 3)
    models = command("fleet", "--json").document["models"]
    assert {model["name"]: model["share"] for model in models} == {"chat": 0.25, "embed": 0.75}
    assert command("lock").status == 0
    (folder / "router.log").unlink()
    assert command("check").status == 0
    status, _, err = command("fleet")
    assert status == 2 and err.endswith("router.log does not exist: give the log of a server\n")


def test_cases_and_lock_have_both_a_fleet_or_none(folder: Path, command: Command) -> None:
    (folder / "fitter.toml").write_text(TOML.partition("[fleet")[0])
    assert command("lock").status == 0
    (folder / "fitter.toml").write_text(TOML)
    status, _, err = command("check")
    assert status == 2 and "the fleet in fitter.toml is not in fitter.lock: run 'fitter lock'" in err
    assert command("lock").status == 0
    (folder / "fitter.toml").write_text(TOML.partition("[fleet")[0])
    said = "fitter: error: fleet: the case is in fitter.lock, but not in fitter.toml"
    assert said in command("check").err
    assert command("lock", "--prune").status == 0
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
    ("a build in the cases", "./evil", "", "llama_cpp is './evil', which is native code"),
    ("a build in the lock", "", "llama_cpp = './evil'", "'chat' has llama_cpp in the lock, which no fleet records"),
    ("a backend in the lock", "", "profile = 'library:/x'", "'chat' has profile in the lock, which no fleet records"),
    ("a server in the lock", "", "rpc = 'evil:1'", "'chat' has rpc in the lock, which no fleet records"),
    ("a file in the lock", "", "mmproj = '/etc/x'", "'chat' has mmproj in the lock, which no fleet records"),
)
def test_neither_file_runs_what_nobody_trusts(
    build: str, keyword: str, message: str, lock: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = TOML.replace("[defaults]\n", f"[defaults]\nllama_cpp = '{build}'\n") if build else TOML
    head = "[fleet.models.chat.keywords]\n"
    assert head in lock
    (folder / "fitter.toml").write_text(toml)
    (folder / "fitter.lock").write_text(lock.replace(head, f"{head}{keyword}\n"))
    (folder / "evil").mkdir()
    monkeypatch.delenv("FITTER_TRUST", raising=False)
    status, _, err = command("check")
    assert status == 2 and message in err


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


def test_a_budget_counts_no_memory_of_the_others(folder: Path, command: Command) -> None:
    model = 'model = "shape://llama-3.1-8b"\n'
    toml = TOML.replace("n_ctx = 8192\n", "").replace("cache_ram = 512", "cache_ram = 1024")
    contexts = []
    for budget in ("", '[cases.chat.budget]\nhost = "2GiB"\n'):
        (folder / "fitter.toml").write_text(toml.replace(model, model + budget))
        (chat, _) = command("fleet", "--json").document["models"]
        contexts.append(chat["plan"]["params"]["n_ctx"])
    # the embedder takes more than the rest of the 2 GiB, which is not the chat's; more context is no longer request
    assert contexts[0] == contexts[1] > 8192


def test_examples_have_all_kinds_of_machines() -> None:
    counts = [len(example.models) for example in EXAMPLES.values()]
    assert (min(counts), max(counts), len(counts)) == (2, 8, 12)
    assert all(isinstance(example, FleetExample) for example in EXAMPLES.values())


# --- the preset of a fleet in the real llama-server as a router: what it loads, what it unloads, and its memory


MIB = 2**20
WIDE = TinyModel("tiny wide", n_layer=4, n_embd=64, n_head=8, n_head_kv=8, n_embd_head=128, n_ff=64, n_expert=0)
"""A model with few weights and 32 KiB of f32 cache for each token."""
NAMES = {"chat": "chat", "code": "code", "modèle": "modèle", "a:b": "a-b"}
"""The models, and what their sections are called."""
OF_ITS_CODE = 16 * MIB
"""More than a llama-server has of its own beside what is counted: 7 MiB here, its vocabulary and threads."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Four models of 256 MiB, any three of which fit; the first one is loaded at the start."""
    model = write_tiny(tmp_path_factory.mktemp("models") / "wide.gguf", WIDE)
    words: dict[str, Any] = {
        "n_ctx": 8192,
        "n_seq_max": 1,
        "cache_ram": 0,
        "type_k": "f32",
        "type_v": "f32",
        "gpus": "none",
    }
    plan = fitter.fit(model, program="llama-server", **words)
    assert plan.breakdown.host.context == 256 * MIB
    models: dict[str, dict[str, Any]] = {name: {"model": model} for name in NAMES}
    models["chat"]["resident"] = True
    # three and a half of them
    made = fitter.fleet(models, host_memory=plan.host.margin + plan.host.used * 7 // 2, **words)
    assert made.any_together == 3
    assert {len(each.models) for each in made.sets} == {3}
    return made


@dataclass(frozen=True)
class Router:
    """A running router."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; 0 where nobody answers yet."""
        assert self.process.poll() is None, "the router ended"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except ConnectionError:
            return 0, None
        finally:
            connection.close()

    def generate(self, name: str) -> None:
        """Ask a model for two tokens; returns once they are there."""
        status, answer = self.ask("POST", "/completion", {"model": name, "prompt": "ba lu mi", "n_predict": 2})
        assert status == 200, answer
        assert answer["tokens_predicted"] == 2

    @property
    def states(self) -> Mapping[str, str]:
        """The state of each model."""
        status, answer = self.ask("GET", "/models")
        return {each["id"]: each["status"]["value"] for each in answer["data"]} if status == 200 else {}

    @property
    def loaded(self) -> set[str]:
        """The models that are in memory."""
        return {name for name, state in self.states.items() if state != "unloaded"}

    @property
    def servers(self) -> list[psutil.Process]:
        """The processes that have the models."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def router(words: list[str], folder: Path) -> Iterator[Router]:
    """Start a router by its command, and end all of its processes."""
    port = free_port()
    # no models of this machine's cache, and one thread each: many wait for each other where processors are shared
    environment = {**os.environ, "LLAMA_CACHE": str(folder), "HF_HOME": str(folder), "LLAMA_ARG_THREADS": "1"}
    command = [str(upstream.tool(words[0])), *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    started, children = Router(process, port), list[psutil.Process]()
    try:
        until(lambda: started.ask("GET", "/health")[0] == 200, "the router never answers")
        yield started
    finally:
        if process.poll() is None:
            children = started.servers
            process.terminate()
        try:
            process.wait(SECONDS)
            assert all_end(children), "a llama-server is left"
        finally:
            for each in filter(is_running, children):
                each.kill()
            process.kill()


def test_the_router_keeps_as_many_models_as_fit(fleet: Fleet, tmp_path: Path) -> None:
    text = render_fleet(fleet, "ini")
    file = tmp_path / "models.ini"
    file.write_text(text, encoding="utf-8")
    words = text.splitlines()[0].removeprefix("# ").split()
    assert words == ["llama-server", "--models-preset", "FILE", "--models-max", "3"]
    words[words.index("FILE")] = str(file)

    with router(words, tmp_path) as running:
        assert set(running.states) == set(NAMES.values())
        until(lambda: running.states["chat"] == "loaded", "what is loaded at the start never is")
        assert running.loaded == {"chat"}
        for name in ("code", "modèle"):
            running.generate(name)
        assert running.loaded == {"chat", "code", "modèle"}

        # the least recently used one is not the first one that was loaded
        running.generate("chat")
        running.generate("a-b")
        assert running.loaded == {"chat", "modèle", "a-b"}
        assert {running.states[name] for name in running.loaded} == {"loaded"}

        servers = running.servers
        assert len(servers) == 3
        memory = [resident(each.pid) for each in servers]
        own = sum(each.own for each in memory if each is not None)
        needs = [model.needs["host"] for model in fleet.models if model.name != "code"]
        caches = [model.plan.breakdown.host.context for model in fleet.models]
        # a fourth model would exceed it
        assert sum(caches[1:]) <= own <= sum(need + OF_ITS_CODE for need in needs) < sum(caches)
    assert not any(map(psutil.pid_exists, (each.pid for each in servers)))
