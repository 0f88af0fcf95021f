"""Who answers whose question: what was asked last, by few planners, each for one question at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fitter.errors import CancelledError, TimeLimitError, UsageError
from fitter.web import pool
from fitter.web.pool import Busy, Overtaken, Pool
from tests.support.acting import SECONDS, acting, until
from tests.support.cases import cases


@dataclass(eq=False)
class Acting:
    """What a pool needs of a planner: a question of it lasts until it is let go, or cancelled; of one that
    ``is_stopped``, until it is killed."""

    model: str
    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: int = 0
    killed: int = 0
    is_stopped: bool = False
    is_closed: bool = False
    ends: bool = False

    def turn_to(self, model: str) -> None:
        self.model = model

    def ask(self) -> str:
        self.ends = False
        self.begun.set()
        assert self.go.wait(SECONDS)
        if self.ends:
            raise CancelledError("the question was cancelled: ask it again")
        return self.model

    def cancel(self, *, at_once: bool = False) -> None:
        self.cancelled += 1
        self.killed += at_once
        self.ends = True
        if self.begun.is_set() and (at_once or not self.is_stopped):
            self.go.set()

    def close(self) -> None:
        self.cancel()
        self.is_closed = True


class Acted:
    """A pool of acting planners."""

    def __init__(self, workers: int = 2, waiting: int = 8, *, is_free: bool = True, **limits: Any) -> None:
        self.made: list[Acting] = []
        self.is_free = is_free
        self.workers = workers

        def make(model: str) -> Any:
            self.made.append(Acting(model))
            if self.is_free:
                self.made[-1].go.set()
            return self.made[-1]

        self.make = make
        self.pool = Pool(workers, waiting, make, **limits)

    def with_first(self, ask: Callable[[Any], object] = lambda planner: planner.ask()) -> Pool:
        """Let every planner answer a first question about the model "small"."""
        self.pool = Pool(self.workers, 8, self.make, first=("small", ask))
        return self.pool

    async def close(self) -> None:
        await self.pool.close()

    async def starting(self, ask: Callable[[Any], object] = lambda planner: planner.ask()) -> Pool:
        """A pool whose first planner has begun, or ended, to answer its first question."""
        started = self.with_first(ask)
        started.prepare(0)
        await until(lambda: bool(self.made) and (self.made[0].begun.is_set() or started.is_ready))
        return started

    async def busy(self, **words: Any) -> asyncio.Future[Any]:
        """A question that the first planner has begun to answer."""
        asked = asyncio.ensure_future(self.ask(**words))
        await until(lambda: bool(self.made) and self.made[0].begun.is_set())
        return asked

    async def ask(self, model: str = "a", session: str = "", about: object = None) -> Any:
        async with self.pool.asked(session) as question:
            return await self.pool.answer(question, model, about, lambda planner: (planner, planner.ask())[0])  # type: ignore[attr-defined]


def pooled(*words: int, **more: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test with a pool of acting planners, and close the pool."""
    return acting(lambda: Acted(*words, **more))


@pooled()
async def test_what_is_said_of_a_question_is_its_sessions(acted: Acted) -> None:
    async with acted.pool.asked("one") as question:
        question.said = "planned 1 of 2"
        assert [acted.pool.said(session) for session in ("one", "two", "")] == ["planned 1 of 2", "", ""]
    assert acted.pool.said("one") == ""


@pooled()
async def test_an_answer_may_have_a_limit_of_its_own(acted: Acted) -> None:
    acted.is_free = False
    async with acted.pool.asked() as question:
        with pytest.raises(TimeLimitError, match=r"llama\.cpp did not answer within 0\.01 seconds"):
            await acted.pool.answer(question, "a", None, lambda planner: planner.ask(), seconds=0.01)  # type: ignore[attr-defined]


@pooled(4)
async def test_planners_start_before_the_first_question(acted: Acted) -> None:
    acted.is_free = False
    started = acted.with_first()
    assert not started.is_ready
    started.prepare(0)
    await until(lambda: len(acted.made) == 1 and acted.made[0].begun.is_set())
    # one after the other, and ready once all of them are
    assert (started.planners, started.is_ready) == (1, False)
    acted.is_free = True
    acted.made[0].go.set()
    await until(lambda: started.is_ready)
    assert [each.model for each in acted.made] == ["small"] * 2 and started.planners == 2
    assert (await acted.ask("a")) in acted.made[:2] and (await acted.ask("b")) in acted.made[:2]
    assert sorted(each.model for each in acted.made) == ["a", "b"]


@pooled(3)
async def test_others_start_in_their_place(acted: Acted) -> None:
    started = await acted.starting()
    await until(lambda: started.is_ready)
    asked = [await acted.ask("a")]
    # not beside a question that follows at once
    assert len(acted.made) == 2
    await until(lambda: len(acted.made) == 3)
    asked += [await acted.ask("b"), await acted.ask("c")]
    assert {id(each) for each in asked} == {id(each) for each in acted.made}
    await started.close_idle(0)
    assert all(each.is_closed for each in asked)
    await until(lambda: len(acted.made) == 5 and started.planners == 2)


