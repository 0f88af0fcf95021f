"""Ctrl-C ends a command and its worker, says nothing, and leaves nothing; a killed worker changes no answer."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.cases import cases
from tests.support.patience import SECONDS, TooLateError, all_end, in_time, until
from tools.faults.killed_workers import commands, drawn, run
from tools.models import shapes

COMMANDS = {
    "fit": ("--gpu", "4x 24GiB"),
    "fit, every step": ("--gpu", "4x 24GiB", "-v"),
    "fit to this machine": ("--device", "none", "--host-memory", "1000GiB", "--json"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # with its vocabulary: each load takes long enough to be interrupted
    return shapes.write("qwen3-235b-a22b", tmp_path_factory.mktemp("models"))


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """``fitter`` as a terminal starts it, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fitter", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers, as soon as there are any."""
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        if children := parent.children():
            return children
        time.sleep(0.002)
    raise TooLateError


def interrupted(seconds: float, *words: str, by: signal.Signals = signal.SIGINT, to_all: bool = True) -> str:
    """Interrupt a command these seconds after its first worker has started, and return its stderr."""
    with started(*words) as process:
        workers = workers_of(process)
        time.sleep(seconds)
        (os.killpg if to_all else os.kill)(process.pid, by)
        said, warned = process.communicate(timeout=SECONDS)
        assert all_end(workers)
    if said or process.returncode == 0:
        raise TooLateError
    assert process.returncode == 128 + by
    return warned


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["while it starts", "while it loads"])
def test_an_interrupt_ends_the_command_and_its_worker(model: Path, words: tuple[str, ...], seconds: float) -> None:
    warned = in_time(lambda: interrupted(seconds, str(model), *words))
    assert "Traceback" not in warned
    assert "rror" not in warned


def test_an_interrupt_of_the_command_alone_ends_its_worker_too(model: Path) -> None:
    """``kill -INT`` reaches one process, where Ctrl-C reaches the whole group."""
    assert "rror" not in in_time(lambda: interrupted(0.1, str(model), *COMMANDS["fit"], to_all=False))


def test_an_impatient_interrupt(model: Path) -> None:
    def attempt() -> None:
        with started(str(model), *COMMANDS["fit"]) as process:
            workers = workers_of(process)
            for _ in range(3):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.01)
            said, warned = process.communicate(timeout=SECONDS)
            assert all_end(workers)
        if said:
            raise TooLateError
        assert process.returncode != 0
        assert "Traceback" not in warned

    in_time(attempt)


def test_a_killed_command_leaves_no_worker(model: Path) -> None:
    def attempt() -> None:
        with started(str(model), *COMMANDS["fit"]) as process:
            workers = workers_of(process)
            time.sleep(0.1)
            process.kill()
            if process.wait() != -signal.SIGKILL:
                raise TooLateError
            assert all_end(workers)

    in_time(attempt)


@cases((0.0, signal.SIGINT), (0.8, signal.SIGINT), (0.3, signal.SIGTERM), (0.3, signal.SIGHUP))
def test_an_interrupt_ends_the_plans_of_a_directory(
    seconds: float, by: signal.Signals, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, temporary = tmp_path / "models", tmp_path / "temporary"
    models.mkdir()
    temporary.mkdir()
    for number in range(8):
        (models / f"{number}.gguf").symlink_to(model)
    monkeypatch.setenv("TMPDIR", str(temporary))
    warned = in_time(lambda: interrupted(seconds, str(models), "--gpu", "4x 24GiB", by=by))
    # on a busy machine it has time to say how far it is
    assert re.sub(r"\[\d+ dummy loads\] planned .*\n", "", warned) == ""
    assert list(temporary.iterdir()) == []


def test_what_a_killed_command_has_left_is_removed_by_the_next(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("quants", str(model), "--gpu", "4x 24GiB") as process:
        until(lambda: [*tmp_path.glob("*/*")] != [], "the command makes no directory")
        process.kill()
    assert len([*tmp_path.glob("*/*")]) == 1
    with started("quants", str(model), "--gpu", "4x 24GiB", "--type", "Q8_0") as process:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert [*tmp_path.iterdir()] == []


def test_what_is_ignored_stays_ignored(model: Path) -> None:
    """A program that ``nohup`` starts ignores SIGHUP."""
    code = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from fitter.__main__ import main; main()"
    words = [sys.executable, "-c", code, str(model), *COMMANDS["fit"]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        workers_of(process)
        process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and said


NAMES = ("qwen3-30b-a3b", "nemotron-h-9b", "lock")
_KILLS = 6


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_worker_changes_no_answer(name: str, tmp_path: Path) -> None:
    (command,) = [command for command in commands(tmp_path) if command.name == name]
    whole = run(command)
    assert whole.status == 0
    draw = random.Random(name)
    for _ in range(_KILLS):
        moments = drawn(draw, whole.seconds, 2)
        found = run(command, moments, draw)
        assert found.is_as(whole) or found.is_error, (moments, found)
