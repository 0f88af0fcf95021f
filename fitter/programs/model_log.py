"""Read which models the requests in the log of a server are for."""

from __future__ import annotations

import re
import stat
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from fitter.errors import UsageError
from fitter.text import printable

MOST_REQUESTS = 2000
"""The most requests that are read: the last ones."""

_REQUEST = re.compile(
    rb"\bproxying request to model (?P<router>.+) on port \d+"
    rb"|\bdispatch: using local process for model: (?P<swap>[^\r\n]*[^\s])"
)
"""The line of a request: of llama-server as a router (whatever its colours and times), and of llama-swap."""

_LONGEST_LINE = 1 << 16
"""Bytes of a line that are read at once: a file without line ends does not fill the memory."""
_FIRST_BYTES = 4096
_MOST_NAMES = 3
_LONGEST_NAME = 60


def last_requests(path: Path, names: Collection[str]) -> tuple[str, ...]:
    """Read the models of the last requests in a log, in their order: ``MOST_REQUESTS`` at most.

    A router of llama-server writes a line for each request that it passes on, and llama-swap does with
    ``logLevel: debug``. Requests for other models are left out.

    Args:
        path: The log, of any length.
        names: The models, by the names that the server has for them.

    Raises:
        UsageError: The log cannot be read, is no text, or has no request for any of ``names``.
    """
    wanted, order = frozenset(names), deque[str](maxlen=MOST_REQUESTS)
    others: dict[str, None] = {}
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            # reading from a pipe may wait forever
            raise UsageError(f"{path} is no file: give the log of a server")
        with open(path, "rb") as file:
            for name in _asked(file, path):
                if name in wanted:
                    order.append(name)
                elif len(others) < _MOST_NAMES:
                    others[name] = None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory: give the log in it") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the log of a server") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read ({reason}): give a log that you may read") from None
    if not order:
        raise UsageError(_without_requests(path, names, others))
    return tuple(order)


def _asked(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the model of each request."""
    is_first = True
    while line := file.readline(_LONGEST_LINE):
        if is_first and b"\0" in line[:_FIRST_BYTES]:
            raise UsageError(f"{path} is no text in UTF-8: give the log as the server wrote it")
        is_first = False
        if match := _REQUEST.search(line):
            yield (match["router"] or match["swap"]).decode("utf-8", "replace")


def _without_requests(path: Path, names: Collection[str], others: Collection[str]) -> str:
    wanted = ", ".join(names) or "no model"
    if others:
        shown = ", ".join(printable(each, _LONGEST_NAME) for each in others)
        return f"{path} has requests for {shown} and none for {wanted}: name the models as the server does"
    return (
        f"{path} has no request for {wanted}: give the log of a llama-server that routes to models, or of llama-swap "
        "with logLevel: debug"
    )
