"""Who answers the questions of pages: a few planners, each for one question at a time, and none for a page alone.

Everything here runs in the event loop of the server, but for the questions themselves, which run in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fitter.api.planner import Planner
from fitter.errors import CancelledError, TimeLimitError

_T = TypeVar("_T")

WORKERS = 4
"""Planners that there are at most, each with two processes of llama.cpp at most."""
WAITING = 64
"""Questions that may wait for one."""
PATIENCE = 60.0
"""Seconds for which a question waits for one."""
ANSWERED = 40.0
"""Seconds in which a planner has answered, or its processes of llama.cpp are killed: more than a search may take."""
GENTLY = 2.0
"""Seconds in which a question that is over may end by itself, so that the model stays loaded for the next one."""
IDLE = 300.0
"""Seconds after which a planner that nobody asks ends."""
_PASSED = 8
"""How often others may go before one that waits."""
_ENDS = "the server ends: start it again"
_AGAIN = 0.05
"""Seconds after which a planner is told again that its question is over: it may not have begun with it."""


class Unanswered(Exception):
    """A question that has no answer, for a reason that is not the question's."""


class Busy(Unanswered):
    """More questions wait than the server takes."""


class Overtaken(Unanswered):
    """A newer question of the same session was asked, whoever asked has gone, or the server ends."""


@dataclass(eq=False)
class _Held:
    """A planner, what it was asked about last, and when."""

    planner: Planner
    about: object = None
    used: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Turn:
    """A place in the line: what it is about, and how often others went first."""

    about: tuple[str, object]
    come: asyncio.Event = field(default_factory=asyncio.Event)
    passed: int = 0


