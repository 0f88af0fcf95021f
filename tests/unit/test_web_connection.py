"""How long a request may take to arrive, with a loop whose timers are looked at and never come by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from fitter.web.guard import SECONDS, Connection
from tests.support.cases import named_cases

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
QUESTION = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"


@dataclass
class Timer:
    """What a loop was told to call later."""

    seconds: float
    call: Callable[[], None]
    is_over: bool = False

    def cancel(self) -> None:
        self.is_over = True


@dataclass
class Loop:
    """The running loop, but for its timers."""

    timers: list[Timer] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    @property
    def ends(self) -> list[Timer]:
        """Those that end a connection for want of a request."""
        return [timer for timer in self.timers if timer.seconds == SECONDS]


class Transport(asyncio.Transport):
    """A client that takes all, and whether its connection was ended."""

    is_ended = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_ended

    def close(self) -> None:
        self.is_ended = True


async def fed(pieces: Sequence[bytes]) -> tuple[Loop, Transport, list[bool]]:
    """The timers of a connection that these come at, and whether one waited at first and after each piece."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["method"] == "POST" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off")
    config.load()
    loop, transport = Loop(), Transport()
    one = Connection(config, ServerState(), {}, _loop=loop)  # type: ignore[arg-type]
    one.connection_made(transport)
    found = []
    for piece in (b"", *pieces):
        if piece:
            one.data_received(piece)
        found.append(any(not timer.is_over for timer in loop.ends))
        for _ in range(10):
            await asyncio.sleep(0)
    one.connection_lost(None)
    return loop, transport, found


@named_cases(
    ("nothing comes", [], [True]),
    ("no end of the headers comes", [REQUEST[:-2]], [True, True]),
    ("a request", [REQUEST], [True, False]),
    ("a request in two pieces", [REQUEST[:5], REQUEST[5:]], [True, True, False]),
    ("two requests", [REQUEST, REQUEST], [True, False, False]),
    ("the second one does not end", [REQUEST, REQUEST[:5], REQUEST[5:9]], [True, False, True, True]),
    ("a body that does not come, which the guard waits for", [QUESTION, b"1234"], [True, False, False]),
)
def test_a_request_arrives_in_time(pieces: list[bytes], expected: list[bool]) -> None:
    loop, transport, found = asyncio.run(fed(pieces))
    assert (found, transport.is_ended) == (expected, True), "at its end"
    assert all(timer.is_over for timer in loop.ends)


def test_a_byte_now_and_then_is_no_more_time() -> None:
    loop, _, found = asyncio.run(fed([REQUEST[i : i + 1] for i in range(9)]))
    assert (len(loop.ends), set(found)) == (1, {True})


def test_a_connection_without_a_request_is_ended() -> None:
    loop, transport, _ = asyncio.run(fed([]))
    transport.is_ended = False
    loop.ends[0].call()
    assert transport.is_ended
