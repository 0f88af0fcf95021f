"""Systems without /proc, and with little stack: a plan, or one line that says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from fitter import system
from fitter.machine.host import host_memory
from tests.support.cases import cases, named_cases
from tests.support.full_disk import VARIABLE, with_full_disk
from tests.support.patience import SECONDS
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

MODEL = TINY_DENSE

ROOT = Path(__file__).resolve().parents[2]
SERVER = str(ROOT / "build/llama/bin/llama-server")
GPU = ("--gpu", "cuda:8.9:8GiB")
FITTER = (sys.executable, "-m", "fitter")
HIDE = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def hidden() -> tuple[str, ...]:
    """Return the command that runs another command without /proc."""
    try:
        can_hide = run(*HIDE, "true").returncode == 0
    except OSError:
        can_hide = False
    if not can_hide:
        pytest.skip("this machine lets nobody hide /proc")
    return HIDE


@named_cases(
    ("fit", ("MODEL", *GPU)),
    ("fit to this machine", ("MODEL", "--device", "none")),
    ("inspect", ("inspect", "MODEL")),
    ("llama-cpp", ("llama-cpp",)),
    ("explore", ("explore", "MODEL", *GPU, "-c", "1024")),
    ("quants", ("quants", "MODEL", *GPU, "--type", "Q8_0")),
    ("verify", ("verify", "MODEL", "--device", "none", "-c", "512")),
)
def test_without_proc(words: tuple[str, ...], model: Path, hidden: tuple[str, ...]) -> None:
    done = run(*hidden, *FITTER, *(str(model) if word == "MODEL" else word for word in words))
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr


def test_a_plan_without_proc_is_the_same(model: Path, hidden: tuple[str, ...]) -> None:
    words = (*FITTER, str(model), *GPU, "--for", "any")
    assert run(*hidden, *words).stdout == run(*words).stdout != ""


def test_without_proc_the_file_is_loaded(model: Path, hidden: tuple[str, ...]) -> None:
    done = run(*hidden, *FITTER, "verify", str(model), "--device", "none", "-c", "512", "--server", SERVER)
    assert (done.returncode, done.stderr) == (0, "") and "as predicted" in done.stdout


def test_the_memory_of_the_host_without_proc(hidden: tuple[str, ...]) -> None:
    code = "from fitter.machine.host import host_memory; print(host_memory().total)"
    assert int(run(*hidden, sys.executable, "-c", code).stdout) == pytest.approx(host_memory().total, rel=0.01)


def test_files_that_are_open_without_proc(hidden: tuple[str, ...]) -> None:
    code = (
        "import os, socket; from fitter.llama.worker import process\n"
        "os.dup2(1, 77)\nprocess.become_worker()\n"
        "try: os.fstat(77)\nexcept OSError: print('closed')"
    )
    assert run(*hidden, sys.executable, "-c", code).stdout == "closed\n"
    assert {0, 1, 2} <= {*system.open_files()}


LIMITED = ("sh", "-c", 'ulimit -s "$0" && exec "$@"')


@pytest.mark.parametrize("words", [("MODEL", *GPU), ("llama-cpp",), ("inspect", "MODEL")], ids=lambda words: words[0])
def test_a_small_stack_is_one_line(words: tuple[str, ...], model: Path) -> None:
    done = run(*LIMITED, "200", *FITTER, *(str(model) if word == "MODEL" else word for word in words))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == ["fitter: error: the stack is limited to 200 KiB: run 'ulimit -s 8192' first"]


@cases(5, 8, 11, 12, 13, 15, 16, 17, 20)
def test_few_files_are_one_line_or_a_plan(number: int, model: Path) -> None:
    # with four Python itself may not start
    done = run("sh", "-c", 'ulimit -n "$0" && exec "$@"', str(number), *FITTER, str(model), *GPU)
    assert (done.returncode, bool(done.stdout)) in ((0, True), (3, False))
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr and (done.returncode == 0 or len(lines) == 1), lines
    assert done.returncode == 0 or "oo many open files" in lines[0] or "may open no more files" in lines[0]


def test_a_small_stack_in_python(model: Path) -> None:
    code = (
        "import fitter, sys\n"
        "from fitter.llama.build import inspect_build as looking\n"
        "try: fitter.inspect(sys.argv[1])\nexcept fitter.LlamaCppError as error: print(error)\n"
        "print(looking.inspect_build('python').problem.partition(' cannot ')[2])"
    )
    said = "the stack is limited to 200 KiB: run 'ulimit -s 8192' first"
    done = run(*LIMITED, "200", sys.executable, "-c", code, str(model))
    assert done.stdout.splitlines() == [f"the worker cannot be started: {said}", f"be asked: {said}"], done.stderr


def test_the_smallest_stack_is_enough(model: Path) -> None:
    words = (*FITTER, str(model), *GPU, "-ot", "blk.*ffn.*=CPU")
    done = run(*LIMITED, "256", *words)
    assert (done.returncode, done.stdout) == (0, run(*words).stdout), done.stderr


# --- the tests of a full disk, on Linux; Windows' Python runs them in test_windows.py


TESTS = Path(__file__).with_name("test_every_system.py")


def test_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    within = with_full_disk(disk)
    if not within:
        pytest.skip("this machine lets nobody mount a disk of their own")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "full_disk", str(TESTS))
    environment = {**os.environ, VARIABLE: str(disk)}
    done = subprocess.run([*within, sys.executable, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, "skipped" in done.stdout) == (0, False), done.stdout[-5000:]


# --- machines that are hostile themselves: a clock that jumps, and allocations that fail. A plan, or one line


SUPPORT = Path(__file__).resolve().parents[1] / "support"
YEAR = 365 * 86400
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs fitter with a library of ``tests/support`` and these variables."""
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("no compiler for a library that is preloaded")
    folder = tmp_path_factory.mktemp("machine")
    model = write_tiny(folder / "tiny.gguf", TINY_MOE)
    libraries = {}
    for name in ("another_clock", "failing_allocations"):
        libraries[name] = folder / f"{name}.so"
        command = ["cc", "-shared", "-fPIC", "-O1", SUPPORT / f"{name}.c", "-o", libraries[name], "-ldl"]
        subprocess.run(command, check=True)

    def preloaded(library: str, *words: str, **variables: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "LD_PRELOAD": str(libraries[library])}
        environment |= {name: str(value) for name, value in variables.items()}
        command = [sys.executable, "-m", "fitter", *(str(model) if word == "MODEL" else word for word in words)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)

    return preloaded


