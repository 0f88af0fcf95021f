"""Read the requests of a llama-server from its log. Tokens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import UsageError
from fitter.programs.log_file import NUMBER, lines_of

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
