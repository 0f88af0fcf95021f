"""Memory as a test, as a user has it: a repository with models, ``fitter lock``, a change, ``fitter check``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from fitter import api
from fitter.llama.client import Worker
from fitter.machine import bandwidth
from fitter.machine import machine as machine_devices
from fitter.machine.host import HostMemory
from fitter.machine.speed import HostSpeed
from fitter.regression import check_cases
from fitter.regression.cases import read_cases
from fitter.regression.compare import compare
from fitter.regression.lockfile import Lock, read_lock, write_lock
from fitter.regression.measuring import measure_case
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tests.support.patience import SECONDS, all_end, suspended
from tools.models import shapes
from tools.models.shapes import Q4_K, Q8_0, Shape, write_shape, write_split

N_LAYER, N_VOCAB = 4, 4000


def small(shape: Shape) -> Shape:
    """``shape`` with few layers and tokens."""
    tensors = [
        replace(tensor, shape=tuple(N_VOCAB if size == shape.n_vocab else size for size in tensor.shape))
        for tensor in shape.tensors
        if int((re.findall(r"blk\.(\d+)", tensor.name) or "0")[0]) < N_LAYER
    ]
    metadata = {**shape.metadata, ".block_count": N_LAYER}
    return replace(shape, n_vocab=N_VOCAB, tensors=tuple(tensors), metadata=metadata)


DENSE = small(shapes.SHAPES["llama-3.1-8b"])
MOE = small(shapes.SHAPES["qwen3-30b-a3b"])

CASES = {
    "chat": 'model = "models/dense.gguf"\ngpu = "24GiB"\nn_ctx = 4096\nn_ubatch = 512',
    "fitted": 'model = "models/moe.gguf"\ngpu = ["2GiB", "3GiB"]\nhost_memory = "8GiB"\nmargin = "512MiB"',
    "host": 'model = "models/dense.gguf"\nn_ctx = 2048',
}


def toml(cases: Mapping[str, str]) -> str:
    return "\n".join(f"[cases.{name}]\n{text}\n" for name, text in cases.items())


@dataclass(frozen=True)
class Repository:
    """A directory with models, ``fitter.toml`` and ``fitter.lock``."""

    path: Path

    def fitter(self, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_fitter(*words, cwd=cwd or self.path, **{"GITHUB_ACTIONS": None, **environment})

    @property
    def cases(self) -> Path:
        return self.path / "fitter.toml"

    @property
    def lock(self) -> Path:
        return self.path / "fitter.lock"

    def edit(self, old: str, new: str) -> None:
        text = self.cases.read_text()
        assert old in text
        self.cases.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = Repository(tmp_path_factory.mktemp("locked"))
    (made.path / "models").mkdir()
    write_shape(DENSE, made.path / "models" / "dense.gguf")
    write_shape(MOE, made.path / "models" / "moe.gguf", vocab=False)
    made.cases.write_text(toml(CASES))
    done = made.fitter("lock")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "fitter: wrote fitter.lock\n"
    return made


@pytest.fixture
def repository(locked: Repository, tmp_path: Path) -> Repository:
    shutil.copytree(locked.path, tmp_path / "repository", copy_function=_copy)
    return Repository(tmp_path / "repository")


def _copy(source: str, target: str) -> None:
    if source.endswith(".gguf"):
        os.link(source, target)
    else:
        shutil.copy(source, target)


def rewrite(repository: Repository, shape: Shape) -> None:
    path = repository.path / "models" / "dense.gguf"
    path.unlink()
    write_shape(shape, path)


# --- a change, and what is said of it


def edited(old: str, new: str) -> Callable[[Repository], None]:
    return lambda repository: repository.edit(old, new)


def retype(repository: Repository) -> None:
    def typed(tensor: shapes.Tensor) -> shapes.Tensor:
        is_it = tensor.name == "blk.3.ffn_up.weight"
        assert not is_it or tensor.type == Q4_K
        return replace(tensor, type=Q8_0) if is_it else tensor

    rewrite(repository, replace(DENSE, tensors=tuple(map(typed, DENSE.tensors))))


CARD = edited('gpu = "24GiB"', 'gpu = "1536MiB"')
CARD_SAYS = ["setting: gpu 24GiB → 1536MiB", "device: CUDA0 total 24.0 GiB → 1.5 GiB", "! weights on the host"]
CARDS = edited('["2GiB", "3GiB"]', '["2GiB", "1GiB"]')
NO_ROOM = edited('host_memory = "8GiB"', 'host_memory = "1025MiB"')
RETYPED = ["header: blk.3.ffn_up.weight q4_K → q8_0", "model +"]


@named_cases(
    ("n_ubatch doubled", edited("n_ubatch = 512", "n_ubatch = 1024"), ["chat"], ["n_ubatch 512 → 1024", "compute +"]),
    ("a tensor of another type", retype, ["chat", "host"], RETYPED),
    ("a smaller device", CARD, ["chat"], CARD_SAYS),
    (
        "a device too small for a fitted context",
        CARDS,
        ["fitted"],
        ["setting: gpu 2GiB, 3GiB → 2GiB, 1GiB", "fitted differently: "],
    ),
    ("no room at all", NO_ROOM, ["fitted"], ["setting: host_memory 8.0 GiB → 1.0 GiB", "! fits"]),
)
def test_a_change_that_costs_memory(
    change: Callable[[Repository], None], failed: list[str], says: list[str], repository: Repository
) -> None:
    change(repository)
    done = repository.fitter("check")
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.findall(r"^(\S+) failed$", done.stdout, re.MULTILINE) == failed
    for part in says:
        assert part in done.stdout
    assert f"3 cases: {len(failed)} failed" in done.stdout
    # accepted
    assert repository.fitter("lock").returncode == (1 if "! fits" in says else 0)
    assert repository.fitter("check").returncode == 0


def test_nothing_changed(repository: Repository) -> None:
    done = repository.fitter("check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 cases: 3 unchanged\n", "")


def retune(repository: Repository) -> None:
    """Not a byte longer or shorter."""
    rewrite(repository, replace(DENSE, metadata={**DENSE.metadata, ".rope.freq_base": 400000.0}))


def other_versions(repository: Repository) -> None:
    text = repository.lock.read_text()
    repository.lock.write_text(re.sub(r"(fitter|llama_cpp) = .*", r'\1 = "0.0.1"', text))


@named_cases(
    (
        "a smaller batch",
        edited("n_ubatch = 512", "n_ubatch = 256\nmax_slowdown = '50%'"),
        ["chat changed", "setting: n_ubatch 512 → 256", "compute -", "2 unchanged"],
    ),
    (
        "growth that is allowed",
        edited("n_ubatch = 512", "n_ubatch = 513\nmax_growth = '10%'"),
        ["chat changed", "setting: n_ubatch 512 → 513"],
    ),
    ("metadata", retune, ["header: its metadata changed", "1 unchanged"]),
    ("versions", other_versions, ["fitter 0.0.1 → ", "llama.cpp 0.0.1 → ", "3 changed"]),
)
def test_a_change_within_the_limits(
    change: Callable[[Repository], None], says: list[str], repository: Repository
) -> None:
    change(repository)
    done = repository.fitter("check")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in says:
        assert part in done.stdout


# --- the same lock everywhere


def test_order_and_parallelism_do_not_matter(repository: Repository, locked: Repository) -> None:
    repository.cases.write_text(toml(dict(reversed(list(CASES.items())))))
    for jobs in ("1", "7"):
        repository.lock.unlink()
        assert repository.fitter("lock", "-j", jobs).returncode == 0
        assert repository.lock.read_bytes() == locked.lock.read_bytes()
    assert repository.fitter("lock", "--update", "fitted", "--update", "chat").returncode == 0
    assert repository.lock.read_bytes() == locked.lock.read_bytes()


def test_a_second_machine(repository: Repository, locked: Repository, tmp_path: Path) -> None:
    other = Repository(tmp_path / "an other path")
    repository.path.rename(other.path)
    other.lock.unlink()
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "TMPDIR": str(home), "XDG_CONFIG_HOME": str(home / "configuration"), "LC_ALL": "C"}
    variables |= {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "77", "CUDA_VISIBLE_DEVICES": ""}
    done = other.fitter("lock", "--cases", str(other.cases), cwd=home, **variables)
    assert done.returncode == 0, done.stderr
    assert other.lock.read_bytes() == locked.lock.read_bytes()
    assert str(tmp_path) not in other.lock.read_text()
    assert list(home.iterdir()) == []


def test_the_machine_is_not_asked(repository: Repository, locked: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and the speed of it are another one's here."""
    monkeypatch.setattr(machine_devices, "host_memory", lambda: HostMemory(2**30, 2**29))
    monkeypatch.setattr(bandwidth, "host_speed", lambda *_: HostSpeed(1e9, "slow"))
    repository.lock.unlink()
    assert all(measured.error is None for measured in check_cases.lock(repository.cases))
    assert repository.lock.read_bytes() == locked.lock.read_bytes()