@dataclass(eq=False)
class Question:
    """A question of a session, which ends where a newer one is asked, or where nobody waits for the answer."""

    session: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def end(self, why: str = "a newer question was asked: this one was not answered") -> None:
        """Nobody wants its answer any more."""
        self.why = self.why or why
        self.over.set()

    async def wait_for(self, *running: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Until one of ``running`` is done, nobody wants the answer any more, or so many ``seconds`` are over."""
        over = asyncio.ensure_future(self.over.wait())
        waited: list[asyncio.Future[Any]] = [*running, over]
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()

    def check(self) -> None:
        """Raise ``Overtaken`` where it is over."""
        if self.over.is_set():
            raise Overtaken(self.why)


def heard(done: asyncio.Future[Any]) -> None:
    """Hear what a question ended with, so that nothing is said of one that nobody waits for any more."""
    if not done.cancelled():
        done.exception()


class Pool:
    """``workers`` planners at most, for the models that were asked about last, and a line of ``waiting`` questions.

    ``patience``: seconds that each of those waits; ``answered``: seconds in which a planner has answered.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        waiting: int = WAITING,
        make: Callable[[str], Planner] = Planner,
        *,
        patience: float = PATIENCE,
        answered: float = ANSWERED,
    ) -> None:
        self._most, self._most_waiting, self._make = workers, waiting, make
        self._patience, self._answered = patience, answered
        self._idle: list[_Held] = []
        self._busy: set[_Held] = set()
        self._line: list[_Turn] = []
        self._latest: dict[str, Question] = {}
        self._asked: set[Question] = set()
        self._threads = ThreadPoolExecutor(workers, "planning")
        self._is_closed = False

    @property
    def planners(self) -> int:
        """How many planners there are."""
        return len(self._idle) + len(self._busy)

    @property
    def waiting(self) -> int:
        """How many questions wait for a planner."""
        return len(self._line)

    @asynccontextmanager
    async def asked(self, session: str = "") -> AsyncIterator[Question]:
        """A question of ``session`` for as long as this lasts; the one before it is over. One without a session is
        nobody's newer one.
        """
        question = Question(session)
        self._asked.add(question)
        if session:
            if (older := self._latest.get(session)) is not None:
                older.end()
            self._latest[session] = question
        try:
            yield question
        finally:
            question.end()
            self._asked.discard(question)
            if self._latest.get(session) is question:
                del self._latest[session]

    async def answer(self, question: Question, model: str, about: object, ask: Callable[[Planner], _T]) -> _T:
        """What ``ask`` returns of a planner for ``model``, best of one that was asked ``about`` the same before.

        Raises what that raises, ``Overtaken``, ``Busy`` where too many wait or none was free, and ``TimeLimitError``.
        """
        held = await self._take(question, model, about)
        try:
            return await self._run(question, held, ask)
        finally:
            held.about, held.used = about, time.monotonic()
            self._busy.discard(held)
            self._idle.append(held)
            self._next((model, about))

    async def close_idle(self, seconds: float = IDLE) -> None:
        """End the planners that nobody has asked for so long."""
        now = time.monotonic()
        old = [held for held in self._idle if now - held.used >= seconds]
        for held in old:
            self._idle.remove(held)
        await self._end(old)

    def stop(self) -> None:
        """End every question; no other is answered."""
        self._is_closed = True
        for question in self._asked:
            # also one that has no planner yet, since its model is still fetched
            question.end(_ENDS)
        for held in (*self._busy, *self._idle):
            held.planner.cancel(at_once=True)
        for turn in self._line:
            turn.come.set()

    async def close(self) -> None:
        """End every question, and every process of llama.cpp."""
        self.stop()
        await self._end([*self._busy, *self._idle])
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take(self, question: Question, model: str, about: object) -> _Held:
        end = time.monotonic() + self._patience
        while True:
            if self._is_closed:
                raise Overtaken(_ENDS)
            question.check()
            found = [held for held in self._idle if held.planner.model == model]
            if found:
                held = max(found, key=lambda each: (each.about == about, each.used))
                self._idle.remove(held)
            elif self.planners < self._most:
                held = _Held(self._make(model))
            elif self._idle:
                oldest = min(self._idle, key=lambda each: each.used)
                self._idle.remove(oldest)
                held = _Held(self._make(model))
                self._busy.add(held)
                try:
                    await self._end([oldest])
                except BaseException:
                    self._busy.discard(held)
                    raise
            else:
                await self._wait(question, (model, about), end)
                continue
            self._busy.add(held)
            return held

    async def _wait(self, question: Question, about: tuple[str, object], end: float) -> None:
        """Until a planner is free, or nobody wants the answer any more; no longer than to the ``end``."""
        if len(self._line) >= self._most_waiting:
            raise Busy(f"{self._most_waiting} questions are waiting: ask again later")
        turn = _Turn(about)
        self._line.append(turn)
        begun = asyncio.ensure_future(turn.come.wait())
        try:
            await question.wait_for(begun, seconds=max(0.0, end - time.monotonic()))
        finally:
            begun.cancel()
            is_late = turn in self._line
            if is_late:
                self._line.remove(turn)
            elif question.over.is_set():
                # it was another one's turn
                self._next()
        question.check()
        if is_late:
            raise Busy(f"no planner was free within {self._patience:g} seconds: ask again later")

    def _next(self, about: tuple[str, object] | None = None) -> None:
        """Let one go on that waits: the first, or one about the same as before, which is answered sooner."""
        if not self._line:
            return
        same = next((turn for turn in self._line if turn.about == about), None)
        turn = same if same is not None and self._line[0].passed < _PASSED else self._line[0]
        for other in self._line[: self._line.index(turn)]:
            other.passed += 1
        self._line.remove(turn)
        turn.come.set()

    async def _run(self, question: Question, held: _Held, ask: Callable[[Planner], _T]) -> _T:
        question.check()
        running: asyncio.Future[_T] = asyncio.get_running_loop().run_in_executor(self._threads, ask, held.planner)
        running.add_done_callback(heard)
        is_killed = False
        try:
            await question.wait_for(running, seconds=self._answered)
        finally:
            began = time.monotonic()
            while not running.done():
                is_killed = not question.over.is_set() or time.monotonic() - began >= GENTLY
                held.planner.cancel(at_once=is_killed)
                await asyncio.wait({running}, timeout=_AGAIN)
        question.check()
        if is_killed:
            raise TimeLimitError(f"llama.cpp did not answer within {self._answered:g} seconds: ask again")
        try:
            return running.result()
        except CancelledError as error:
            raise Overtaken(str(error)) from None

    async def _end(self, helds: list[_Held]) -> None:
        for held in helds:
            closing = asyncio.get_running_loop().run_in_executor(None, held.planner.close)
            closing.add_done_callback(heard)
            while not closing.done():
                # a process that was stopped does not end by itself
                held.planner.cancel(at_once=True)
                await asyncio.wait({closing}, timeout=_AGAIN)


__all__ = ["IDLE", "WAITING", "WORKERS", "Busy", "Overtaken", "Pool", "Question", "Unanswered", "heard"]