@pooled(1)
async def test_a_question_gets_the_planner_that_still_starts(acted: Acted) -> None:
    acted.is_free = False
    started = await acted.starting()
    asked = asyncio.ensure_future(acted.ask("a"))
    await until(lambda: started.waiting == 1)
    acted.made[0].go.set()
    assert await asked is acted.made[0] and len(acted.made) == 1


@pooled()
async def test_no_other_starts_after_one_that_could_not(acted: Acted) -> None:
    def ask(planner: Acting) -> None:
        raise UsageError("no such card")

    started = await acted.starting(ask)
    await until(lambda: started.is_ready)
    assert [each.is_closed for each in acted.made] == [True] and started.planners == 0
    await acted.ask("a")
    started.prepare(0)
    await asyncio.sleep(0.01)
    assert len(acted.made) == 2


@pooled()
async def test_the_end_kills_one_that_starts(acted: Acted) -> None:
    acted.is_free = False
    started = await acted.starting()
    acted.made[0].is_stopped = True
    await started.close()
    assert acted.made[0].is_closed and acted.made[0].killed
    started.prepare(0)
    await asyncio.sleep(0.01)
    assert len(acted.made) == 1


@pooled()
async def test_the_same_model_has_the_same_planner(acted: Acted) -> None:
    assert [await acted.ask("a"), await acted.ask("a")] == [acted.made[0]] * 2
    assert (len(acted.made), acted.pool.planners) == (1, 1)


@pooled(is_free=False)
async def test_the_one_that_was_asked_about_the_same_is_preferred(acted: Acted) -> None:
    first = asyncio.ensure_future(acted.ask("a", about="one card"))
    second = asyncio.ensure_future(acted.ask("a", about="two cards"))
    await until(lambda: len(acted.made) == 2 and all(each.begun.is_set() for each in acted.made))
    for each in acted.made:
        each.go.set()
    one, two = await first, await second
    assert one is not two
    # the latest one would be the second
    assert await acted.ask("a", about="one card") is one
    assert await acted.ask("a", about="two cards") is two


@pooled(workers=2)
async def test_the_one_that_was_not_asked_for_longest_turns_to_another_model(acted: Acted) -> None:
    for model in ("a", "b", "a", "c"):
        await acted.ask(model)
    assert [(each.model, each.is_closed) for each in acted.made] == [("a", False), ("c", False)]
    assert acted.pool.planners == 2
    await acted.pool.close()
    assert all(each.is_closed for each in acted.made)


@pooled(workers=1, is_free=False)
async def test_a_newer_question_ends_the_older(acted: Acted) -> None:
    older = await acted.busy(session="s")
    acted.is_free = True
    newer = asyncio.ensure_future(acted.ask(session="s"))
    with pytest.raises(Overtaken, match="a newer question was asked: this one was not answered"):
        await older
    assert (await newer).model == "a"
    assert (len(acted.made), acted.pool.waiting, acted.made[0].killed) == (1, 0, 0)


@pooled(workers=1, is_free=False)
async def test_a_newer_question_ends_one_that_waits(acted: Acted) -> None:
    busy = await acted.busy(session="other")
    older = asyncio.ensure_future(acted.ask(session="s"))
    await until(lambda: acted.pool.waiting == 1)
    newer = asyncio.ensure_future(acted.ask(session="s"))
    with pytest.raises(Overtaken, match="a newer question was asked: this one was not answered"):
        await older
    assert not busy.done(), "who is another session's is not ended"
    acted.made[0].go.set()
    assert [(await each).model for each in (busy, newer)] == ["a", "a"]


@pooled(workers=2, is_free=False)
async def test_questions_without_a_session_end_no_other(acted: Acted) -> None:
    both = [asyncio.ensure_future(acted.ask()) for _ in range(2)]
    await until(lambda: len(acted.made) == 2)
    for each in acted.made:
        each.go.set()
    assert [(await each).cancelled for each in both] == [0, 0]


@cases(0, 2)
@pooled(workers=1, is_free=False)
async def test_the_line_has_a_limit(acted: Acted, waiting: int) -> None:
    acted.pool = Pool(1, waiting, acted.make)
    taken = [await acted.busy()]
    taken += [asyncio.ensure_future(acted.ask()) for _ in range(waiting)]
    await until(lambda: acted.pool.waiting == waiting)
    with pytest.raises(Busy, match=f"{waiting} questions are waiting: ask again later"):
        await acted.ask()
    acted.made[0].go.set()
    assert len([await each for each in taken]) == waiting + 1


@pooled(workers=1)
async def test_a_question_that_fails_gives_its_planner_back(acted: Acted) -> None:

    def fail(_: object) -> None:
        raise UsageError("no such card: name another")

    for _ in range(3):
        async with acted.pool.asked("s") as question:
            with pytest.raises(UsageError, match="no such card: name another"):
                await acted.pool.answer(question, "a", None, fail)
    assert (await acted.ask()).model == "a"
    assert len(acted.made) == 1


