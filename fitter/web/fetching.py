"""Fetch headers for questions, with a limit for all and a lower one for each host, which may be silent.

Everything runs in the server's event loop, but for the fetching itself, which runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fitter.api import call_worker
from fitter.model.files import header_cache
from fitter.model.files.addresses import host_of
from fitter.planning.request.request import Progress
from fitter.web.pool import WAITING, Busy, Question, Turn, heard
from fitter.web.questions import SECONDS

AT_ONCE, OF_A_HOST = 8, 2
"""Headers that are fetched at the same time, each with up to 64 MiB in memory; and those of one host."""


class Fetching:
    """Fetches headers, ``at_once`` in all and ``of_a_host`` from each host.

    ``seconds``: time limit of a header, including its wait for others.
    """

    def __init__(
        self,
        at_once: int = AT_ONCE,
        of_a_host: int = OF_A_HOST,
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
