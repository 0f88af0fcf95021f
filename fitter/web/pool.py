"""Planners and fetchers of headers that answer the pages' questions, a few of each, shared by all pages.

Everything runs in the server's event loop, but for planning and fetching, which run in threads. Hosts may be silent:
each has a limit of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fitter.api import call_worker
from fitter.api.planner import Planner
from fitter.errors import CancelledError, TimeLimitError
from fitter.model.files import header_cache
from fitter.model.files.addresses import host_of
from fitter.planning.request.request import Progress
from fitter.web.questions import SECONDS

_T = TypeVar("_T")

WORKERS = 4
"""Most planners, each with a process of llama.cpp, and another one while it reads a tokenizer."""
FRESH = 2
"""Most planners whose process has started before their first question. One starts in 0.3 seconds."""
WAITING = 64
"""Most questions that wait for a planner."""
PATIENCE = 60.0
"""Seconds for which a question waits for a planner."""
ANSWERED = 40.0
"""Seconds for an answer, before the processes of llama.cpp are killed: more than a search may take."""
GENTLY = 2.0
"""Seconds for an ended question to stop by itself, so that its model stays loaded."""
IDLE = 300.0
"""Seconds after which an idle planner ends."""
_QUIET = 1.0
"""Seconds after the start, or an answer, until planners start: not beside the first page, or the next question."""
_PASSED = 8
"""How often later questions may overtake a waiting one."""
_ENDS = "the server ends: start it again"
_AGAIN = 0.05
"""Seconds until a planner hears again that its question has ended: it may not have started yet."""


class Unanswered(Exception):
    """A question without an answer, for a reason outside the question."""


class Busy(Unanswered):
    """Too many questions wait."""


class Overtaken(Unanswered):
    """The session asked a newer question, the asker has disconnected, or the server ends."""


@dataclass(eq=False)
class _Held:
    """A planner, with its last question and the time."""

    planner: Planner
    about: object = None
    used: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Question:
    """A question of a session; it ends when a newer one is asked, or when nobody waits for the answer."""

    session: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    said: str = ""
    """The last progress of its answer."""

    def end(self, why: str = "a newer question was asked: this one was not answered") -> None:
        """End the question: nobody wants its answer any more."""
        self.why = self.why or why
        self.over.set()

    async def wait_for(self, *running: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until one of ``running`` is done, the question ends, or ``seconds`` are over."""
        over = asyncio.ensure_future(self.over.wait())
        waited: list[asyncio.Future[Any]] = [*running, over]
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()

    def check(self) -> None:
        """Raise ``Overtaken`` after the question's end."""
        if self.over.is_set():
            raise Overtaken(self.why)


@dataclass(eq=False)
class Turn(Generic[_T]):
    """A place in a queue: what it is about, and how often others overtook it."""

    about: _T
    come: asyncio.Event = field(default_factory=asyncio.Event)
    passed: int = 0

    async def wait(self, line: list[Turn[_T]], question: Question, end: float, give_up: Callable[[], None]) -> bool:
        """Wait in ``line`` until someone takes the turn out of it, and return whether that was before the ``end``.

        Raises ``Overtaken`` after the question's end; ``give_up`` lets another one have the turn then.
        """
        line.append(self)
        come = asyncio.ensure_future(self.come.wait())
        try:
            await question.wait_for(come, seconds=max(0.0, end - time.monotonic()))
            question.check()
        except BaseException:
            if self not in line:
                give_up()
            raise
        finally:
            come.cancel()
            if is_late := self in line:
                line.remove(self)
        return not is_late


def heard(done: asyncio.Future[Any]) -> None:
    """Retrieve a question's result, so that asyncio does not report an error that nobody waits for."""
    if not done.cancelled():
        done.exception()


