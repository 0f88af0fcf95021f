"""Requests to a running llama-server: turns of users with its own times, and prompts that fill its slots and caches.

Prompts are limited in number, tokens and time. Tokens; seconds unless said.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fitter.errors import LlamaCppError
from fitter.machine.host import OtherPrograms
from fitter.programs.running_server import Gone, Running, ended
from fitter.text import printable

_PATIENCE = 600.0
"""Seconds to wait for one answer."""

_PROBE_SECONDS, _MOST_PROBED = 1.0, 128
"""Turns are cut by the time of so long an answer, or of so many tokens: on a busy machine a few say little."""

_LEAST_ROUNDS, _LEAST_ANSWER, _LEAST_PROMPT = 3, 16, 64
"""The least that turns are cut to: rounds with a median, and tokens whose time is more than that of a request."""


@dataclass(frozen=True)
class Load:
    """What users send: ``fitter.planning.request.session.Session`` in whole tokens.

    Attributes:
        prefix: Tokens of a conversation before the first turn that counts; 0 where no turn has anything of another.
        new: New tokens of each turn.
        answer: Tokens of an answer.
        users: Users at once.
        rounds: Turns of each user that count.
    """

    prefix: int
    new: int
    answer: int
    users: int
    rounds: int

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.prefix + self.rounds * (self.new + self.answer)

    def within(self, seconds: float, prompt: float, step: float) -> Load:
        """Cut rounds, then answers, then prompts, so that all is likely to be done in ``seconds``.

        Args:
            seconds: The time for all turns.
            prompt: Seconds of a prompt's token.
            step: Seconds of a token of an answer, for one user.
        """
        left = seconds / self.users - self.prefix * prompt
        each = self.new * prompt + self.answer * step
        # one turn more is measured in parts
        rounds = max(_LEAST_ROUNDS, min(self.rounds, int(left / each) - 1))
        of_turn = left / (1 + rounds)
        answer = max(_LEAST_ANSWER, int((of_turn - self.new * prompt) / step))
        new = max(_LEAST_PROMPT, int((of_turn - min(answer, self.answer) * step) / prompt))
        return replace(self, new=min(self.new, new), answer=min(self.answer, answer), rounds=rounds)


@dataclass(frozen=True)
class Turn:
    """A turn, by the clock and by the server.

    Attributes:
        seconds: From the request to the answer.
        computed: Tokens of the prompt that the server computed.
        prompt: Seconds for them.
        answered: Tokens of the answer.
        answer: Seconds for them.
        drafted: Tokens that were drafted.
        accepted: Those of them that the model accepted.
    """

    seconds: float
    computed: int
    prompt: float
    answered: int
    answer: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Taken:
    """The turns of a run.

    Attributes:
        alone: Prompts one after the other, then all answers together.
        turns: Turns as users take them.
        load: What was sent.
        others: Share of the machine's processors that other programs used meanwhile; ``None`` if unknown.
    """

    alone: tuple[Turn, ...]
    turns: tuple[Turn, ...]
    load: Load
    others: float | None = None

    @property
    def seconds(self) -> float:
        """The median turn."""
        return statistics.median(turn.seconds for turn in self.turns)

    @property
    def spread(self) -> float:
        """How far the median may be off: the standard error, from the median distance of turns to it."""
        if len(self.turns) < 2:
            return 0.0
        middle = self.seconds
        distance = statistics.median(abs(turn.seconds - middle) for turn in self.turns)
        # of normally distributed turns: their deviation, and the error of its median
        return 1.4826 * distance * 1.2533 / math.sqrt(len(self.turns))

    @property
    def prompt(self) -> float:
        """Seconds of a prompt's token, with nothing beside it."""
        return sum(turn.prompt for turn in self.alone) / max(1, sum(turn.computed for turn in self.alone))

    @property
    def step(self) -> float:
        """Seconds of a step of generation that makes a token for each user."""
        return statistics.median(turn.answer / max(1, turn.answered) for turn in self.alone)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that the model accepted; ``None`` without drafts."""
        drafted = sum(turn.drafted for turn in self.turns)
        return sum(turn.accepted for turn in self.turns) / drafted if drafted else None


def take_turns(
    server: Running, load: Load, text: str, deadline: float, seconds: float | None = None, *, is_limited: bool = False
) -> Taken:
    """Send the turns of ``load``.

    Args:
        server: The running server.
        load: What to send.
        text: A long text; each conversation begins at another place of it.
        deadline: Time of ``time.monotonic`` until which to begin another round.
        seconds: Time in which all turns should be done: ``load`` is cut for it; ``None`` to send it as it is.
        is_limited: Whether an answer is awaited until ``deadline`` at most.

    Raises:
        LlamaCppError: The server refused a request, or none could be taken in time.
        LlamaCppCrashError: The server ended.
    """
    tokens = _tokenized(server, text, 60.0)
    if not tokens:
        raise LlamaCppError(f"{server.path} makes no tokens of a text", server.log)
    until = deadline if is_limited else math.inf
    first, count = _User(server, tokens, 0, load, until), min(load.answer, _LEAST_ANSWER)
    # the first one reads the weights from the file
    warm = _together(server, [partial(first.warm_up, count)])[0]
    while count < min(load.answer, _MOST_PROBED) and warm.answer < _PROBE_SECONDS:
        count = min(load.answer, 2 * count)
        warm = _together(server, [partial(first.warm_up, count)])[0]
    if seconds is not None:
        per_token = (warm.prompt / max(1, warm.computed), warm.answer / max(1, warm.answered))
        load = load.within(seconds, *(max(1e-9, each) for each in per_token))
    users = [_User(server, tokens, number, load, until) for number in range(load.users)]
    others = OtherPrograms(server.pid)
    if load.prefix:
        _together(server, [user.begin for user in users])
    for user in users:
        # prompts one after the other, so that their times are their own
        user.read()
    taken = Taken(tuple(_together(server, [user.answer for user in users])), (), load)
    if seconds is not None:
        # on a busy machine the first tokens say little
        load = replace(load, prefix=0).within(seconds, max(1e-9, taken.prompt), max(1e-9, taken.step / load.users))
        load = replace(load, prefix=taken.load.prefix)
    turns: list[Turn] = []
    enough = math.inf if seconds is None else time.monotonic() + seconds
    for count in range(load.rounds):
        turns += _together(server, [partial(user.take, load) for user in users])
        now = time.monotonic()
        # two turns tell how far they differ
        if now > deadline or (count and now > enough):
            break
    return replace(taken, turns=tuple(turns), load=load, others=others.share())


class _User:
    """A user with one conversation."""

    def __init__(self, server: Running, tokens: Sequence[int], number: int, load: Load, until: float) -> None:
        self._server, self._load, self._until = server, load, until
        start = number * len(tokens) // max(1, load.users)
        self._text = [*tokens[start:], *tokens[:start]]
        self._at = 0
        self._said: list[int] = []
        self._prompt = (0, 0.0)

    def warm_up(self, count: int) -> Turn:
        """Have the server compute a few tokens and answer ``count``, and forget them."""
        self._said = []
        self._say(min(_LEAST_PROMPT, self._load.new))
        return self._ask(count)

    def begin(self) -> Turn:
        """Have the server compute what was said before."""
        self._say(self._load.prefix)
        return self._ask(1)

    def read(self) -> Turn:
        """Have the server compute the new tokens of a turn, and remember its time for them."""
        self._say_more()
        turn = self._ask(1)
        self._prompt = turn.computed, turn.prompt
        return turn

    def answer(self) -> Turn:
        """Have the server answer what it has read."""
        turn = self._ask(self._load.answer)
        computed, prompt = self._prompt
        return Turn(turn.seconds, computed, prompt, turn.answered, turn.answer, turn.drafted, turn.accepted)

    def take(self, load: Load) -> Turn:
        """Take a whole turn of ``load``."""
        self._load = load
        self._say_more()
        return self._ask(load.answer)

    def _say_more(self) -> None:
        if not self._load.prefix:
            self._said = []
        self._say(self._load.new)

    def _say(self, count: int) -> None:
        self._said += [self._text[(self._at + each) % len(self._text)] for each in range(count)]
        self._at += count

    def _ask(self, count: int) -> Turn:
        body: dict[str, Any] = {"prompt": self._said, "n_predict": count, "ignore_eos": True, "cache_prompt": True}
        body |= {"return_tokens": True, "seed": 1}
        began = time.monotonic()
        status, answer = self._server.ask("POST", "/completion", body, min(_PATIENCE, self._until - began))
        seconds = time.monotonic() - began
        try:
            times = answer["timings"]
            if count > 1:
                self._said += [int(token) for token in answer["tokens"]]
            return Turn(
                seconds,
                int(times["prompt_n"]),
                times["prompt_ms"] / 1000,
                int(times["predicted_n"]),
                times["predicted_ms"] / 1000,
                int(times.get("draft_n", 0)),
                int(times.get("draft_n_accepted", 0)),
            )
        except (LookupError, TypeError, ValueError):
            reason = _reason(answer, "it gave no reason")
            raise LlamaCppError(
                f"{self._server.path} answered a turn with status {status} and without times: {reason}",
                self._server.log,
            ) from None


def _reason(answer: Any, unsaid: str) -> str:
    """Return the error in an answer, or ``unsaid``."""
    try:
        return printable(str(answer["error"]["message"]), 200)
    except (LookupError, TypeError):
        return unsaid


def _tokenized(server: Running, text: str, seconds: float) -> list[int]:
    """Return the tokens of a text; none if the server makes none."""
    try:
        status, answer = server.ask("POST", "/tokenize", {"content": text}, seconds)
        return [int(token) for token in answer["tokens"]] if status == 200 else []
    except (Gone, LookupError, TypeError, ValueError):
        return []


def _together(server: Running, calls: Sequence[Callable[[], Turn]]) -> list[Turn]:
    """Call all at once, in a thread each, while the server's log is read; return the results in order."""
    results: list[Turn | Exception | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except (Gone, LlamaCppError) as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (status := server.tick(0.02)) is not None:
            raise ended(server, status, "while it answered turns")
    found: list[Turn] = []
    for result in results:
        if isinstance(result, Turn):
            found.append(result)
        elif isinstance(result, LlamaCppError):
            raise result
        elif (status := server.status) is not None:
            raise ended(server, status, "while it answered turns")
        else:
            raise LlamaCppError(f"{server.path} gave no answer to a turn: {result}", server.log)
    return found


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
        # a letter as the only answer: some servers refuse to send random tokens, which are no text
        letter = [] if is_read else _tokenized(server, "a", 10.0)[-1:]
        self._bias = [[token, _BIAS] for token in letter]
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
                    self._refused = _reason(answer, f"HTTP status {status}")

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
