"""The work of users: turns of conversations, and how many at once; as the log of a server has them, or as named kinds.

A turn is a request: a prompt, of which a share is the beginning of the turn before and need not be computed again, and
an answer. Tokens, and seconds for times. ``session.toml`` has named kinds of work, with sources. A log of one
llama-server has tokens, a log of several models their names. Whoever names the file need not be trusted.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fitter import system
from fitter.errors import UsageError
from fitter.parameters.table import MAX_USERS
from fitter.parameters.values import parse_tokens, parse_whole, shown
from fitter.planning.speed.cost import Workload
from fitter.storage import read_data
from fitter.text import printable


@dataclass(frozen=True)
class Session:
    """A conversation of each of several users, on average."""

    prompt: int = Workload.prompt
    """Tokens of a turn's prompt, with all that was said before."""
    answer: int = Workload.generate
    """Tokens of an answer."""
    reused: float = 0.0
    """Share of the prompt that is the beginning of the turn before."""
    turns: int = 1
    """Turns of a conversation; nothing is reused in its first."""
    users: int = 1
    """Users at once, each with a conversation."""
    gap: float = 0.0
    """Seconds between an answer and the user's next turn."""

    @property
    def new(self) -> float:
        """Tokens of a prompt that the turn before did not have."""
        return self.prompt * (1 - self.reused)

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end: each turn adds what is new and an answer, if anything is reused."""
        more = (self.turns - 1) / 2 * (self.new + self.answer) if self.reused else 0.0
        return round(self.prompt + more) + self.answer

    def computed(self, kept: float = 1.0) -> float:
        """Compute the tokens of a prompt that are computed in a turn, on average.

        ``kept``: how often the turn before is still in memory.
        """
        if not self.reused:
            return float(self.prompt)
        first = max(self.new, self.prompt - (self.turns - 1) / 2 * (self.new + self.answer))
        later = self.new + (1 - kept) * (self.prompt - self.new)
        return (first + (self.turns - 1) * later) / self.turns

    def scaled_to(self, context: int) -> Session:
        """Return it with shorter prompts and answers, in proportion, so that it ends within ``context`` tokens."""
        share = (context - 1) / self.longest
        prompt, answer = (max(1, int(share * tokens)) for tokens in (self.prompt, self.answer))
        return replace(self, prompt=prompt, answer=answer)

    @property
    def words(self) -> str:
        """The text of ``--workload`` for it, its users left out."""
        reused = f",reused={round(100 * self.reused, 3):g}%,turns={self.turns}" if self.reused else ""
        gap = f",gap={self.gap:g}" if self.gap else ""
        return f"prompt={self.prompt}{reused},answer={self.answer}{gap}"

    def workload(self, kept: float = 1.0, users: int | None = None) -> Workload:
        """Make the request to price: an average turn, of ``users`` at once (default: all)."""
        computed = min(self.prompt, max(1, round(self.computed(kept))))
        return Workload(computed, self.answer, self.prompt - computed, self.users if users is None else users)


_KEYS = {"prompt": parse_tokens, "answer": parse_tokens, "turns": parse_whole, "users": parse_whole}
_LEAST = {"prompt": 1, "answer": 1, "turns": 1, "users": 1}
_SECONDS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)s?", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", re.ASCII)


@functools.cache
def named() -> Mapping[str, Session]:
    """Return the named kinds of work, by name."""
    keys = {each.name for each in fields(Session)}
    data: dict[str, dict[str, Any]] = read_data(__file__)
    return {name: Session(**{key: value for key, value in each.items() if key in keys}) for name, each in data.items()}


def session_of(text: str | None, users: int | None) -> Session | None:
    """Parse ``--workload`` and ``--users``; ``None`` without both.

    Args:
        text: A name, a name or nothing with ``KEY=VALUE`` after commas, or the path of a llama-server's log.
        users: The number of users; the text may name it, too.

    Raises:
        UsageError: It is none of these, or a value is not possible.
    """
    if text is None:
        return None if users is None else Session(users=users)
    session = _parsed(text) if is_written(text) else _from_log(text)
    return session if users is None else replace(session, users=users)


def is_preset(text: str) -> bool:
    """Whether all tokens and turns of ``text`` are those of a named kind of work: users and gap may be the user's."""
    name, *words = [part.strip() for part in text.split(",")]
    return name in named() and all(word.partition("=")[0] in ("users", "gap") for word in words)


def is_written(text: str) -> bool:
    """Whether ``text`` is a name or numbers, not a file."""
    return "=" in text or text.partition(",")[0] in named()


def _parsed(text: str) -> Session:
    first, *rest = [part.strip() for part in text.split(",")]
    words = [first, *rest] if "=" in first else rest
    if "=" not in first and first not in named():
        raise _unknown(first)
    values: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in values:
            raise UsageError(f"--workload has {key} twice: leave one out")
        values[key] = _value(key, value)
    return replace(Session() if "=" in first else named()[first], **values)


def _value(key: str, text: str) -> float:
    if key in _KEYS:
        number = _KEYS[key](text)
        most = MAX_USERS if key == "users" else None
        if number < _LEAST[key] or (most is not None and number > most):
            limit = f"{_LEAST[key]} or more" if most is None else f"{_LEAST[key]} to {most}"
            raise UsageError(f"{key} of --workload is {shown(number)}: give {limit}")
        return number
    if key == "reused":
        match = _PERCENT.fullmatch(text)
        share = float(match[1]) / 100 if match else _number(text)
        if not 0 <= share < 1:
            raise UsageError(f"reused of --workload is {shown(text)}: give a share below 1, such as 0.9 or 90%")
        return share
    if key == "gap":
        if not (match := _SECONDS.fullmatch(text)):
            raise UsageError(f"gap of --workload is {shown(text)}: give seconds, such as 10 or 2.5s")
        return float(match[1])
    raise UsageError(f"--workload has no '{key}': choose from {', '.join(each.name for each in fields(Session))}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _from_log(text: str) -> Session:
    try:
        stamp = os.stat(text)
    except (OSError, ValueError):
        raise _unknown(text) from None
    return _of_requests(text, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=4)
def _of_requests(path: str, _changed: int, _size: int) -> Session:
    """Read a log once, however often it is asked for, until it changes."""
    requests = requests_of(path)
    prompt = round(sum(each.prompt for each in requests) / len(requests))
    answer = round(sum(each.answer for each in requests) / len(requests))
    later = [each for each in requests if each.cached]
    reused = sum(each.cached for each in later) / max(1, sum(each.prompt for each in later))
    return Session(prompt, answer, reused, round(len(requests) / max(1, len(requests) - len(later))) if later else 1)


def _unknown(text: str) -> UsageError:
    return UsageError(
        f"--workload is {shown(text)}, which is neither a log of llama-server nor one of {', '.join(named())}: write "
        "one of them, or numbers such as prompt=12000,reused=90%,answer=300,turns=20,users=4,gap=10s"
    )


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