class Pool:
    """At most ``workers`` planners for the last models, and a queue of ``waiting`` questions.

    ``patience``: seconds in the queue; ``answered``: seconds for an answer; ``first``: a model, and the question about
    it that starts the processes of a planner before others are asked.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        waiting: int = WAITING,
        make: Callable[[str], Planner] = Planner,
        *,
        patience: float = PATIENCE,
        answered: float = ANSWERED,
        first: tuple[str, Callable[[Planner], object]] | None = None,
    ) -> None:
        self._most, self._most_waiting, self._make = workers, waiting, make
        self._patience, self._answered = patience, answered
        self._first = first
        self._fresh: list[_Held] = []
        self._starting: list[_Held] = []
        self._preparing: asyncio.Future[None] | None = None
        self.is_ready = first is None
        """Whether planners have started for first questions, as far as they can."""
        self._idle: list[_Held] = []
        self._busy: set[_Held] = set()
        self._line: list[Turn[tuple[str, object]]] = []
        self._latest: dict[str, Question] = {}
        self._asked: set[Question] = set()
        self._threads = ThreadPoolExecutor(workers, "planning")
        self._is_closed = False

    @property
    def planners(self) -> int:
        """Number of planners."""
        return len(self._all)

    @property
    def waiting(self) -> int:
        """Number of waiting questions."""
        return len(self._line)

    @property
    def _all(self) -> list[_Held]:
        return [*self._busy, *self._idle, *self._fresh, *self._starting]

    def said(self, session: str) -> str:
        """Return the last progress of a session's question; empty without one."""
        question = self._latest.get(session)
        return "" if question is None else question.said

    @asynccontextmanager
    async def asked(self, session: str = "") -> AsyncIterator[Question]:
        """Start a question of ``session`` for the block, and end the session's question before it.

        Questions without a session end none.
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

    async def answer(
        self,
        question: Question,
        model: str,
        about: object,
        ask: Callable[[Planner], _T],
        *,
        seconds: float | None = None,
    ) -> _T:
        """Call ``ask`` with a planner for ``model``, best one with the same question ``about`` before.

        ``seconds`` for the answer replace ``answered``. Raises its errors, ``Overtaken``, ``Busy`` if too many wait or
        none was free, and ``TimeLimitError``.
        """
        held = await self._take(question, model, about)
        try:
            return await self._run(question, held, ask, self._answered if seconds is None else seconds)
        finally:
            held.about, held.used = about, time.monotonic()
            self._busy.discard(held)
            self._idle.append(held)
            self._next((model, about))
            self.prepare()

    def prepare(self, seconds: float = _QUIET) -> None:
        """Start planners for first questions after ``seconds``, in the background, if no question is open then."""
        is_running = self._preparing is not None and not self._preparing.done()
        if self._first is not None and not is_running and not self._is_closed:
            self._preparing = asyncio.ensure_future(self._prepare(*self._first, seconds))
            self._preparing.add_done_callback(heard)

    async def _prepare(self, model: str, ask: Callable[[Planner], object], seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            while not (self._is_closed or self._busy or self._line) and self._lacks_fresh:
                held = _Held(self._make(model))
                self._starting.append(held)
                try:
                    await asyncio.get_running_loop().run_in_executor(self._threads, ask, held.planner)
                    self._fresh.append(held)
                except Exception:
                    # the next question is told why
                    self._first = None
                    await self._end([held])
                finally:
                    self._starting.remove(held)
                    self._next()
        finally:
            self.is_ready = True

    @property
    def _lacks_fresh(self) -> bool:
        return self._first is not None and len(self._fresh) < FRESH and self.planners < self._most

    async def close_idle(self, seconds: float = IDLE) -> None:
        """End planners without a question for ``seconds``."""
        now = time.monotonic()
        old = [held for held in self._idle if now - held.used >= seconds]
        for held in old:
            self._idle.remove(held)
        await self._end(old)
        if old:
            self.prepare()

    def stop(self) -> None:
        """End every question, and answer no other."""
        self._is_closed = True
        for question in self._asked:
            # also a question without a planner, whose model is still fetched
            question.end(_ENDS)
        for held in self._all:
            held.planner.cancel(at_once=True)
        for turn in self._line:
            turn.come.set()

    async def close(self) -> None:
        """End every question and every process of llama.cpp."""
        self.stop()
        await self._end(self._all)
        if self._preparing is not None:
            self._preparing.cancel()
        self._idle.clear()
        self._fresh.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take(self, question: Question, model: str, about: object) -> _Held:
        end = time.monotonic() + self._patience
        while True:
            if self._is_closed:
                raise Overtaken(_ENDS)
            question.check()
            idle = [held for held in self._idle if held.planner.model == model]
            if idle:
                held = max(idle, key=lambda each: (each.about == about, each.used))
                self._idle.remove(held)
            elif self._fresh:
                held = self._fresh.pop()
                held.planner.turn_to(model)
            elif self.planners < self._most:
                held = _Held(self._make(model))
            elif self._idle:
                # its processes go on with the other model
                held = min(self._idle, key=lambda each: each.used)
                self._idle.remove(held)
                held.planner.turn_to(model)
            else:
                if len(self._line) >= self._most_waiting:
                    raise Busy(f"{self._most_waiting} questions are waiting: ask again later")
                if not await Turn((model, about)).wait(self._line, question, end, self._next):
                    raise Busy(f"no planner was free within {self._patience:g} seconds: ask again later")
                continue
            self._busy.add(held)
            return held

    def _next(self, about: tuple[str, object] | None = None) -> None:
        """Let a waiting question continue: the first, or one about the same as before, which is answered sooner."""
        if not self._line:
            return
        same = next((turn for turn in self._line if turn.about == about), None)
        turn = same if same is not None and self._line[0].passed < _PASSED else self._line[0]
        for other in self._line[: self._line.index(turn)]:
            other.passed += 1
        self._line.remove(turn)
        turn.come.set()

    async def _run(self, question: Question, held: _Held, ask: Callable[[Planner], _T], seconds: float) -> _T:
        question.check()
        running: asyncio.Future[_T] = asyncio.get_running_loop().run_in_executor(self._threads, ask, held.planner)
        running.add_done_callback(heard)
        is_killed = False
        try:
            await question.wait_for(running, seconds=seconds)
        finally:
            began = time.monotonic()
            while not running.done():
                is_killed = not question.over.is_set() or time.monotonic() - began >= GENTLY
                held.planner.cancel(at_once=is_killed)
                await asyncio.wait({running}, timeout=_AGAIN)
        question.check()
        if is_killed:
            raise TimeLimitError(f"llama.cpp did not answer within {seconds:g} seconds: ask again")
        try:
            return running.result()
        except CancelledError as error:
            raise Overtaken(str(error)) from None

    async def _end(self, helds: list[_Held]) -> None:
        for held in helds:
            closing = asyncio.get_running_loop().run_in_executor(None, held.planner.close)
            closing.add_done_callback(heard)
            while not closing.done():
                # a stopped process does not end by itself
                held.planner.cancel(at_once=True)
                await asyncio.wait({closing}, timeout=_AGAIN)


FETCHES, FETCHES_OF_A_HOST = 8, 2
"""Headers that are fetched at the same time, each with up to 64 MiB in memory; and those of one host."""


class Fetching:
    """Fetches headers, ``at_once`` in all and ``of_a_host`` from each host.

    ``seconds``: time limit of a header, including its wait for others.
    """

    def __init__(
        self,
        at_once: int = FETCHES,
        of_a_host: int = FETCHES_OF_A_HOST,
        seconds: float = SECONDS,
        fetch: Callable[[str, float, Callable[[Progress], None]], None] = call_worker.fetch,
    ) -> None:
        self._most, self._most_of_host, self._seconds, self._fetch = at_once, of_a_host, seconds, fetch
        self._threads = ThreadPoolExecutor(at_once, "fetching")
        self._running: Counter[str] = Counter()
        self._line: list[Turn[str]] = []

    async def fetch(self, question: Question, url: str) -> None:
        """Fetch the header at ``url``; the end of the question ends it.

        Raises what ``call_worker.fetch`` raises, ``Overtaken``, and ``Busy`` if too many are fetched.
        """
        end, host = time.monotonic() + self._seconds, host_of(url)
        await self._turn(question, host, end)

        def fetch() -> None:
            with header_cache.reading():
                self._fetch(url, max(0.01, end - time.monotonic()), lambda _: question.check())

        reading = asyncio.get_running_loop().run_in_executor(self._threads, fetch)
        reading.add_done_callback(heard)
        reading.add_done_callback(lambda _: self._done(host))
        await question.wait_for(reading)
        question.check()
        reading.result()

    def close(self) -> None:
        """Fetch nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_free(self, host: str) -> bool:
        return self._running.total() < self._most and self._running[host] < self._most_of_host

    async def _turn(self, question: Question, host: str, end: float) -> None:
        """Wait until another header may be fetched from the ``host``, and count it."""
        if self._is_free(host):
            self._running[host] += 1
            return
        if len(self._line) >= WAITING:
            raise Busy(f"{WAITING} questions wait for headers: ask again later")
        if not await Turn(host).wait(self._line, question, end, lambda: self._done(host)):
            raise Busy(f"other headers were fetched for {self._seconds:g} seconds: ask again later")

    def _done(self, host: str) -> None:
        """Let the first waiting question continue that may."""
        self._running[host] -= 1
        self._running += Counter()
        for turn in self._line:
            if self._is_free(turn.about):
                self._line.remove(turn)
                self._running[turn.about] += 1
                turn.come.set()
                return