def test_what_is_in_it(locked: Repository) -> None:
    lock = read_lock(locked.lock)
    assert list(lock.cases) == ["chat", "fitted", "host"]
    chat = lock.cases["chat"]
    plan = api.fit(locked.path / "models" / "dense.gguf", gpus=["24GiB"], n_ctx=4096, n_ubatch=512)
    assert (chat.params, chat.n_ctx) == (plan.params, 4096)
    assert {name: device.used for name, device in chat.devices.items()} == {"CUDA0": plan.devices[0].used}
    assert chat.host.used == plan.host.used
    assert chat.estimate is not None and plan.estimate is not None
    assert chat.estimate.prompt_tokens_per_second == pytest.approx(plan.estimate.prompt_tokens_per_second, rel=1e-3)
    assert {name for name in chat.model.tensors if name.startswith("output")} == {"output.weight", "output_norm.weight"}
    assert lock.cases["host"].params.devices == ()
    text = locked.lock.read_text()
    assert str(locked.path) not in text
    assert len(text) < 12000, "a lock is small enough to be reviewed"


# --- measuring


def test_what_did_not_change_is_one_load(locked: Repository) -> None:
    lock = read_lock(locked.lock)
    with Worker() as worker:
        loads = 0
        for case in read_cases(locked.cases):
            snapshot = measure_case(case, lock.cases[case.name], worker)
            assert snapshot == lock.cases[case.name]
            assert worker.dummy_loads == loads + 1
            loads = worker.dummy_loads


