"""Machines that are hostile themselves: a clock that jumps, and allocations that fail. A plan, or one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.support.cases import cases, named_cases
from tests.support.patience import SECONDS
from tools.models.tiny import TINY_MOE, write_tiny

SUPPORT = Path(__file__).resolve().parents[1] / "support"
YEAR = 365 * 86400
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
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

    def run(library: str, *words: str, **variables: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "LD_PRELOAD": str(libraries[library])}
        environment |= {name: str(value) for name, value in variables.items()}
        command = [sys.executable, "-m", "fitter", *(str(model) if word == "MODEL" else word for word in words)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)

    return run


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
def test_no_clock_changes_a_plan(words: tuple[str, ...], clocks: Iterable[str], run: Run) -> None:
    answers = {name: run("another_clock", *words, "--gpu", "24GiB", **CLOCKS[name]) for name in clocks}
    assert {(done.returncode, done.stdout) for done in answers.values()} == {(0, answers["right"].stdout)}
    assert [name for name, done in answers.items() if "Traceback" in done.stderr] == []


FIT, INSPECT = ("MODEL", "--gpu", "24GiB"), ("inspect", "MODEL")


@cases((FIT, 1), (FIT, 300), (FIT, 3000), (FIT, 10000), (INSPECT, 1), (INSPECT, 1000))
def test_an_allocation_that_fails_changes_no_answer(
    words: tuple[str, ...], number: int, run: Run, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"
    done = run("failing_allocations", *words, FAILS_AT=number, FAILED=failed)
    if done.returncode == 0:
        assert done.stdout == run("failing_allocations", *words).stdout
    else:
        (line,) = done.stderr.splitlines()
        assert done.returncode == 3 and line.startswith("fitter: error: ") and "bug" not in line
    assert failed.exists() or done.returncode == 0
    assert number > 1 or failed.exists(), "nothing failed"
