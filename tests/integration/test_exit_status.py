"""Status 1 says that a model does not fit, and nothing else; an answer that cannot be written has its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import PlanError
from tests.support.cases import cases, stored_rows
from tests.support.plans import for_format
from tools.models.tiny import write_tiny

GPU = ("--gpu", "8GiB")
TOO_LARGE = (*GPU, "--host-memory", "1MiB")
RUNNABLE = ("args", "shell", "ini", "env", "python", "ik_llama", "llama-swap", "compose", "ollama")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, cases, a lock of them, and plans."""
    path = tmp_path_factory.mktemp("place")
    write_tiny(path / "a.gguf")
    (path / "fitter.toml").write_text('[cases.a]\nmodel = "a.gguf"\ngpu = "8GiB"\nn_ctx = 512\n')
    assert run(path, "lock").returncode == 0
    (path / "plan.json").write_text(run(path, "a.gguf", *GPU, "--json").stdout)
    return path


def run(place: Path, *words: str, redirect: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    command = f"exec {shlex.join([sys.executable, '-m', 'fitter', *words])} {redirect}"
    return subprocess.run(
        ["sh", "-c", command], cwd=place, capture_output=True, text=True, timeout=120, check=False, **more
    )


ANSWERS = (
    ("a.gguf", *GPU),
    ("a.gguf", *GPU, "--json"),
    ("a.gguf", *GPU, "--format", "python"),
    ("inspect", "a.gguf"),
    ("devices", "--catalogue"),
    ("backend", *GPU),
    ("check",),
    ("diff", "plan.json", "plan.json"),
    ("verify", "a.gguf", "--device", "none"),
    ("--help",),
    ("--version",),
)


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_an_answer_that_cannot_be_written(place: Path, words: Sequence[str]) -> None:
    for redirect, why in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        done = run(place, *words, redirect=redirect)
        assert done.returncode == 5, done.stderr
        lines = done.stderr.splitlines()
        assert lines[-1] == f"fitter: error: the result cannot be written to stdout: {why}"
        assert sum(line.startswith("fitter: error: ") for line in lines) == 1
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ANSWERS[:5], ids=" ".join)
def test_without_stderr_the_answer_is_the_same(place: Path, words: Sequence[str]) -> None:
    whole = run(place, *words)
    assert whole.returncode in (0, 1)
    for redirect in ("2>&-", "2>/dev/full", "<&- 2>&-"):
        done = run(place, *words, redirect=redirect)
        assert (done.returncode, done.stderr) == (whole.returncode, "")
        assert done.stdout.count("\n") == whole.stdout.count("\n") > 0


@cases(">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full")
def test_with_nowhere_to_say_it(redirect: str, place: Path) -> None:
    assert run(place, "a.gguf", *GPU, redirect=redirect).returncode == 5
    assert run(place, "nothing.gguf", redirect=redirect).returncode == 3
    assert run(place, "--nothing", redirect=redirect).returncode == 2


def test_nobody_reads_any_more(place: Path) -> None:
    """The status is a shell's for a program that SIGPIPE ended, and nothing is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fitter", "devices", "--catalogue"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_pipe_that_does_not_wait(place: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    words = [sys.executable, "-m", "fitter", "devices", "--catalogue", "--json"]
    seen = []

    def read() -> None:
        time.sleep(1)
        while part := os.read(reading, 1 << 12):
            seen.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writing)
    thread.join()
    os.close(reading)
    assert (done.returncode, done.stderr) == (0, b"")
    text = b"".join(seen)
    assert len(text) > 1 << 16
    assert json.loads(text)["gpus"]


@cases(*stored_rows("exit_status", "a_file_that_cannot_be_written"))
def test_a_file_that_cannot_be_written(words: Sequence[str], says: str, place: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    done = run(place, *words)
    assert done.returncode == 5
    assert done.stderr == f"fitter: error: {says}\n"
    assert ("unchanged" in done.stdout) == (words[0] == "check"), "what is known is said all the same"
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before


@cases(("KeyError('a\\x1b')", "KeyError in <string>:"), ("ImportError('no click')", "cannot be imported (no click)"))
def test_what_nobody_has_foreseen(error: str, says: str) -> None:
    script = f"""
import sys
from fitter import __main__, cli
def main(words):
    raise {error}
cli.main = main
__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


# --- a plan that does not fit


@pytest.mark.parametrize("form", RUNNABLE)
def test_a_plan_that_does_not_fit_says_nothing_to_run(place: Path, form: str) -> None:
    done = run(place, "a.gguf", *TOO_LARGE, "--format", form)
    assert (done.returncode, done.stdout) == (1, "")
    asked = run(place, "a.gguf", *TOO_LARGE, "--format", form, "--anyway")
    assert asked.returncode == 1
    assert asked.stdout
    assert asked.stderr.splitlines()[-1].startswith("fitter: does not fit: ")


def test_in_python(place: Path) -> None:
    fits = fitter.fit(place / "a.gguf", gpus=["8GiB"])
    assert fits
    assert fits.arguments() == fits.arguments(anyway=True)
    plan = fitter.fit(place / "a.gguf", gpus=["8GiB"], host_memory="1MiB")
    assert not plan
    assert plan.fits is bool(plan) is False
    with pytest.raises(PlanError, match=r"the plan does not fit: the host .*arguments\(anyway=True\)"):
        plan.arguments()
    for form in RUNNABLE:
        made = for_format(plan, form)
        with pytest.raises(PlanError, match="the plan does not fit: the host "):
            made.format(form)
        assert made.format(form, anyway=True)
    with pytest.raises(PlanError, match="the plan does not fit: the host "):
        plan.llama_kwargs()
    assert plan.arguments(anyway=True) == plan.to_dict()["arguments"] == json.loads(plan.format("json"))["arguments"]


SHELLS = {
    "sh": 'args=$({}) && eval "echo llama-server -m model.gguf $args"',
    "bash": 'args=$({}) && eval "echo llama-server -m model.gguf $args"',
    "zsh": 'args=$({}) && eval "echo llama-server -m model.gguf $args"',
    "fish": "set args ({}); and eval echo llama-server -m model.gguf $args",
}
"""The lines of the guide to llama-server."""


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_the_guides_line_starts_nothing_that_does_not_fit(place: Path, shell: str) -> None:
    assert SHELLS[shell].replace("echo ", "").replace("{}", "fitter model.gguf --format shell") in _guide()
    for options, status in ((GPU, 0), (TOO_LARGE, 1)):
        command = shlex.join([sys.executable, "-m", "fitter", "a.gguf", *options, "--format", "shell"])
        script = SHELLS[shell].format(command)
        done = subprocess.run([shell, "-c", script], cwd=place, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith("llama-server -m model.gguf -c ") == (status == 0)
        assert bool(done.stdout) == (status == 0)


def _guide() -> str:
    return (Path(fitter.__file__).parents[1] / "docs" / "guides" / "llama-server.md").read_text()


@cases("", "1")
def test_the_answer_comes_last_where_both_streams_are_one(unbuffered: str, place: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    lines = run(place, "a.gguf", *GPU, redirect="2>&1", env=environment).stdout.splitlines()
    assert any(line.startswith("  estimate ") for line in lines[-3:-1])
    assert lines[-1].startswith("-c ")
