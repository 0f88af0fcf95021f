"""rpc-servers before ggml hears of them: it aborts where nobody answers, and waits for ever where nobody speaks."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Sequence

from fitter.errors import RemoteError, UsageError

PROTOCOL = (7, 0)
"""The protocol of the pinned llama.cpp; it takes servers of the same first number, and of no larger second one."""

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""A server has one client at a time, and another fit's may have to end first."""

_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_HELLO = struct.pack("<BQ24x", 14, 24)
_ANSWER = struct.Struct("<QBBBx24x")
RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with which closing a connection resets it."""

_DEVICE_COUNT = struct.pack("<BQ", 15, 0)
_COUNT = struct.Struct("<QI")


class _Refusal(Exception):
    """What is wrong with a server, and what to do: the end of a sentence that begins with its name."""


def parse_servers(given: str | Sequence[str]) -> tuple[str, ...]:
    """rpc-servers as ``host:port``, from texts that may have several with commas between them.

    Raises ``UsageError`` for one that ggml-rpc cannot take (it knows host names and IPv4 addresses), or given twice.
    """
    texts = [given] if isinstance(given, str) else given
    servers: list[str] = []
    for text in (part.strip() for each in texts for part in each.split(",")):
        host, _, port = text.rpartition(":")
        if ":" in host:
            raise UsageError(f"RPC server '{text}': llama.cpp's RPC knows no IPv6; give a host name or an IPv4 address")
        if not _HOST.fullmatch(host):
            raise UsageError(f"RPC server '{text}' is not of the form host:port, such as 192.168.1.2:50052")
        if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and len(port) < 6):
            raise UsageError(f"RPC server '{text}': '{port}' is no port; give a number from 1 to 65535")
        server = f"{host}:{int(port)}"
        if server in servers:
            raise UsageError(f"the RPC server {server} is given twice: leave one out")
        servers.append(server)
    return tuple(servers)


def check(servers: Sequence[str], timeout: float) -> None:
    """See that each of ``servers`` is an rpc-server that this llama.cpp can talk to, all at the same time.

    Takes ``timeout`` seconds at most. Raises ``RemoteError`` naming the first one that is none, ``UsageError`` where
    two are the same one: it would wait for itself.
    """
    answers = _ask(servers, min(timeout, CONNECT_SECONDS), min(timeout, ANSWER_SECONDS))
    by_address: dict[object, str] = {}
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, _Refusal):
            raise RemoteError(f"the RPC server {server} {answer}")
        if answer in by_address:
            raise UsageError(f"the RPC servers {by_address[answer]} and {server} are the same one: leave one out")
        by_address[answer] = server


def lost(servers: Sequence[str], seconds: float) -> str | None:
    """The first of ``servers`` that no longer answers, and why, as ``check`` would say it; ``None`` if all do."""
    answers = _ask(servers, seconds, seconds)
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, _Refusal):
            return f"{server}, which {answer}"
    return None


def _ask(servers: Sequence[str], connect_seconds: float, answer_seconds: float) -> list[tuple[str, int] | _Refusal]:
    """The address of every server, or what is wrong with it."""
    start = time.monotonic()
    slow = _Refusal(f"was not found within {connect_seconds:g} seconds: see that its name can be resolved")
    answers: list[tuple[str, int] | _Refusal] = [slow] * len(servers)

    def ask(index: int) -> None:
        try:
            answers[index] = _greet(servers[index], start + connect_seconds, start + answer_seconds)
        except _Refusal as refusal:
            answers[index] = refusal

    # Threads, for resolving a name has no time limit.
    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(len(servers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        # a little more, for a thread that is at its limit has something to say
        thread.join(max(0.0, start + max(connect_seconds, answer_seconds) + 0.1 - time.monotonic()))
    return list(answers)


def _greet(server: str, connect_by: float, answer_by: float) -> tuple[str, int]:
    """The address of a server that answers as ggml's own do. Raises ``_Refusal``."""
    host, _, port = server.rpartition(":")
    try:
        address = (socket.gethostbyname(host), int(port))
    except (OSError, UnicodeError) as error:
        raise _Refusal(f"is not known: {_said(error)}; check the name, or give its IPv4 address") from None
    limit = connect_by - time.monotonic()
    try:
        connection = socket.create_connection(address, max(0.001, limit))
    except TimeoutError:
        raise _Refusal(f"cannot be reached within {limit:.3g} seconds: check address and firewall") from None
    except OSError as error:
        raise _Refusal(f"cannot be reached ({_said(error)}): is rpc-server running there, and on that port?") from None
    with connection:
        # A server that answers when nobody is there any more is ended by SIGPIPE, unless the connection was reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        version = _asked(connection, _HELLO, _ANSWER, answer_by)
        if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
            theirs, ours = ".".join(map(str, version)), ".".join(map(str, PROTOCOL))
            raise _Refusal(f"speaks version {theirs} of the protocol, and this llama.cpp {ours}: {_SAME}")
        if not _asked(connection, _DEVICE_COUNT, _COUNT, answer_by)[0]:
            raise _Refusal("has no device: start it with one")
    return address


def _asked(connection: socket.socket, request: bytes, kind: struct.Struct, answer_by: float) -> tuple[int, ...]:
    """The numbers of an answer, which begins with its size. Raises ``_Refusal``."""
    try:
        connection.settimeout(max(0.001, answer_by - time.monotonic()))
        connection.sendall(request)
        answer = _read(connection, kind.size, answer_by)
    except TimeoutError:
        raise _Refusal(
            "accepts a connection but does not answer: it has one client at a time, so end the one that it has; or it "
            "is no rpc-server"
        ) from None
    except OSError as error:
        raise _Refusal(f"broke the connection ({_said(error)}): {_OTHER}") from None
    size, *numbers = kind.unpack(answer.ljust(kind.size, b"\0"))
    if len(answer) < 8 or (size == kind.size - 8 and len(answer) < kind.size):
        raise _Refusal(f"closed the connection: {_OTHER}")
    if size != kind.size - 8:
        raise _Refusal(f"does not answer as an rpc-server: {_OTHER}")
    return tuple(numbers)


_SAME = "run an rpc-server of the same llama.cpp as this one"
_OTHER = f"it is no rpc-server, or one of another version; {_SAME}"


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """``size`` bytes, fewer where the connection ends before. Raises ``TimeoutError`` and other ``OSError``."""
    data = b""
    while len(data) < size:
        # a byte now and then does not move the limit
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def _said(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()
