"""rpc-servers on loopback, upstream's own ones and such as are none."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fitter.llama.processes.interpreter import LLAMA_CPP
from tools.comparisons import upstream

HELLO = 14
_SECONDS = 120.0
"""The longest wait for a server to listen."""
_TRIES = 3
"""Ports, since another program may take one before the server does."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(
    port: int | None = None,
    *options: str,
    log: Path | None = None,
    program: Path | None = None,
    counts: str | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Upstream's rpc-server with the CPU as its device, listening, and its ``host:port``.

    With a ``log`` it writes there what it is asked for. ``program``: that of another llama.cpp than the pinned one.
    ``counts``: another llama.cpp, as ``--llama-cpp`` has it, which ``tools.loopback.counting_server`` serves.
    """
    environment = os.environ if log is None else {**os.environ, "GGML_RPC_DEBUG": "1"}
    if counts is None:
        words = [str(program or upstream.tool("rpc-server"))]
    else:
        environment = {**os.environ, LLAMA_CPP: counts}
        words = [sys.executable, "-m", "tools.loopback.counting_server"]
    for _ in range(_TRIES):
        at = port or free_port()
        command = [*words, "-H", "127.0.0.1", "-p", str(at), *options]
        with open(os.devnull if log is None else log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        if _listens(process, at):
            return process, f"127.0.0.1:{at}"
        stop(process)
    raise RuntimeError("rpc-server does not listen")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it does, and not another program that was quicker, which ends it."""
    end = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(process.pid).net_connections("tcp4"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
        time.sleep(0.02)
    return False


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


def greet(connection: socket.socket) -> None:
    """Become the client that a server has."""
    connection.sendall(struct.pack("<BQ24x", HELLO, 24))
    assert len(connection.recv(36, socket.MSG_WAITALL)) == 36


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


Change = Callable[[bytes], bytes | None]
"""Changes an answer, of which the first eight bytes are its length; with ``None`` the connection is closed."""


@contextlib.contextmanager
def changing(endpoint: str, number: int, change: Change) -> Iterator[str]:
    """What stands before a real server, and changes its answers from the one of this number on."""
    host, _, port = endpoint.rpartition(":")
    answers = itertools.count(1)

    def behave(connection: socket.socket) -> None:
        with connection, socket.create_connection((host, int(port))) as beyond:
            # a server that answers a closed connection is ended by SIGPIPE
            beyond.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

            def ask() -> None:
                with contextlib.suppress(OSError):
                    try:
                        while data := connection.recv(1 << 16):
                            beyond.sendall(data)
                    finally:
                        # a server has one client at a time
                        beyond.shutdown(socket.SHUT_RDWR)

            threading.Thread(target=ask, daemon=True).start()
            while len(size := beyond.recv(8, socket.MSG_WAITALL)) == 8:
                whole: bytes | None = size + beyond.recv(*struct.unpack("<Q", size), socket.MSG_WAITALL)
                if next(answers) >= number and (whole := change(whole or b"")) is None:
                    break
                connection.sendall(whole or b"")

    with impostor(behave) as before:
        yield before


@contextlib.contextmanager
def relay(endpoint: str, connections: int, *, mute: bool) -> Iterator[str]:
    """What stands before a real server, and after so many connections is gone (or, ``mute``, says nothing more).

    Connections count as they are made; the one that is too many ends, or silences, the others as well. The real server
    is left by resetting its connections, for one that answers a closed one is ended by SIGPIPE.
    """
    host, _, port = endpoint.rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.05)
    silent, over = threading.Event(), threading.Event()

    def copy(source: socket.socket, target: socket.socket, ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set() and not ended.is_set():
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    break
                if not silent.is_set():
                    target.sendall(data)

    def serve(connection: socket.socket) -> None:
        with connection, socket.create_connection((host, int(port))) as beyond:
            for each in (connection, beyond):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.settimeout(0.05)
            ended = threading.Event()
            back = threading.Thread(target=copy, args=(beyond, connection, ended), daemon=True)
            back.start()
            copy(connection, beyond, ended)
            # no half-closed connection: what is reset after that ends a server that answers
            ended.set()
            back.join()

    def accept() -> None:
        count = 0
        kept = []
        with listening:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                count += 1
                if count <= connections:
                    threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                    threads[-1].start()
                    continue
                kept.append(connection)
                (silent if mute else over).set()
        for connection in kept:
            connection.close()

    threads = [threading.Thread(target=accept, daemon=True)]
    threads[0].start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        for thread in threads:
            thread.join()
