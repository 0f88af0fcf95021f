"""A worker that is killed while a plan or a lock is made: the answer is the same, or there is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.killed_workers import Command, Run, commands, drawn, run

NAMES = ("qwen3-30b-a3b", "nemotron-h-9b", "lock")
_KILLS = 6


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Command, Run]]:
    """Each command, and how it ends undisturbed."""
    found = commands(tmp_path_factory.mktemp("models"))
    return {command.name: (command, run(command)) for command in found if command.name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_worker_changes_no_answer(every: dict[str, tuple[Command, Run]], name: str) -> None:
    command, whole = every[name]
    assert whole.status == 0
    draw = random.Random(name)
    for _ in range(_KILLS):
        moments = drawn(draw, whole.seconds, 2)
        found = run(command, moments, draw)
        assert found.is_as(whole) or found.is_error, (moments, found)


def test_the_answer_is_compared(every: dict[str, tuple[Command, Run]], tmp_path: Path) -> None:
    # what a run of another machine answers is neither the same nor an error
    command, whole = every["qwen3-30b-a3b"]
    words = tuple("7GiB" if word == "8GiB" else word for word in command.words)
    other = run(Command(command.name, words))
    assert not other.is_as(whole)
    assert not other.is_error
