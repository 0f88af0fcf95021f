"""The file of ``--resume``: whatever is there, no cell is lost, none is taken for another one, and nobody waits."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from fitter.api.explore import stored_cells
from fitter.api.explore.stored_cells import Key, State
from fitter.errors import AnswerError, UsageError
from fitter.planning.tables.exploration import ExploredCell
from tests.support.cases import named_cases

HEAD = '{"format": "fitter explore", "version": 1}\n'
CELL = ExploredCell("model.gguf", None, "24GiB", 4096, None, None, None)
FOUND = replace(
    CELL,
    fits=True,
    n_ctx=4096,
    bytes=7,
    used=8,
    host_weights=0,
    tokens_per_second=9.5,
    full_context_tokens_per_second=8.5,
    arguments=("-c",),
)
KEY = Key("digest", "1.0 abc", "model.gguf", {"n_ctx": 4096})


def written(path: Path) -> dict[str, Any]:
    """Write ``FOUND`` down; its line."""
    with State.opened(path) as state:
        state.add(FOUND, KEY)
        state.add(FOUND, KEY)
    (_, line) = path.read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def known(path: Path, key: Key = KEY) -> ExploredCell | None:
    with State.opened(path) as state:
        return state.known(CELL, key)


def test_a_cell_is_known_by_all_that_it_follows_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    written(path)
    assert known(path) == FOUND
    others = [{"header": "x"}, {"llama_cpp": "1.0 abd"}, {"called": "x"}, {"keywords": {"n_ctx": 4097}}]
    assert [known(path, replace(KEY, **each)) for each in others] == [None] * 4
    monkeypatch.setattr(stored_cells, "VERSION", "0.0.1")
    assert known(path) is None


class InterruptedFile(io.FileIO):
    """A file whose first write is interrupted right after it."""

    writes = 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.writes += 1
        if self.writes == 1:
            raise KeyboardInterrupt
        return count


def test_a_cell_is_written_once_though_ctrl_c_comes_right_after_its_write(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    with InterruptedFile(path, "ab+") as file:
        state = State(path, cast(BinaryIO, file), iter(()))
        with pytest.raises(KeyboardInterrupt):
            state.add(FOUND, KEY)
        state.add(FOUND, KEY)
        state.add(FOUND, replace(KEY, header="another"))
    assert len(path.read_text().splitlines()) == 3


@named_cases(
    ("a context that is no number", {"n_ctx": "4096"}),
    ("a context below 0", {"n_ctx": -1}),
    ("a yes that is a number", {"fits": 1}),
    ("a speed that is none", {"tokens_per_second": float("nan")}),
    ("a speed without end", {"tokens_per_second": float("inf")}),
    ("a speed in words", {"full_context_tokens_per_second": "8.5"}),
    ("arguments that are one text", {"arguments": "-c 4096"}),
    ("arguments that are numbers", {"arguments": [4096]}),
    ("a problem that is a list", {"problem": []}),
    ("another figure", {"colour": "blue"}),
)
def test_a_damaged_cell_is_planned_again(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    line = written(path)
    path.write_text(HEAD + json.dumps(line) + "\n")
    assert known(path) == FOUND
    path.write_text(HEAD + json.dumps({**line, "found": {**line["found"], **change}}) + "\n")
    assert known(path) is None


def test_a_cell_of_before_there_was_a_speed_with_a_full_context_is_known(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    line = written(path)
    assert known(path) == FOUND
    del line["found"]["full_context_tokens_per_second"]
    path.write_text(HEAD + json.dumps(line) + "\n")
    assert known(path) == replace(FOUND, full_context_tokens_per_second=None)
    del line["found"]["tokens_per_second"]
    path.write_text(HEAD + json.dumps(line) + "\n")
    assert known(path) is None


def test_what_is_half_written_is_removed_and_lines_that_are_damaged_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    whole = HEAD + "[1]\n" + "[" * 5000 + "\n\x00\n" + json.dumps(written(path)) + "\n"
    path.write_text(whole + '{"key": "abc')
    assert known(path) == FOUND
    assert path.read_text() == whole
    for half in ("", HEAD[:20]):
        path.write_text(half)
        written(path)
        assert known(path) == FOUND


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def long_line(path: Path) -> None:
    path.write_text(HEAD + "x" * (2 << 20) + "\n")


@named_cases(
    ("a directory", Path.mkdir, "{} is a directory: name a file with --resume"),
    ("a pipe", fifo, "{} is not a regular file: name another one with --resume"),
    ("a huge file", huge, "{} is not a file of fitter explore: name another one with --resume"),
    ("a line without end", long_line, "{} is not a file of fitter explore: name another one with --resume"),
    (
        "another file",
        lambda path: path.write_text("{}\n"),
        "{} is not a file of fitter explore: name another one with --resume",
    ),
    (
        "half of another file",
        lambda path: path.write_text("model"),
        "{} is not a file of fitter explore: name another one with --resume",
    ),
)
def test_what_is_no_file_of_cells_stays_as_it_is(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    make(path)
    before = path.stat()
    with pytest.raises(UsageError) as caught, State.opened(path):
        pass
    assert str(caught.value) == said.format(path)
    assert (path.stat().st_size, path.stat().st_mtime) == (before.st_size, before.st_mtime)


def test_a_file_without_a_cell_is_not_left(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    with State.opened(path):
        pass
    assert not path.exists()
    path.touch()
    with State.opened(path):
        pass
    assert path.exists()


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    command = [
        sys.executable,
        "-c",
        f"from fitter.api.explore.stored_cells import State\nwith State.opened({str(path)!r}): pass",
    ]
    with State.opened(path) as state:
        state.add(FOUND, KEY)
        other = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert other.stderr.splitlines()[-1] == (
        f"fitter.errors.UsageError: {path} is written by another fitter explore: wait for that to end, or name another "
        "file with --resume"
    )
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 0
    assert known(path) == FOUND


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file takes more than so many bytes, meanwhile: pytest's own output is one, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    written(path)
    before = path.read_text()
    with limited(len(before) + 100), pytest.raises(AnswerError) as caught, State.opened(path) as state:
        state.add(FOUND, replace(KEY, header="another"))
    assert str(caught.value) == f"{path} cannot be written (it takes no more): name another file with --resume"
    assert path.read_text() == before
