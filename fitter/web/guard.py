"""Checks before every request: its time to arrive, origin and size, and what a browser may do with the answer."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LONGEST_BODY = 64 * 1024
"""Most bytes of a request's body."""
LONGEST_HEADERS = 16 * 1024
"""Most bytes of a request's line and headers."""
SECONDS = 10.0
"""Seconds for a request's line and headers, from the connection's start or their first byte on, and for its body."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


@dataclass(frozen=True)
class Hosts:
    """Names by which the server may be asked: another page's own name can be made to lead here (DNS rebinding)."""

    names: frozenset[str]
    is_everywhere: bool = False
    """Whether other machines reach the server, by any of its addresses."""

    @classmethod
    def of(cls, host: str) -> Hosts:
        """Return the names of a server at ``host``. A numeric address cannot lead elsewhere."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        if host == "localhost" or (address is not None and address.is_loopback):
            return cls(frozenset({"localhost", "127.0.0.1", "::1", host.lower()}))
        return cls(frozenset({"localhost", host.lower(), socket.gethostname().lower()}), True)

    def has(self, netloc: str) -> bool:
        """Return whether ``host[:port]``, as a browser sends it, is one of them."""
        try:
            parts = urllib.parse.urlsplit(f"//{netloc}")
            name, _ = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if not name or parts.netloc != netloc or "@" in netloc:
            return False
        if self.is_everywhere:
            try:
                ipaddress.ip_address(name)
                return True
            except ValueError:
                pass
        return name in self.names


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Guard:
    """An ASGI application around ``app`` that answers requests from elsewhere itself."""

    app: _App
    hosts: Hosts
    headers: list[tuple[bytes, bytes]] = field(
        default_factory=lambda: [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    )

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)

        async def guarded(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
            await send(message)

        try:
            if scope["type"] != "http":
                raise _RefusedError(400, "only HTTP is answered")
            self._check(scope)
            body = await _body(scope, receive)
        except _RefusedError as error:
            return await _answer(guarded, error.status, str(error))
        if body is not None:
            await self.app(scope, _replayed(body, receive), guarded)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """Raise if a request is for another host, comes from another host's page, or is too long."""
        # h11 limits only headers that arrive in pieces
        length = sum(len(name) + len(value) for name, value in scope["headers"])
        if length + len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > LONGEST_HEADERS:
            raise _RefusedError(431, f"address and headers have more than {LONGEST_HEADERS} bytes")
        values: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        if "transfer-encoding" in values and "content-length" in values:
            # a proxy might use the other length, and see another request in the body
            raise _RefusedError(400, "the body has two lengths: give Content-Length or Transfer-Encoding")
        hosts = values.get("host", [])
        if len(hosts) != 1 or not self.hosts.has(hosts[0]):
            raise _RefusedError(421, "this server is asked by another name than its own: use the address that it said")
        origin = values.get("origin")
        if origin is not None and origin != [f"{scope['scheme']}://{hosts[0]}"]:
            raise _RefusedError(403, "requests of other sites are not answered")
        is_read = scope["method"] in ("GET", "HEAD")
        is_opened = (values.get("sec-fetch-mode"), values.get("sec-fetch-dest")) == (["navigate"], ["document"])
        # a link elsewhere may open the page; nothing else of another site is answered, such as an image or a frame
        if values.get("sec-fetch-site", ["same-origin"])[0] not in ("same-origin", "none") and not (
            is_read and is_opened
        ):
            raise _RefusedError(403, "requests of other sites are not answered")
        if not is_read and values.get("content-type", [""])[0].partition(";")[0].strip().lower() != "application/json":
            raise _RefusedError(415, "the body must be JSON: send it with Content-Type: application/json")


async def _body(scope: MutableMapping[str, Any], receive: _Receive) -> bytes | None:
    """Read the whole body; ``None`` if the asker has disconnected. Raises if it is too long or late."""
    too_long = _RefusedError(413, f"the body has more than {LONGEST_BODY} bytes")
    said = dict(scope["headers"]).get(b"content-length", b"")
    if said.isdigit() and int(said[:20]) > LONGEST_BODY:
        raise too_long
    body = bytearray()
    end = asyncio.get_running_loop().time() + SECONDS
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            raise _RefusedError(408, "the body did not arrive in time") from None
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: _Receive) -> _Receive:
    """Make a receiver of ``body``, which has arrived, and of everything after it."""
    is_read = False

    async def again() -> _Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(send: _Send, status: int, message: str) -> None:
    text = json.dumps({"error": message}).encode()
    # the rest of the request is not read
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


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
