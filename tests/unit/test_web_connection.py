"""How long a connection may take with a request: as a client sees it that sends its bytes one by one, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from fitter.web import connection

LIMIT = 0.2
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def is_ended_by(pieces: Sequence[bytes], *, pause: float, takes: float) -> bool:
    """Whether the server, which needs some seconds for each request, ends the connection before the client does."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(takes)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off", timeout_keep_alive=60)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection.Connection(config, ServerState(), {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        await asyncio.wait_for(reader.read(), 4 * LIMIT)
    except ConnectionError:
        return True
    except asyncio.TimeoutError:
        return False
    finally:
        writer.close()
        server.close()
    return True


SLOW = [REQUEST[i : i + 1] for i in range(8)]

CASES: dict[str, tuple[list[bytes], float, float, bool]] = {
    "nothing comes": ([], 0, 0, True),
    "no end of the headers comes": ([REQUEST[:-2]], 0, 0, True),
    "byte by byte": (SLOW, LIMIT / 4, 0, True),
    "a second request that does not end": ([REQUEST, *SLOW], LIMIT / 4, 0, True),
    "an answer that takes longer than the limit": ([REQUEST], 0, 2 * LIMIT, False),
    "a pause after an answer, which has a limit of its own": ([REQUEST], 2 * LIMIT, 0, False),
    "two requests": ([REQUEST, REQUEST], LIMIT / 4, 0, False),
}


@pytest.mark.parametrize(("pieces", "pause", "takes", "is_ended"), CASES.values(), ids=CASES.keys())
def test_a_request_arrives_in_time(
    pieces: list[bytes], pause: float, takes: float, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SECONDS", LIMIT)
    assert asyncio.run(is_ended_by(pieces, pause=pause, takes=takes)) == is_ended