CLOCKS = {
    "right": {},
    "ten years ahead": {"CLOCK_SHIFT": 10 * YEAR},
    "ten years behind": {"CLOCK_SHIFT": -10 * YEAR},
    "before 1970": {"CLOCK_SHIFT": -70 * YEAR},
    "beyond 2106": {"CLOCK_SHIFT": 200 * YEAR},
    "jumping ahead": {"CLOCK_JUMP": YEAR},
    "jumping back": {"CLOCK_JUMP": -YEAR},
}


@named_cases(
    ("a file", ("MODEL",), CLOCKS),
    ("a shape", ("--shape", "qwen3-0.6b:Q4_K_M"), ("right", "ten years ahead", "jumping back")),
)
def test_no_clock_changes_a_plan(words: tuple[str, ...], clocks: Iterable[str], preloaded: Run) -> None:
    answers = {name: preloaded("another_clock", *words, "--gpu", "24GiB", **CLOCKS[name]) for name in clocks}
    assert {(done.returncode, done.stdout) for done in answers.values()} == {(0, answers["right"].stdout)}
    assert [name for name, done in answers.items() if "Traceback" in done.stderr] == []


FIT, INSPECT = ("MODEL", "--gpu", "24GiB"), ("inspect", "MODEL")


@cases((FIT, 1), (FIT, 300), (FIT, 3000), (FIT, 10000), (INSPECT, 1), (INSPECT, 1000))
def test_an_allocation_that_fails_changes_no_answer(
    words: tuple[str, ...], number: int, preloaded: Run, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"
    done = preloaded("failing_allocations", *words, FAILS_AT=number, FAILED=failed)
    if done.returncode == 0:
        assert done.stdout == preloaded("failing_allocations", *words).stdout
    else:
        (line,) = done.stderr.splitlines()
        assert done.returncode == 3 and line.startswith("fitter: error: ") and "bug" not in line
    assert failed.exists() or done.returncode == 0
    assert number > 1 or failed.exists(), "nothing failed"
