"""Calls to llama.cpp that must not end the process, and the process's connections to rpc-servers.

Each call is on its own thread, which stops if ggml aborts; ``bindings/measuring/load_guard.cpp`` explains how. A thread
that cannot return sleeps until the process ends, and its memory stays allocated. ggml-rpc keeps one connection per
server for all loaded models.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fitter.errors import RemoteError
from fitter.llama.build import library as native
from fitter.llama.build.functions import ProgressCallback
from fitter.llama.build.log import LogLine, log_lines
from fitter.llama.processes import rpc
from fitter.system import open_files

T = TypeVar("T")

_SLICE = 100
"""Milliseconds between two checks for signals."""
_PATIENCE = 1.0
"""Seconds to wait for a server after Ctrl-C."""
_GRACE = 10.0
"""Seconds for a call to end after it was cancelled or has failed."""


class LoadProgress:
    """Progress of a call, and whether to cancel it. ``callback`` is for llama.cpp's load."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.last = time.monotonic()
        self.callback = ProgressCallback(self._tell)

    def step(self) -> None:
        """Record that the call has made progress."""
        self.last = time.monotonic()

    def _tell(self, _done: float, _data: ctypes.c_void_p) -> bool:
        self.step()
        return not self.is_cancelled


@dataclass(frozen=True)
class CallResult(Generic[T]):
    """The result of a call.

    Attributes:
        value: The value.
        error: The error.
        crash: ggml's message, if it would have aborted.
        is_lost: Whether the thread cannot return, so that its memory stays allocated.
        stalled: Seconds without progress, if the call was cancelled for that.
        log: llama.cpp's log.
    """

    value: T | None
    error: BaseException | None
    crash: str | None
    is_lost: bool
    stalled: float | None
    log: tuple[LogLine, ...]


# one call at a time, because llama-cpp-python replaces the process's stdout and stderr
_turn = threading.Lock()


def attempt(
    call: Callable[[LoadProgress], T],
    servers: Sequence[str] = (),
    timeout: float | None = None,
    on_lost: Callable[[], None] | None = None,
) -> CallResult[T]:
    """Make ``call`` on another thread, and return its result however it ends.

    Ctrl-C cancels it at the next tensor, or closes the connections.

    Args:
        call: The call.
        servers: rpc-servers (``host:port``) that it uses.
        timeout: Seconds without progress after which a call with servers is cancelled.
        on_lost: Called if the thread cannot return.
    """
    fitter = native.libraries().fitter
    progress = LoadProgress()
    made: list[T] = []
    failed: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        fitter.fitter_guard_enter(guard)
        try:
            made.append(context.run(call, progress))
        except BaseException as error:
            failed.append(error)
        finally:
            fitter.fitter_guard_leave(guard)

    with _turn, _own_streams() as restore:
        guard = fitter.fitter_guard_new(bool(servers))
        thread = threading.Thread(target=run, name="fitter-load", daemon=True)
        state, stalled = 0, None
        try:
            try:
                thread.start()
            except RuntimeError as error:
                return CallResult(None, MemoryError(str(error)), None, False, None, ())
            try:
                state, stalled = _wait(guard, progress, servers, timeout)
            except BaseException:
                progress.is_cancelled = True
                state = _wait_for(guard, _PATIENCE if servers else _GRACE)
                if state == 0 and servers:
                    disconnect(servers)
                    state = _wait_for(guard, _GRACE)
                raise
            finally:
                if state == 1:
                    thread.join()
                else:
                    restore()
                    if on_lost:
                        on_lost()
            crash = native.libraries().text(fitter.fitter_guard_crash(guard))
            log = log_lines(lambda out: fitter.fitter_guard_log(guard, out))
        finally:
            # a thread that was not started never entered the guard
            if thread.ident is not None:
                fitter.fitter_guard_close(guard)
    return CallResult(
        made[0] if made and state == 1 else None, failed[0] if failed else None, crash, state != 1, stalled, log
    )


