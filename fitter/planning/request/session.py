"""The work of users: turns of conversations, and how many at once. Tokens, and seconds for times.

A turn is a request: a prompt, of which a share is the beginning of the turn before and need not be computed again, and
an answer. ``session.toml`` has named kinds of work, with sources.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fitter.errors import UsageError
from fitter.parameters.table import MAX_USERS
from fitter.parameters.values import parse_tokens, parse_whole, shown
from fitter.planning.speed.cost import Workload
from fitter.programs.request_log import requests_of
from fitter.storage import read_data


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
