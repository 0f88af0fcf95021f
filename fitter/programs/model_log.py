"""Count the requests of each model in the log of a server that runs several models."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fitter.errors import UsageError

_REQUEST = re.compile(
    rb"\bproxying request to model (?P<router>.+) on port \d+"
    rb"|\bdispatch: using local process for model: (?P<swap>[^\r\n]*[^\s])"
)
"""The line of a request: of llama-server as a router (whatever its colours and times), and of llama-swap."""

_LONGEST_LINE = 1 << 16
"""Bytes of a line that are read at once: a file without line ends does not fill the memory."""
_FIRST_BYTES = 4096
_MOST_NAMES = 3
MOST_IN_ORDER = 2000
"""Requests whose order is kept: the last ones."""


@dataclass(frozen=True)
class Requests:
    """The requests of a log.

    Attributes:
        counts: The number of requests for each model.
        repeats: How many of all requests are for the same model as the one before.
        order: The models of the last requests, in their order.
    """

    counts: Mapping[str, int]
    repeats: int
    order: tuple[str, ...] = ()

    @property
    def in_a_row(self) -> float:
        """Requests for a model one after the other, on average, as far as that is no chance: 1 for random order."""
        n = sum(self.counts.values())
        by_chance = sum((count / n) ** 2 for count in self.counts.values())
        if n < 2 or by_chance >= 1:
            return 1.0
        beyond = max(0.0, (self.repeats / (n - 1) - by_chance) / (1 - by_chance))
        return 1 / (1 - min(beyond, 1 - 1 / n))


def count_requests(path: Path, names: Collection[str]) -> Requests:
    """Count the requests for each model in a log.

    A router of llama-server writes a line for each request that it passes on, and llama-swap does with
    ``logLevel: debug``. Requests for other models are not counted.

    Args:
        path: The log, of any length.
        names: The models, by the names that the server has for them.

    Raises:
        UsageError: The log cannot be read, is no text, or has no request for any of ``names``.
    """
    counts = dict.fromkeys(names, 0)
    others: dict[str, None] = {}
    repeats, last, order = 0, "", deque[str](maxlen=MOST_IN_ORDER)
    try:
        with open(path, "rb") as file:
            for name in _asked(file, path):
                if name in counts:
                    counts[name] += 1
                    repeats += name == last
                    last = name
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
    if not any(counts.values()):
        raise UsageError(_without_requests(path, counts, others))
    return Requests(counts, repeats, tuple(order))


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
        return f"{path} has requests for {', '.join(others)} and none for {wanted}: name the models as the server does"
    return (
        f"{path} has no request for {wanted}: give the log of a llama-server that routes to models, or of llama-swap "
        "with logLevel: debug"
    )
