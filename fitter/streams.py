"""The process's stdout and stderr as the command needs them. Imports little: it is there before anything else is."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys

from fitter.errors import AnswerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from typing_extensions import Buffer


class _Answer(io.FileIO):
    """stdout. The answer is there, or an ``AnswerError``; ``BrokenPipeError`` where nobody reads it any more."""

    def write(self, data: Buffer, /) -> int:
        try:
            while (written := super().write(data)) is None:
                # It belongs to a program that does not wait for its pipes.
                select.select([], [self], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise AnswerError(f"the answer cannot be written to stdout: {why}") from None
        return written


class _Remarks(io.FileIO):
    """stderr. What cannot be written there is lost, and no reason to end."""

    def write(self, data: Buffer, /) -> int:
        with contextlib.suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def open_standard() -> None:
    """Have all three streams, closed ones too: no file of ours may get the number of one that is missing.

    What is written to a closed stdout fails, and what is written to a closed stderr is lost.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free is this one
            os.open(os.devnull, mode)
            os.set_inheritable(number, True)
    sys.stdout = _text(_Answer(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Remarks(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, known: TextIO | None) -> TextIO:
    """A text stream like the one that Python has made, if it has made one."""
    encoding = getattr(known, "encoding", None)
    # stderr is always one that does not wait, and stdout with PYTHONUNBUFFERED
    waits = (
        known is not None and not getattr(known, "line_buffering", False) and not getattr(known, "write_through", False)
    )
    # names of models and devices may hold what the terminal's encoding does not
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=not waits
    )
