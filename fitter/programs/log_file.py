"""Read the lines of a server's log. Whoever names the file need not be trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fitter import system
from fitter.errors import UsageError

MOST_BYTES = 1 << 28
"""Most bytes to read, the last ones: they take some ten seconds."""
NUMBER = rb"(\d{1,18})(?!\d)"
"""A pattern for a number: no server counts as far as more digits."""

_LONGEST_LINE = 1 << 14
"""Bytes of a line to read at once: a file without line ends does not fill the memory."""


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of the log at ``path``, long ones in pieces.

    Only a regular file is read, and of a long one the last ``MOST_BYTES``.

    Raises:
        UsageError: The file cannot be read, is no regular one, or is no text.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status, is_first = os.fstat(file.fileno()), True
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path} is no file: give the log of a server")
            left = min(MOST_BYTES, max(_LONGEST_LINE, status.st_size))
            file.seek(max(0, status.st_size - left))
            while left > 0 and (line := file.readline(_LONGEST_LINE)):
                if is_first and b"\0" in line:
                    raise UsageError(f"{path} is no text in UTF-8: give the log as the server wrote it")
                left, is_first = left - len(line), False
                yield line
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory: give the log in it") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the log of a server") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read ({reason}): give a log that you may read") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer is opened at once, to be refused."""
    return os.open(path, flags | system.NO_WAIT)