def test_bytes_that_are_not_those_of_the_lock_are_fitted_anew(locked: Repository) -> None:
    """Another build of llama.cpp measures other bytes than the lock has."""
    case = next(case for case in read_cases(locked.cases) if case.name == "chat")
    true = read_lock(locked.lock).cases["chat"]
    device = true.devices["CUDA0"]
    row = replace(device.memory["CUDA0"], compute=device.memory["CUDA0"].compute - 1)
    other = replace(true, devices={"CUDA0": replace(device, memory={"CUDA0": row})})
    with Worker() as worker:
        found = compare(case, other, measure_case(case, other, worker))
        assert worker.dummy_loads > 1
    assert found.measured == true
    assert [move.detail for move in found.moves] == ["compute +1 B"]
    assert (found.status, found.causes) == ("failed", ())


@cases(((),), ((2**40,),))
def test_a_lock_with_nonsense_about_the_header(header_bytes: tuple[int, ...], locked: Repository) -> None:
    case = next(case for case in read_cases(locked.cases) if case.name == "host")
    true = read_lock(locked.lock).cases["host"]
    wrong = replace(true, model=replace(true.model, header_bytes=header_bytes))
    with Worker() as worker:
        assert measure_case(case, wrong, worker) == true


def test_budgets_hold_without_a_lock(repository: Repository) -> None:
    repository.lock.unlink()
    used = api.fit(repository.path / "models" / "dense.gguf", gpus=["24GiB"], n_ctx=4096).devices[0].used
    repository.cases.write_text(f"[cases.a]\n{CASES['chat']}\n[cases.a.budget]\ncuda0 = {used}\nn_ctx = 4096\n")
    assert repository.fitter("check").stdout == "1 case: 1 unchanged\n"
    repository.edit(f"cuda0 = {used}", f"cuda0 = {used - 1}")
    done = repository.fitter("check")
    assert done.returncode == 4
    assert "! cuda0 budget" in done.stdout
    repository.edit(f"cuda0 = {used - 1}", "generation_tokens_per_second = 1e9")
    assert "! generation speed budget" in repository.fitter("check").stdout


