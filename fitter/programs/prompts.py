"""Prompts that fill a llama-server's slots, prompt cache and checkpoints, limited in number, tokens and time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fitter.programs.running_server import Gone, Running, ended
from fitter.text import printable

PROMPTS = 40
"""Default number of prompts."""

_TOKENS = 4096
"""Most tokens of a prompt."""
SECONDS = 7.5
"""Seconds for each prompt, on average."""
_GENERATED = 4
_FIRST = 64
"""Tokens of the first prompts, which show the server's speed."""
_SHARE = 0.8
"""Share of the remaining time that a new prompt may plan with."""
_SPARE = 8
"""Tokens of a slot that stay free."""
_BIAS = 1000.0
"""A bias that beats any token's own logit."""


@dataclass(frozen=True)
class Fed:
    """The prompts that were sent, and the answers."""

    prompts: int
    """Prompts to send."""
    answered: int
    """Prompts with an answer."""
    tokens: int
    """Tokens of the answered prompts."""
    slots: int
    """Prompts at a time."""
    refused: str = ""
    """The first error."""


class Feeder:
    """The prompts for one server, sent by as many threads as it has slots."""

    def __init__(self, server: Running, slots: int, room: int, n_vocab: int, number: int, *, is_read: bool) -> None:
        self._server, self._slots, self._number, self._is_read = server, slots, number, is_read
        self._bias = [] if is_read else [[token, _BIAS] for token in _a_letter(server)]
        self._most = max(1, min(_TOKENS, room - _GENERATED - _SPARE))
        self._n_vocab = n_vocab
        # equal prompts for an equal server, so that figures repeat
        self._random = random.Random(number)
        self._firsts = self._random.sample(range(n_vocab), min(number, n_vocab))
        self._lock = threading.Lock()
        self._sent = self._answered = self._tokens = 0
        self._refused = ""
        self._started = time.monotonic()
        self.deadline = self._started + SECONDS * number

    @property
    def fed(self) -> Fed:
        """The result until now."""
        with self._lock:
            return Fed(self._number, self._answered, self._tokens, self._slots, self._refused)

    def send(self) -> None:
        """Send prompts until none are left or the time is over."""
        for prompt in self._prompts():
            try:
                status, answer = self._server.ask("POST", *self._request(prompt), self.deadline - time.monotonic())
            except Gone:
                return
            with self._lock:
                if status == 200:
                    self._answered += 1
                    self._tokens += len(prompt)
                elif not self._refused:
                    self._refused = printable(_message(status, answer), 200)

    def _request(self, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        if self._is_read:
            return "/v1/embeddings", {"input": prompt}
        body = {"prompt": prompt, "n_predict": _GENERATED, "ignore_eos": True, "cache_prompt": True}
        return "/completion", {**body, "logit_bias": self._bias}

    def _prompts(self) -> Iterator[list[int]]:
        """Yield prompts of random tokens, with different first tokens while there are any."""
        while time.monotonic() < self.deadline:
            with self._lock:
                if self._sent == self._number:
                    return
                first = self._firsts[self._sent % len(self._firsts)]
                self._sent += 1
                more = self._length() - 1
                prompt = [first, *(self._random.randrange(self._n_vocab) for _ in range(more))]
            yield prompt

    def _length(self) -> int:
        """Return the tokens of the next prompt: what the time allows, or down to half of it."""
        now = time.monotonic()
        if not self._tokens:
            return min(self._most, _FIRST)
        left = self._number - self._sent + self._slots
        speed = self._tokens / (now - self._started)
        most = min(self._most, max(_FIRST, int(speed * (self.deadline - now) * _SHARE / left)))
        return self._random.randint((most + 1) // 2, most)


def feed(
    server: Running,
    *,
    slots: int,
    room: int,
    n_vocab: int,
    number: int = PROMPTS,
    is_read: bool = False,
    on_answered: Callable[[int], object] = lambda _: None,
) -> Fed:
    """Send prompts to ``server``, as many at once as it has slots.

    Args:
        server: The running server.
        slots: Its slots.
        room: Most tokens of a prompt.
        n_vocab: Tokens of the vocabulary.
        number: Number of prompts.
        is_read: Whether the server computes embeddings instead of an answer.
        on_answered: Called with the number of answers, now and then as it grows, and at the end.

    Raises:
        LlamaCppCrashError: The server ended.
    """
    feeder = Feeder(server, slots, room, n_vocab, number, is_read=is_read)
    threads = [threading.Thread(target=feeder.send, daemon=True) for _ in range(min(slots, number))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < feeder.deadline:
        if (status := server.tick()) is not None:
            raise ended(server, status, f"while it answered prompts, {feeder.fed.answered} of {number}")
        on_answered(feeder.fed.answered)
    server.tick(0.2)
    on_answered(feeder.fed.answered)
    if (status := server.status) is not None:
        raise ended(server, status, f"while it answered prompts, {feeder.fed.answered} of {number}")
    return feeder.fed


def _a_letter(server: Running) -> list[int]:
    """Return the token of a letter as the only answer: some servers refuse to send random tokens, which are no text."""
    try:
        status, answer = server.ask("POST", "/tokenize", {"content": "a"}, 10.0)
        return [int(token) for token in answer["tokens"][-1:]] if status == 200 else []
    except (Gone, LookupError, TypeError, ValueError):
        return []


def _message(status: int, answer: Any) -> str:
    try:
        return str(answer["error"]["message"])
    except (LookupError, TypeError):
        return f"HTTP status {status}"