@pooled(workers=1, is_free=False)
async def test_an_asker_who_goes_gives_the_planner_back(acted: Acted) -> None:
    gone = await acted.busy()
    gone.cancel()
    assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
    assert acted.made[0].cancelled > 0
    assert (await acted.ask()) is acted.made[0]


@pooled(workers=1, waiting=40, is_free=False)
async def test_who_is_about_the_same_goes_first_but_not_always(acted: Acted) -> None:
    order: list[str] = []

    async def ask(name: str, about: str) -> None:
        await acted.ask(about=about)
        order.append(name)

    tasks = [asyncio.ensure_future(ask("first", "one card"))]
    await until(lambda: bool(acted.made) and acted.made[0].begun.is_set())
    for number, (name, about) in enumerate([("other", "two cards"), *[("same", "one card")] * 12], 1):
        tasks.append(asyncio.ensure_future(ask(name, about)))
        await until(lambda n=number: acted.pool.waiting == n)  # type: ignore[misc]
    acted.made[0].go.set()
    await asyncio.gather(*tasks)
    assert order == ["first", *["same"] * 8, "other", *["same"] * 4]


@pooled()
async def test_planners_that_nobody_asks_end(acted: Acted) -> None:
    await acted.ask("a")
    await acted.pool.close_idle(1000)
    assert acted.pool.planners == 1
    await acted.pool.close_idle(0)
    assert (acted.pool.planners, acted.made[0].is_closed) == (0, True)
    assert (await acted.ask("a")) is acted.made[1]


@pooled(workers=1, is_free=False)
async def test_the_end_of_the_pool_ends_every_question(acted: Acted) -> None:
    asked = [asyncio.ensure_future(acted.ask()) for _ in range(3)]
    await until(lambda: acted.pool.waiting == 2 and acted.made[0].begun.is_set())
    await acted.pool.close()
    for each in asked:
        with pytest.raises(Overtaken, match="the server ends: start it again"):
            await each
    assert [each.is_closed for each in acted.made] == [True]
    with pytest.raises(Overtaken, match="the server ends: start it again"):
        await acted.ask()


@pooled()
async def test_the_end_of_the_pool_ends_a_question_that_has_no_planner_yet(acted: Acted) -> None:
    async with acted.pool.asked() as question:
        fetching = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(acted.pool.stop)
        await question.wait_for(fetching)
        with pytest.raises(Overtaken, match="the server ends: start it again"):
            question.check()
    assert acted.made == []


@pooled(workers=1, is_free=False)
async def test_who_goes_away_when_it_is_their_turn_lets_the_next_one_go_on(acted: Acted) -> None:
    busy = await acted.busy()

    async def leave() -> None:
        async with acted.pool.asked("s") as question:
            busy.add_done_callback(lambda _: question.end())
            await acted.pool.answer(question, "a", None, lambda planner: planner)

    leaving = asyncio.ensure_future(leave())
    await until(lambda: acted.pool.waiting == 1)
    last = asyncio.ensure_future(acted.ask())
    await until(lambda: acted.pool.waiting == 2)
    acted.made[0].go.set()
    with pytest.raises(Overtaken, match="a newer question was asked"):
        await leaving
    assert (await last) is acted.made[0]


@pooled(workers=1, is_free=False, answered=0.1)
async def test_one_that_does_not_answer_is_killed(acted: Acted) -> None:
    with pytest.raises(TimeLimitError, match=r"llama.cpp did not answer within 0.1 seconds: ask again"):
        await acted.ask()
    assert acted.made[0].killed > 0
    acted.made[0].go.set()
    assert (await acted.ask()) is acted.made[0], "it is asked again"


@pooled(workers=1, is_free=False)
async def test_one_that_is_over_and_does_not_end_is_killed_later(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    older = await acted.busy(session="s")
    acted.made[0].is_stopped = True
    newer = asyncio.ensure_future(acted.ask(session="s"))
    await until(lambda: acted.made[0].cancelled > 2)
    assert (acted.made[0].killed, older.done()) == (0, False)
    monkeypatch.setattr(pool, "GENTLY", 0.0)
    with pytest.raises(Overtaken, match="a newer question was asked: this one was not answered"):
        await older
    assert acted.made[0].killed > 0 and (await newer) is acted.made[0]


@pooled(workers=1, is_free=False, patience=0.1)
async def test_nobody_waits_for_ever(acted: Acted) -> None:
    busy = await acted.busy()
    with pytest.raises(Busy, match=r"no planner was free within 0.1 seconds: ask again later"):
        await acted.ask()
    assert acted.pool.waiting == 0
    acted.made[0].go.set()
    assert (await busy) is (await acted.ask()) is acted.made[0]


@cases(True, False)
@pooled(workers=1)
async def test_the_end_of_the_pool_kills_what_does_not_end(acted: Acted, is_asked: bool) -> None:
    acted.is_free = not is_asked
    asked = await acted.busy()
    acted.made[0].is_stopped = True
    await acted.pool.close()
    assert acted.made[0].is_closed and acted.made[0].killed > 0
    if is_asked:
        with pytest.raises(Overtaken, match="the server ends: start it again"):
            await asked
