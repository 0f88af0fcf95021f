"""Who fetches whose header: so many at once, fewer of one host, and nobody longer than whoever asked stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from fitter.errors import ModelError
from fitter.planning.request.request import Progress
from fitter.web import pool
from fitter.web.pool import Busy, Fetching, Overtaken, Question
from tests.support.acting import SECONDS, acting, until
from tests.support.cases import cases


class Acted:
    """Fetches that last until their header is here, or until what they say raises, as real ones do."""

    def __init__(self, at_once: int = 4, of_a_host: int = 2, seconds: float = SECONDS) -> None:
        self.begun: list[str] = []
        self.here: set[str] = set()
        self.is_over = False
        self.fetching = Fetching(at_once, of_a_host, seconds, self._fetch)

    def _fetch(self, url: str, seconds: float, say: Callable[[Progress], None]) -> None:
        self.begun.append(url)
        end = threading.Event()
        while url not in self.here and not self.is_over:
            say(Progress(0, "fetching"))
            end.wait(0.005)
        if "broken" in url:
            raise ModelError(f"{url}: the server has no such file (404): check the address")

    async def close(self) -> None:
        self.is_over = True
        self.fetching.close()

    def ask(self, url: str) -> tuple[Question, asyncio.Future[None]]:
        question = Question("")
        return question, asyncio.ensure_future(self.fetching.fetch(question, url))

    async def asked(self, *urls: str) -> list[tuple[Question, asyncio.Future[None]]]:
        """Questions that wait, each before the next one."""
        found = []
        for url in urls:
            found.append(self.ask(url))
            await asyncio.sleep(0.02)
        return found


@acting(Acted)
async def test_a_silent_host_holds_up_no_other(acted: Acted) -> None:
    urls = [f"http://silent:{port}/a" for port in range(80, 90)]
    silent = await acted.asked(*urls)
    await until(lambda: len(acted.begun) == 2)
    acted.here |= {"http://other/b", "hf://org/repo/c"}
    for url in ("http://other/b", "hf://org/repo/c"):
        await acted.ask(url)[1]
    assert acted.begun[2:] == ["http://other/b", "hf://org/repo/c"]
    acted.here |= {*urls}
    await asyncio.gather(*(asking for _, asking in silent))
    assert len(acted.begun) == 12


@acting(lambda: Acted(at_once=3))
async def test_so_many_are_fetched_at_once(acted: Acted) -> None:
    urls = [f"http://host{number}/a" for number in range(5)]
    asked = await acted.asked(*urls)
    await until(lambda: len(acted.begun) == 3)
    acted.here |= {urls[1]}
    await until(lambda: len(acted.begun) == 4)
    assert acted.begun[3] == urls[3], "the first one of those that wait"
    acted.here |= {*urls}
    await asyncio.gather(*(asking for _, asking in asked))


@cases("is fetched", "waits")
@acting(lambda: Acted(of_a_host=1))
async def test_an_asker_who_leaves_frees_the_fetch(acted: Acted, who: str) -> None:
    first, second, third = await acted.asked("http://silent/1", "http://silent/2", "http://silent/3")
    await until(lambda: acted.begun)
    gone = first if who == "is fetched" else second
    gone[0].end()
    with pytest.raises(Overtaken, match="a newer question was asked"):
        await gone[1]
    acted.here |= {"http://silent/1"} if who == "waits" else set()
    await until(lambda: len(acted.begun) == 2)
    assert acted.begun[1] == ("http://silent/2" if who == "is fetched" else "http://silent/3")
    for question, asking in (first, second, third):
        question.end()
        await asyncio.gather(asking, return_exceptions=True)
    acted.here |= {"http://silent/4"}
    await acted.ask("http://silent/4")[1]


@acting(lambda: Acted(of_a_host=1))
async def test_who_leaves_when_it_is_their_turn_lets_the_next_one_go_on(acted: Acted) -> None:
    first, second, third = await acted.asked("http://host/1", "http://host/2", "http://host/3")
    first[1].add_done_callback(lambda _: second[0].end())
    acted.here |= {"http://host/1", "http://host/3"}
    await third[1]
    with pytest.raises(Overtaken, match="a newer question was asked"):
        await second[1]
    assert acted.begun == ["http://host/1", "http://host/3"]


@acting(lambda: Acted(of_a_host=1, seconds=0.3))
async def test_nobody_waits_for_ever(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    (question, asking), (_, late) = await acted.asked("http://silent/1", "http://silent/2")
    with pytest.raises(Busy, match=r"other headers were fetched for 0.3 seconds: ask again later"):
        await late
    monkeypatch.setattr(pool, "WAITING", 0)
    with pytest.raises(Busy, match="0 questions wait for headers: ask again later"):
        await acted.ask("http://silent/3")[1]
    question.end()
    await asyncio.gather(asking, return_exceptions=True)


@acting(lambda: Acted(of_a_host=1))
async def test_what_fails_frees_it_too(acted: Acted) -> None:
    acted.here |= {"http://host/broken", "http://host/a"}
    for _ in range(3):
        with pytest.raises(ModelError, match=r"the server has no such file \(404\)"):
            await acted.ask("http://host/broken")[1]
    await acted.ask("http://host/a")[1]
