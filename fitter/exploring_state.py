"""The file in which the cells of a grid are kept while they are planned: a line of JSON for each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fitter.errors import AnswerError, UsageError
from fitter.parameters import AnyPath
from fitter.planning.explored import ExploredCell

_VERSION = 1
_FORMAT = "fitter explore"

_KEPT = {"key": str, "header": str, "found": dict}
"""What a line needs to have."""

Key = tuple[str, str, dict[str, Any]]
"""The digest of the header, the build of llama.cpp, and the keywords of a cell."""


class State:
    """Cells that are known, and the file that new ones are added to; without a file none are."""

    def __init__(self, path: Path | None, file: IO[str] | None, lines: list[dict[str, Any]]) -> None:
        self._path = path
        self._file = file
        self._cells = {line["key"]: line["found"] for line in lines}
        self._headers = {line["header"] for line in lines}
        self.used = 0

    @classmethod
    @contextmanager
    def opened(cls, path: AnyPath | None) -> Iterator[State]:
        """The file at ``path``, made if it is not there.

        Raises ``UsageError`` where it is something else, ``AnswerError`` where it cannot be written.
        """
        if path is None:
            yield cls(None, None, [])
            return
        where = Path(os.fsdecode(path))
        lines, length = _read(where)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(where, "a", encoding="utf-8"))
                # what an interrupt has left of a line
                file.truncate(length)
            except OSError as error:
                raise _unwritten(where, error) from None
            state = cls(where, file, lines)
            if not length:
                state._append({"format": _FORMAT, "version": _VERSION})
            yield state

    def check(self, headers: set[str]) -> None:
        """Raise ``UsageError`` where all cells of the file are of other models, or of files that have changed."""
        if self._cells and self._headers.isdisjoint(headers):
            raise UsageError(
                f"{self._path} has cells of another model, or of a file that has changed since: name another file with "
                "--resume, or delete it"
            )

    def known(self, cell: ExploredCell, key: Key) -> ExploredCell | None:
        """``cell`` with what the file has of it; ``None`` where it has nothing."""
        found = self._cells.get(_digest(key))
        if found is None:
            return None
        try:
            known = cell.having(found)
        except (TypeError, ValueError):
            return None
        self.used += 1
        return known

    def add(self, cell: ExploredCell, key: Key) -> None:
        """Write ``cell`` down."""
        if self._file is not None:
            line = {"key": _digest(key), "header": key[0], "llama_cpp": key[1], "cell": _said(cell)}
            self._append({**line, "found": cell.figures()})

    def _append(self, line: dict[str, Any]) -> None:
        """One write of one line, so that an interrupt leaves whole ones. Raises ``AnswerError``."""
        assert self._file is not None and self._path is not None
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritten(self._path, error) from None


def _unwritten(path: Path, error: OSError) -> AnswerError:
    return AnswerError(f"{path} cannot be written ({error.strerror}): name another file with --resume")


def _said(cell: ExploredCell) -> dict[str, Any]:
    names = ("model", "file_type", "machine", "asked_context", "type_k", "type_v", "n_ubatch")
    return {name: getattr(cell, name) for name in names}


def _digest(key: Key) -> str:
    text = json.dumps(key, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The cells in a file, and the length of its whole lines. Raises ``UsageError``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): name another file with --resume") from None
    length = data.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(data[:length].splitlines()):
        try:
            each = json.loads(line)
        except (ValueError, RecursionError):
            each = None
        if number == 0:
            if not isinstance(each, dict) or (each.get("format"), each.get("version")) != (_FORMAT, _VERSION):
                raise UsageError(f"{path} is not a file of fitter explore: name another one with --resume")
        elif isinstance(each, dict) and all(isinstance(each.get(name), kind) for name, kind in _KEPT.items()):
            found.append(each)
    if data and not length:
        raise UsageError(f"{path} is not a file of fitter explore: name another one with --resume")
    return found, length