def _wait(
    guard: Any, progress: LoadProgress, servers: Sequence[str], timeout: float | None
) -> tuple[int, float | None]:
    """Wait for the thread: 1 if it has ended, 2 if it never will, 0 if it was cancelled after so many idle seconds."""
    fitter = native.libraries().fitter
    while not (state := int(fitter.fitter_guard_wait(guard, _SLICE))):
        idle = time.monotonic() - progress.last
        if servers and timeout is not None and idle > timeout:
            progress.is_cancelled = True
            # this ends every wait for a server, and so the thread
            disconnect(servers)
            return _wait_for(guard, _GRACE), idle
    return state, None


def _wait_for(guard: Any, seconds: float) -> int:
    fitter = native.libraries().fitter
    end = time.monotonic() + seconds
    while not (state := int(fitter.fitter_guard_wait(guard, _SLICE))) and time.monotonic() < end:
        pass
    return state


def disconnect(servers: Sequence[str]) -> None:
    """Reset this process's connections to ``servers``, which ends every wait for an answer.

    If possible they are not shut down: SIGPIPE would kill a server that answers on a closed connection.
    """
    connect = ctypes.CDLL(None).connect
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    addresses = set()
    for server in servers:
        host, _, port = server.rpartition(":")
        with contextlib.suppress(OSError):
            addresses.add((socket.gethostbyname(host), int(port)))
    for number in open_files():
        with contextlib.suppress(OSError, ValueError):
            connection = socket.socket(fileno=os.dup(number))
            with connection:
                if connection.family != socket.AF_INET or connection.getpeername() not in addresses:
                    continue
                # some kernels refuse this while a thread waits
                if connect(connection.fileno(), nowhere, len(nowhere)):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _own_streams() -> Iterator[Callable[[], None]]:
    """Yield a function that restores stdout and stderr, which llama-cpp-python replaces during a quiet load."""
    streams = sys.stdout, sys.stderr
    # llama-cpp-python also replaces the own descriptors of Jupyter's streams
    copies = [getattr(stream, "_original_stdstream_copy", None) for stream in streams]
    saved: dict[int, int] = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            saved[number] = os.dup(number)

    def restore() -> None:
        sys.stdout, sys.stderr = streams
        for stream, copy in zip(streams, copies, strict=True):
            if copy is not None:
                stream._original_stdstream_copy = copy  # type: ignore[union-attr]
        for number, descriptor in saved.items():
            os.dup2(descriptor, number)

    try:
        yield restore
    finally:
        for descriptor in saved.values():
            os.close(descriptor)


servers_of_models: dict[int, tuple[str, ...]] = {}
"""rpc-servers of each loaded model: they serve one connection at a time, so others would wait forever."""

_lost: dict[str, int] = {}
"""Number of losses of each server while a model was loaded there. ggml-rpc keeps a dead connection under its server's
name as long as a thread waits for it.
"""
_is_broken = False


def lose_servers(servers: Sequence[str], is_connected: bool) -> None:
    """Close the connections to ``servers`` that no other model uses, so that they can serve other clients."""
    global _is_broken
    # a thread that was stopped while connecting holds locks that every other connection needs
    _is_broken = _is_broken or (bool(servers) and not is_connected)
    used = {server for others in servers_of_models.values() for server in others}
    free = [server for server in servers if server not in used]
    disconnect(free)
    for server in free:
        _lost[server] = _lost.get(server, 0) + 1


def name_of_server(server: str) -> str:
    """A name for ``server`` without a dead connection in ggml-rpc: a zero before the port for each time it was lost."""
    host, _, port = server.rpartition(":")
    return f"{host}:{'0' * _lost.get(server, 0)}{port}"


def check_servers(servers: Sequence[str], timeout: float | None) -> None:
    """Check, within ``timeout`` seconds, that ``servers`` can be used. Raises ``RemoteError`` and ``UsageError``."""
    if _is_broken:
        raise RemoteError(
            "an RPC server was lost while llama.cpp connected to it, so this process cannot connect to any server now: "
            "load the plan in a new process"
        )
    busy = {server for others in servers_of_models.values() for server in others}
    if idle := [server for server in servers if server not in busy]:
        rpc.check(idle, rpc.ANSWER_SECONDS if timeout is None else timeout)
