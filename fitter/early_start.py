"""Before a command's imports: start the workers that it will need, open its stdout and stderr. It imports little."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from fitter import system
from fitter.errors import AnswerError
from fitter.llama.worker import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from typing_extensions import Buffer

_NO_WORKER = ("backend", "diff", "history", "llama-cpp", "serve")
_MANY_WORKERS = ("lock", "check")
_MOST_WORKERS = 4
_QUICK = frozenset({"-h", "--help", "--version", "--catalogue"})
_OTHER_LLAMA_CPP = ("--llama-cpp", "--profile")
"""Options that give a worker an environment of its own."""


def begin(args: Sequence[str]) -> bool:
    """Start the workers of a command; return whether ``fitter.api`` uses them.

    One worker loads models. Another one sleeps until a tokenizer is to be read.
    """
    if not args or args[0] in _NO_WORKER or not _QUICK.isdisjoint(args):
        return False
    if any(word.startswith(_OTHER_LLAMA_CPP) for word in args):
        return False
    if args[0] in _MANY_WORKERS:
        for _ in range(min(system.processors(), _MOST_WORKERS)):
            process.prestart()
        return False
    if system.CAN_FORK:
        # this process and both forks need it
        import fitter.llama.types  # noqa: F401
    process.prestart()
    process.prestart(is_asleep=True)
    return True


class _Answer(io.FileIO):
    """stdout. A write succeeds, or raises ``AnswerError``, or ``BrokenPipeError`` if the reader is gone."""

    def write(self, data: Buffer, /) -> int:
        try:
            while (written := super().write(data)) is None:
                # It is non-blocking, and full for the moment.
                system.wait_writable(self.fileno())
        except OSError as error:
            if error.errno in system.BROKEN_PIPE:
                raise BrokenPipeError from None
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise AnswerError(f"the result cannot be written to stdout: {why}") from None
        return written


class _Remarks(io.FileIO):
    """stderr. Failed writes are dropped without an error."""

    def write(self, data: Buffer, /) -> int:
        with contextlib.suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def open_standard() -> None:
    """Open missing standard streams, so that no other file gets their numbers.

    Writing to a closed stdout fails; writes to a closed stderr are dropped.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # opens as this number, the lowest free one
            os.open(os.devnull, mode)
            os.set_inheritable(number, True)
    if not system.is_console(1):
        sys.stdout = _text(_Answer(1, "w", closefd=False), sys.stdout)
    if not system.is_console(2):
        sys.stderr = _text(_Remarks(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, original: TextIO | None) -> TextIO:
    """A text stream with the settings of Python's own stream, if there is one."""
    encoding = getattr(original, "encoding", None)
    # stderr is never buffered, nor is stdout with PYTHONUNBUFFERED
    waits = (
        original is not None
        and not getattr(original, "line_buffering", False)
        and not getattr(original, "write_through", False)
    )
    # names of models and devices may contain characters that the terminal's encoding lacks
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=not waits
    )