def test_a_split_model(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    (tmp_path / "q").mkdir()
    write_split("gpt-oss-20b", tmp_path / "q", 3, vocab=False)
    repository.cases.write_text('[cases.q]\nmodel = "q/*.gguf"\ngpu = "24GiB"\nn_ctx = 4096')
    assert repository.fitter("lock").returncode == 0
    lock = read_lock(repository.lock)
    assert list(lock.cases) == ["q/gpt-oss-20b"]
    assert len(lock.cases["q/gpt-oss-20b"].model.header_bytes) == 3
    assert repository.fitter("check").returncode == 0
    last = tmp_path / "q" / "gpt-oss-20b-00003-of-00003.gguf"
    with Worker() as worker:
        other = replace(read_cases(repository.cases)[0], model=last)
        assert measure_case(other, lock.cases[other.name], worker) == lock.cases[other.name]
        assert worker.dummy_loads == 1, "any file names the model"
    last.unlink()
    done = repository.fitter("check")
    assert done.returncode == 3
    assert "1 of 3 split files are missing" in done.stderr


# --- wrong input


def append(path: str, text: str) -> Callable[[Repository], None]:
    def change(repository: Repository) -> None:
        file = repository.path / path
        file.write_text(file.read_text() + text)

    return change


def without(*names: str) -> Callable[[Repository], None]:
    def change(repository: Repository) -> None:
        repository.cases.write_text(toml({name: text for name, text in CASES.items() if name not in names}))

    return change


def pipe(repository: Repository) -> None:
    os.mkfifo(repository.path / "pipe")


def gone(repository: Repository) -> None:
    (repository.path / "models" / "moe.gguf").unlink()


MORE = append("fitter.toml", '[cases.more]\nmodel = "models/moe.gguf"\n')
NOT_LOCKED = "more: the case is in fitter.toml, but not in fitter.lock: run 'fitter lock --update more'"
ONLY_LOCKED = "fitted: the case is in fitter.lock, but not in fitter.toml: run 'fitter lock --prune'"
NO_FILE = "pipe cannot be written: it is a pipe, but a lock must be a file: choose another path with --lock"
UNKNOWN = "fitter.toml: unknown key 'n_ubatchh' in cases.chat: did you mean n_ubatch?"
NO_TYPE = "chat: type_k (-ctk) is 'maybe': give one of f32, f16"


@named_cases(
    ("an unknown key", edited("n_ubatch", "n_ubatchh"), "check", 2, UNKNOWN),
    ("a missing model", gone, "check", 3, "fitted: {path}/models/moe.gguf: no such file"),
    ("parameters that make no sense", edited("n_ubatch = 512", 'type_k = "maybe"'), "check", 2, NO_TYPE),
    ("a case that is not locked", MORE, "check", 2, NOT_LOCKED),
    ("a case that is only locked", without("fitted"), "check", 2, ONLY_LOCKED),
    ("a pipe in the place of the lock", pipe, "lock --lock pipe", 5, NO_FILE),
    ("a check against a pipe", pipe, "check --lock pipe", 2, "pipe is a pipe, but a lock must be a file"),
    (
        "a report that cannot be written",
        without(),
        "check --junit nowhere/a.xml",
        5,
        "nowhere/a.xml cannot be written: No such file or directory",
    ),
)
def test_one_clear_line(
    change: Callable[[Repository], None], words: str, status: int, says: str, repository: Repository
) -> None:
    change(repository)
    before = repository.lock.read_bytes()
    done = repository.fitter(*words.split())
    assert done.returncode == status, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("fitter: error: ")]
    assert len(errors) == 1, done.stderr
    assert says.format(path=repository.path) in errors[0]
    assert "Traceback" not in done.stderr
    assert repository.lock.read_bytes() == before


