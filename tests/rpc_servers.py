"""rpc-servers on loopback, upstream's own ones and such as are none."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from tests import upstream

HELLO = 14


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(port: int | None = None, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """Upstream's rpc-server with the CPU as its device, listening, and its ``host:port``."""
    port = port or free_port()
    command = [str(upstream.tool("rpc-server")), "-H", "127.0.0.1", "-p", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"127.0.0.1:{port}"
        time.sleep(0.05)
    stop(process)
    raise AssertionError("rpc-server does not listen")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server at once, one that was stopped as well."""
    process.kill()
    process.wait()


@contextlib.contextmanager
def servers(count: int) -> Iterator[tuple[str, ...]]:
    """So many of upstream's rpc-servers."""
    started = []
    try:
        for _ in range(count):
            started.append(start())
        yield tuple(endpoint for _, endpoint in started)
    finally:
        for process, _ in started:
            stop(process)


Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def impostor(behave: Behaviour) -> Iterator[str]:
    """A server that does to each connection what ``behave`` says, in a thread of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            behave(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                opened.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for each in (listening, *opened):
            # a thread that waits for it is woken
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def answer(*version: int, devices: int | None = None) -> Behaviour:
    """Greets with a version of the protocol, and says how many devices there are, or nothing more."""

    def behave(connection: socket.socket) -> None:
        connection.recv(1 + 8 + 24, socket.MSG_WAITALL)
        connection.sendall(struct.pack("<QBBBx24x", 28, *version))
        connection.recv(1 + 8, socket.MSG_WAITALL)
        if devices is not None:
            connection.sendall(struct.pack("<QI", 4, devices))

    return behave


@contextlib.contextmanager
def relay(endpoint: str, connections: int, *, mute: bool) -> Iterator[str]:
    """What stands before a real server, and after so many connections is gone (or, ``mute``, says nothing more).

    Connections count as they are made; the one that is too many ends, or silences, the others as well.
    """
    host, _, port = endpoint.rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []
    over = threading.Event()

    def end() -> None:
        over.set()
        for each in opened if mute else (listening, *opened):
            if not mute:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not over.is_set():
                target.sendall(data)
            if not over.is_set():
                target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        count = 0
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                opened.append(connection)
                count += 1
                if count > connections:
                    end()
                    continue
                beyond = socket.create_connection((host, int(port)))
                opened.append(beyond)
                for pair in ((connection, beyond), (beyond, connection)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for each in (listening, *opened):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
