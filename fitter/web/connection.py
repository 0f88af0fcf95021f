"""uvicorn's connection, with a time limit for the arrival of a request."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0
"""Seconds for a request's line and headers, from the connection's start or their first byte on."""


class Connection(H11Protocol):
    """A connection that closes if the line and the headers of a request do not arrive in time.

    uvicorn itself only limits the time between an answer and the next request: a client that sends a byte now and then
    would hold a connection, of which there is a limited number, forever.
    """

    _ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._wait_no_more()
        elif self._ending is None:
            self._ending = self.loop.call_later(SECONDS, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