def test_the_other_cases_are_still_checked(repository: Repository) -> None:
    (repository.path / "models" / "moe.gguf").unlink()
    repository.edit("n_ctx = 4096", "n_ctx = 8192")
    done = repository.fitter("check")
    assert done.returncode == 3
    assert "setting: n_ctx 4096 → 8192" in done.stdout
    assert "3 cases: 1 failed, 1 could not be measured, 1 unchanged" in done.stdout
    assert repository.fitter("check", "-k", "not fitted").returncode == 4, "what is not selected does not matter"
    assert repository.fitter("check", "-k", "host").returncode == 0


def test_known_cases_are_checked_beside_added_and_removed_ones(repository: Repository) -> None:
    repository.cases.write_text(toml({"chat": CASES["chat"], "host": CASES["host"], "more": CASES["fitted"]}))
    repository.edit("n_ctx = 2048", "n_ctx = 1024")
    done = repository.fitter("check", "--junit", "report.xml", GITHUB_ACTIONS="true")
    assert done.returncode == 4
    assert done.stdout.splitlines()[-1] == "4 cases: 1 failed, 1 not in the lock, 1 only in the lock, 1 unchanged"
    assert "host failed" in done.stdout
    lines = done.stderr.splitlines()
    said = [f"fitter: error: {NOT_LOCKED}", f"fitter: error: {ONLY_LOCKED}"]
    assert [line for line in lines if line.startswith("fitter: ")] == said
    assert sum(line.startswith("::error ") for line in lines) == 3
    document = json.loads(repository.fitter("check", "--json").stdout)
    statuses = {case["name"]: case["status"] for case in document["cases"]}
    assert statuses == {"chat": "same", "host": "failed", "more": "added", "fitted": "removed"}
    assert (repository.fitter("check", "-k", "chat").returncode, document["passed"]) == (0, False)
    repository.edit("n_ctx = 1024", "n_ctx = 2048")
    assert repository.fitter("check").returncode == 2


def test_pruning(repository: Repository) -> None:
    before = read_lock(repository.lock).cases
    without("fitted")(repository)
    (repository.path / "models" / "dense.gguf").unlink()
    done = repository.fitter("lock", "--prune")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "fitter: removed fitted from fitter.lock\n")
    assert read_lock(repository.lock).cases == {name: before[name] for name in ("chat", "host")}
    text = repository.lock.read_bytes()
    done = repository.fitter("lock", "--prune")
    assert (done.returncode, done.stderr) == (0, "fitter: there is no case to remove from fitter.lock\n")
    assert repository.lock.read_bytes() == text


def test_pruning_keeps_what_pytest_has_stored(repository: Repository) -> None:
    lock = read_lock(repository.lock)
    write_lock(
        repository.lock, Lock({**lock.cases, "test_a.py::test_b": lock.cases["host"], "old": lock.cases["host"]})
    )
    assert repository.fitter("lock", "--prune", "--update", "chat").returncode == 0
    assert read_lock(repository.lock).cases.keys() == {*CASES, "test_a.py::test_b"}


# --- one case alone


def test_an_update_changes_nothing_else(repository: Repository) -> None:
    before = read_lock(repository.lock).cases
    repository.edit("n_ctx = 4096", "n_ctx = 8192")
    repository.edit("n_ctx = 2048", "n_ctx = 1024")
    done = repository.fitter("lock", "--update", "chat")
    assert done.returncode == 0, done.stderr
    after = read_lock(repository.lock).cases
    assert [name for name in before if after[name] != before[name]] == ["chat"]
    assert after["chat"].n_ctx == 8192
    said = repository.fitter("check").stdout
    assert "setting: n_ctx 2048 → 1024" in said
    assert "2 unchanged" in said


