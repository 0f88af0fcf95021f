"""Check rpc-servers before ggml connects to them: ggml aborts without a server, and may wait forever."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

from fitter.errors import RemoteError, UsageError

PROTOCOL = (7, 0)
"""Protocol of the pinned llama.cpp; the greeting is equal in all protocols."""

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""Seconds for an answer: a server has one client at a time, so another fit's worker may have to end first."""

_MISMATCH = re.compile(r"RPC server version mismatch: (\d+(?:\.\d+)*)")
_NO_DEVICE = "has no device: start it with one"

_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_HELLO = struct.pack("<BQ24x", 14, 24)
_ANSWER = struct.Struct("<QBBBx24x")
RESET = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER`` that resets a connection when it is closed."""

_DEVICE_COUNT = struct.pack("<BQ", 15, 0)
_COUNT = struct.Struct("<QI")


class _Refusal(Exception):
    """Why a server cannot be used, and what to do; a sentence that begins with the server's name, without it."""


def parse_servers(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse rpc-servers (``host:port``), also several in one string with commas.

    Raises ``UsageError`` for a duplicate, and for a name that ggml-rpc does not support: it accepts host names and IPv4
    addresses.
    """
    texts = [given] if isinstance(given, str) else given
    servers: list[str] = []
    for text in (part.strip() for each in texts for part in each.split(",")):
        host, _, port = text.rpartition(":")
        if ":" in host:
            raise UsageError(
                f"RPC server '{text}': llama.cpp's RPC does not support IPv6; give a host name or an IPv4 address"
            )
        if not _HOST.fullmatch(host):
            raise UsageError(f"RPC server '{text}' is not of the form host:port, such as 192.168.1.2:50052")
        if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and len(port) < 6):
            raise UsageError(f"RPC server '{text}': '{port}' is not a port; give a number from 1 to 65535")
        server = f"{host}:{int(port)}"
        if server in servers:
            raise UsageError(f"the RPC server {server} is given twice: leave one out")
        servers.append(server)
    return tuple(servers)


def check(servers: Sequence[str], timeout: float) -> None:
    """Check at the same time that fitter's llama.cpp can use each of ``servers``.

    Args:
        servers: The servers.
        timeout: Seconds for all of them.

    Raises:
        RemoteError: A server cannot be used.
        UsageError: Two names are one server: llama.cpp would wait forever.
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
    """Return the first server that no longer answers, with the reason; ``None`` if all answer."""
    answers = _ask(servers, seconds, seconds)
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, _Refusal):
            return f"{server}, which {answer}"
    return None


def _ask(servers: Sequence[str], connect_seconds: float, answer_seconds: float) -> list[tuple[str, int] | _Refusal]:
    """Return the address of every server, or the reason why it cannot be used."""
    start = time.monotonic()
    slow = _Refusal(f"was not found within {connect_seconds:g} seconds: check its name, or give its IPv4 address")
    answers: list[tuple[str, int] | _Refusal] = [slow] * len(servers)
    answered = set[int]()

    def ask(index: int) -> None:
        try:
            address = _resolve(servers[index])
            answered.add(index)
            _greet(address, connect_seconds, start, start + answer_seconds)
            answers[index] = address
        except _Refusal as refusal:
            answers[index] = refusal

    # threads, because resolving a name has no time limit
    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(len(servers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + max(connect_seconds, answer_seconds) - time.monotonic()))
    for index, thread in enumerate(threads):
        if index in answered:
            # each step has a limit; a busy machine may report the result a little later
            thread.join()
    return list(answers)


def _resolve(server: str) -> tuple[str, int]:
    """Resolve a server. Raises ``_Refusal``."""
    host, _, port = server.rpartition(":")
    try:
        return socket.gethostbyname(host), int(port)
    except (OSError, UnicodeError) as error:
        raise _Refusal(f"was not found ({_message(error)}): check the name, or give its IPv4 address") from None


def _greet(address: tuple[str, int], connect_seconds: float, start: float, answer_by: float) -> None:
    """Check that a server, asked since ``start``, answers like ggml's own. Raises ``_Refusal``."""
    try:
        connection = socket.create_connection(address, max(0.001, start + connect_seconds - time.monotonic()))
    except TimeoutError:
        why = f"cannot be reached within {connect_seconds:g} seconds: check its address and firewall"
        raise _Refusal(why) from None
    except OSError as error:
        raise _Refusal(
            f"cannot be reached ({_message(error)}): check that rpc-server is running there, on that port"
        ) from None
    with connection:
        # SIGPIPE kills a server that answers on a closed connection, unless it was reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        version = _request(connection, _HELLO, _ANSWER, answer_by)
        # only llama.cpp knows whether it can use another protocol: see refusal_of
        if version[:2] == PROTOCOL and not _request(connection, _DEVICE_COUNT, _COUNT, answer_by)[0]:
            raise _Refusal(_NO_DEVICE)


def mismatch(servers: Sequence[str], log: Iterable[str]) -> str | None:
    """Return why llama.cpp cannot use one of ``servers``, if its ``log`` names their protocol."""
    lines = list(log)
    versions = [match[1] for line in lines if (match := _MISMATCH.search(line))]
    if not versions:
        return None
    # newer versions name the server, and end the process
    named = [server for server in servers if any(line.endswith(f" {server}") for line in lines)] or list(servers)
    which = f"the RPC server {named[0]} has" if len(named) == 1 else f"one of the RPC servers {', '.join(named)} has"
    return f"{which} version {versions[-1]} of the protocol, and this llama.cpp has another one: {_SAME}"


def refusal_of(server: str, log: Iterable[str]) -> str:
    """Return why llama.cpp found no device of ``server``, by its ``log``."""
    return mismatch([server], log) or f"the RPC server {server} {_NO_DEVICE}"


def _request(connection: socket.socket, request: bytes, kind: struct.Struct, answer_by: float) -> tuple[int, ...]:
    """Send a request; return the numbers of the answer, which begins with its size. Raises ``_Refusal``."""
    try:
        connection.settimeout(max(0.001, answer_by - time.monotonic()))
        connection.sendall(request)
        answer = _read(connection, kind.size, answer_by)
    except TimeoutError:
        raise _Refusal(
            "accepts connections but does not answer: end the program that uses it now, since it serves one client at "
            "a time, or check that it is an rpc-server"
        ) from None
    except OSError as error:
        raise _Refusal(f"broke the connection ({_message(error)}): {_OTHER}") from None
    size, *numbers = kind.unpack(answer.ljust(kind.size, b"\0"))
    if len(answer) < 8 or (size == kind.size - 8 and len(answer) < kind.size):
        raise _Refusal(f"closed the connection: {_OTHER}")
    if size != kind.size - 8:
        raise _Refusal(f"does not answer as an rpc-server: {_OTHER}")
    return tuple(numbers)


_SAME = "run an rpc-server of the same llama.cpp as this one"
_OTHER = f"it is not an rpc-server, or one of another version; {_SAME}"


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read ``size`` bytes, or fewer if the connection ends. Raises ``TimeoutError`` and other ``OSError``."""
    data = b""
    while len(data) < size:
        # a few bytes do not extend the limit
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def _message(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()
