"""The file of ``--resume``: finished cells of a grid, one line of JSON for each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fitter import system
from fitter.errors import AnswerError, UsageError
from fitter.parameters.table import AnyPath
from fitter.parameters.values import shown
from fitter.planning.tables.exploration import ASKED, ExploredCell
from fitter.version import VERSION

_HEAD = {"format": "fitter explore", "version": 1}
_HEAD_LINE = (json.dumps(_HEAD) + "\n").encode()

_KEPT = {"key": str, "header": str, "found": dict}
"""Keys that every line has, with the types of their values."""

_LONGEST_LINE = 1 << 20
"""Most bytes of a line; a cell takes about a thousand."""


@dataclass(frozen=True)
class Key:
    """The facts that determine a cell's figures.

    Attributes:
        header: Digest of the model's header.
        llama_cpp: Version and key of the build of llama.cpp.
        called: The model's name.
        keywords: Keywords of ``fit``.
    """

    header: str
    llama_cpp: str
    called: str
    keywords: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the key and of fitter's version."""
        text = json.dumps(
            [VERSION, self.header, self.llama_cpp, self.called, self.keywords], sort_keys=True, default=str
        )
        return hashlib.sha256(text.encode()).hexdigest()


class State:
    """Stored cells, and the file to which new ones are added, if any."""

    def __init__(self, path: Path | None, file: BinaryIO | None, lines: Iterator[dict[str, Any]]) -> None:
        self._path = path
        self._file = file
        self._cells: dict[str, dict[str, Any]] = {}
        self._headers: set[str] = set()
        for line in lines:
            self._cells[line["key"]] = line["found"]
            self._headers.add(line["header"])
        self._added: set[str] = set()
        self._last_write: tuple[str, int] = ("", 0)
        self.used = 0

    @classmethod
    @contextmanager
    def opened(cls, path: AnyPath | None) -> Iterator[State]:
        """Open and lock the file at ``path``; the first cell creates it.

        Raises:
            UsageError: The file is something else, or another process has locked it.
            AnswerError: The file cannot be written.
        """
        if path is None:
            yield cls(None, None, iter(()))
            return
        where = _place(path)
        is_new = not where.exists()
        with contextlib.ExitStack() as stack:
            try:
                # unbuffered: a failed write must not be repeated when the file is closed
                file = stack.enter_context(open(where, "ab+", buffering=0))
            except OSError as error:
                raise _write_error(where, error) from None
            _lock(where, file)
            try:
                yield cls(where, file, _lines(where, file))
            finally:
                if is_new and not os.fstat(file.fileno()).st_size:
                    where.unlink(missing_ok=True)

    def check(self, headers: set[str]) -> None:
        """Raise ``UsageError`` if all stored cells belong to other models or to changed files."""
        if self._cells and self._headers.isdisjoint(headers):
            raise UsageError(
                f"{self._path} has cells of another model, or of a file that has changed since: name another file with "
                "--resume, or delete it"
            )

    def known(self, cell: ExploredCell, key: Key) -> ExploredCell | None:
        """Return ``cell`` with its stored figures; ``None`` if there are none."""
        figures = self._cells.get(key.digest)
        if figures is None:
            return None
        try:
            stored = cell.having(figures)
        except ValueError:
            return None
        self.used += 1
        return stored

    def add(self, cell: ExploredCell, key: Key) -> None:
        """Append ``cell`` by one write, so that an interrupt leaves whole lines. Raises ``AnswerError``."""
        if self._file is None or self._path is None:
            return
        by: dict[str, Any] = {"header": key.header, "fitter": VERSION, "llama_cpp": key.llama_cpp}
        asked = dict(zip(ASKED, cell.asked, strict=True))
        line = {"key": key.digest, **by, "cell": asked, "found": cell.figures()}
        data = (json.dumps(line) + "\n").encode()
        try:
            before = os.fstat(self._file.fileno()).st_size
            # an interrupt can come right after a write: only the file's size says whether the last cell is in it
            last, size = self._last_write
            if before > size:
                self._added.add(last)
            if key.digest in self._added:
                return
            self._last_write = key.digest, before
            data = data if before else _HEAD_LINE + data
            if self._file.write(data) != len(data):
                self._file.truncate(before)
                raise AnswerError(f"{self._path} cannot be written (it takes no more): name another file with --resume")
        except OSError as error:
            raise _write_error(self._path, error) from None


def _place(path: AnyPath) -> Path:
    """Check the path of the file. Raises ``UsageError`` where it is not a regular file."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise UsageError(f"resume (--resume) is {shown(path)}: give a path")
    where = Path(os.fsdecode(path))
    try:
        mode = where.stat().st_mode
    except FileNotFoundError:
        return where
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{where} cannot be read ({reason}): name another file with --resume") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{where} is a directory: name a file with --resume")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{where} is not a regular file: name another one with --resume")
    return where


def _lock(path: Path, file: BinaryIO) -> None:
    """Lock the file until it is closed, where the file system has locks. Raises ``UsageError`` if it is locked."""
    try:
        system.lock_file(file, waits=False)
    except BlockingIOError:
        raise UsageError(
            f"{path} is written by another fitter explore: wait for that to end, or name another file with --resume"
        ) from None
    except OSError:
        # a file system without locks
        return


def _lines(path: Path, file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Read the cells of a file, skip damaged lines, and remove an incomplete last line. Raises ``UsageError``."""
    with contextlib.ExitStack() as stack:
        try:
            reader = stack.enter_context(open(os.dup(file.fileno()), "rb"))
            reader.seek(0)
            length = 0
            while line := reader.readline(_LONGEST_LINE):
                if not length and not _is_head(line):
                    raise _not_of_ours(path)
                if not line.endswith(b"\n"):
                    if len(line) == _LONGEST_LINE:
                        raise _not_of_ours(path)
                    # an interrupt cut the line
                    file.truncate(length)
                    return
                if length and (cell := _cell(line)) is not None:
                    yield cell
                length += len(line)
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}): name another file with --resume") from None


def _is_head(line: bytes) -> bool:
    """Return whether ``line`` is the head of such a file, or an interrupted part of it."""
    if not line.endswith(b"\n"):
        return _HEAD_LINE.startswith(line)
    try:
        return bool(json.loads(line) == _HEAD)
    except (ValueError, RecursionError):
        return False


def _cell(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in _KEPT.items())
    return entry if is_one else None


def _not_of_ours(path: Path) -> UsageError:
    return UsageError(f"{path} is not a file of fitter explore: name another one with --resume")


def _write_error(path: Path, error: OSError) -> AnswerError:
    return AnswerError(f"{path} cannot be written ({error.strerror}): name another file with --resume")