# --- killed


def test_killed_while_locking(repository: Repository) -> None:
    """The lock that is there stays whole, whenever that is, and no worker stays behind."""
    before = repository.lock.read_bytes()
    repository.edit("n_ctx = 4096", "n_ctx = 8192")
    wholes = set()
    for delay in (0.1, 0.3, 0.6, 1.0):
        command = [sys.executable, "-m", "fitter", "lock"]
        with subprocess.Popen(command, cwd=repository.path, stderr=subprocess.DEVNULL) as process:
            time.sleep(delay)
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
        wholes.add(repository.lock.read_bytes())
        assert all_end(children)
    assert repository.fitter("lock").returncode == 0
    assert wholes <= {before, repository.lock.read_bytes()}


def test_interrupted(repository: Repository) -> None:
    """At once, although llama.cpp does not answer."""
    before = repository.lock.read_bytes()
    repository.edit("n_ctx = 4096", "n_ctx = 8192")
    command = [sys.executable, "-m", "fitter", "lock", "-j", "1"]
    with subprocess.Popen(command, cwd=repository.path, stderr=subprocess.PIPE, text=True) as process:
        children = suspended(process, 0.4, with_forks=True)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=SECONDS)[1]
    assert (process.returncode, said) == (130, "")
    assert all_end(children)
    assert repository.lock.read_bytes() == before


def test_what_shares_the_memory(repository: Repository) -> None:
    repository.edit("n_ctx = 4096", 'n_ctx = 4096\nmodel_draft = "models/dense.gguf"\nreserve = ["host=1GiB"]')
    assert repository.fitter("lock").returncode == 0
    assert str(repository.path) not in repository.lock.read_text()
    assert repository.fitter("check").returncode == 0
    repository.edit("host=1GiB", "host=1025MiB")
    done = repository.fitter("check")
    assert done.returncode == 4
    assert "shared +1.0 MiB" in done.stdout + done.stderr
    assert "setting: reserve host=1GiB → host=1025MiB" in done.stdout + done.stderr


# --- for machines


def test_reports(repository: Repository) -> None:
    repository.edit("n_ctx = 4096", "n_ctx = 8192")
    done = repository.fitter("check", "--json", "--junit", "report.xml", GITHUB_ACTIONS="true")
    assert done.returncode == 4
    document = json.loads(done.stdout)
    statuses = {case["name"]: case["status"] for case in document["cases"]}
    assert statuses == {"chat": "failed", "fitted": "same", "host": "same"}
    assert document["cases"][0]["causes"] == [{"kind": "setting", "what": "n_ctx", "before": "4096", "after": "8192"}]
    suite = ElementTree.parse(repository.path / "report.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert done.stderr.startswith("::error file=fitter.toml,line=1,title=fitter%3A chat::CUDA0 takes ")
    assert done.stderr.count("\n") == 1
    text = repository.fitter("check", "--markdown", GITHUB_ACTIONS="").stdout
    assert text.startswith("### ❌ fitter check — 3 cases: 1 failed, 2 unchanged\n")


def test_two_plans(repository: Repository, tmp_path: Path) -> None:
    for name, context in (("a", "4096"), ("b", "4096"), ("c", "8192")):
        plan = repository.fitter("models/dense.gguf", "--gpu", "24GiB", "-c", context, "--json").stdout
        (repository.path / f"{name}.json").write_text(plan)
    same = repository.fitter("diff", "a.json", "b.json")
    assert (same.returncode, same.stdout, same.stderr) == (0, "the plans are the same\n", "")
    other = repository.fitter("diff", "a.json", "c.json")
    assert other.returncode == 4
    assert "context +" in other.stdout
    assert "parameter: n_ctx 4096 → 8192" in other.stdout
    wrong = repository.fitter("diff", "a.json", "fitter.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "fitter: error: fitter.toml is not JSON: give a file that 'fitter model.gguf --json' wrote\n"
