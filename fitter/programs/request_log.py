"""Read the requests in the log of a server: of one llama-server in tokens, of several models by name.

Whoever names the file need not be trusted.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fitter import system
from fitter.errors import UsageError
from fitter.text import printable

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


_MOST_REQUESTS = 100_000
_PROMPT = re.compile(rb"prompt eval time = +[\d.]+ ms / +%b tokens" % NUMBER)
_ANSWER = re.compile(rb"(?<!prompt )\beval time = +[\d.]+ ms / +%b (?:tokens|runs)" % NUMBER)
_END = re.compile(rb"stop processing: n_(?:tokens|past) = +%b" % NUMBER)


@dataclass(frozen=True)
class ServedRequest:
    """A request that a server has answered.

    Attributes:
        prompt: Tokens of its prompt.
        cached: Those of them that were still in memory.
        answer: Tokens of the answer.
    """

    prompt: int
    cached: int
    answer: int


def requests_of(path: str) -> tuple[ServedRequest, ...]:
    """Read the requests of a log, the last ones of many. Raises ``UsageError`` where it has none, or cannot be read."""
    found = tuple(deque(requests_in(lines_of(Path(path))), maxlen=_MOST_REQUESTS))
    if not found:
        raise UsageError(
            f"{path} has no request of a llama-server: give the log of one that has answered some, with its lines "
            "'prompt eval time' and 'stop processing'"
        )
    return found


def requests_in(lines: Iterable[bytes]) -> Iterator[ServedRequest]:
    """Find the requests in the lines of a log.

    A server writes how many tokens of the prompt it computed, how many it answered, and how many the slot then has: all
    but the last token of the answer.
    """
    computed = answer = 0
    for line in lines:
        if match := _PROMPT.search(line):
            computed, answer = int(match[1]), 0
        elif match := _ANSWER.search(line):
            answer = int(match[1])
        elif (match := _END.search(line)) and computed:
            prompt = max(computed, int(match[1]) - max(0, answer - 1))
            yield ServedRequest(prompt, prompt - computed, max(1, answer))
            computed = answer = 0


MOST_REQUESTS = 2000
"""The most requests that are read: the last ones."""

_REQUEST = re.compile(
    rb"\bproxying request to model (?P<router>.{1,256}) on port \d+"
    rb"|\bdispatch: using local process for model: (?P<swap>[^\r\n]{0,255}[^\s])"
)
"""The line of a request: of llama-server as a router (whatever its colours and times), and of llama-swap."""

_MOST_NAMES = 3
_LONGEST_NAME = 60


def last_requests(path: Path, names: Collection[str]) -> tuple[str, ...]:
    """Read the models of the last requests in a log, in their order: ``MOST_REQUESTS`` at most.

    A router of llama-server writes a line for each request that it passes on, and llama-swap does with
    ``logLevel: debug``. Requests for other models are left out.

    Args:
        path: The log; of one longer than 256 MiB, its end is read.
        names: The models, by the names that the server has for them.

    Raises:
        UsageError: The log cannot be read, is no text, or has no request for any of ``names``.
    """
    wanted, order = frozenset(names), deque[str](maxlen=MOST_REQUESTS)
    others: dict[str, None] = {}
    for match in filter(None, map(_REQUEST.search, lines_of(path))):
        name = (match["router"] or match["swap"]).decode("utf-8", "replace")
        if name in wanted:
            order.append(name)
        elif len(others) < _MOST_NAMES:
            others[name] = None
    if not order:
        raise UsageError(_without_requests(path, names, others))
    return tuple(order)


def _without_requests(path: Path, names: Collection[str], others: Collection[str]) -> str:
    wanted = ", ".join(names) or "no model"
    if others:
        shown = ", ".join(printable(each, _LONGEST_NAME) for each in others)
        return f"{path} has requests for {shown} and none for {wanted}: name the models as the server does"
    return (
        f"{path} has no request for {wanted}: give the log of a llama-server that routes to models, or of llama-swap "
        "with logLevel: debug"
    )
