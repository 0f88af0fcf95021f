"""Read the requests of a llama-server from its log. Tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fitter.errors import UsageError

_MOST_BYTES = 1 << 30
"""The longest log to read: a server's log of a year."""

_PROMPT = re.compile(r"prompt eval time = +[\d.]+ ms / +(\d+) tokens")
_ANSWER = re.compile(r"(?<!prompt )\beval time = +[\d.]+ ms / +(\d+) (?:tokens|runs)")
_END = re.compile(r"stop processing: n_(?:tokens|past) = +(\d+)")


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
    """Read all requests of a log. Raises ``UsageError`` where it has none, or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = tuple(requests_in(_limited(file)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if not found:
        raise UsageError(
            f"{path} has no request of a llama-server: give the log of one that has answered some, with its lines "
            "'prompt eval time' and 'stop processing'"
        )
    return found


def requests_in(lines: Iterable[str]) -> Iterator[ServedRequest]:
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


def _limited(lines: Iterable[str]) -> Iterator[str]:
    left = _MOST_BYTES
    for line in lines:
        left -= len(line)
        if left < 0:
            return
        yield line
