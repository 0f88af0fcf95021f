"""Calls to llama.cpp in a process that must outlive them: on a thread of their own, which fails where ggml would abort.

``bindings/measuring/load_guard.cpp`` says how. A thread that cannot go on is left behind, asleep, with what it holds.
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

from fitter.llama import library as native
from fitter.llama.log import LogLine, log_lines

T = TypeVar("T")

_SLICE = 100
"""Milliseconds after which a waiting thread looks for signals."""
_PATIENCE = 1.0
"""Seconds that one who pressed Ctrl-C waits for a server."""
_GRACE = 10.0
"""Seconds that a call has to come to its end once it was told to, or has failed."""


class Progress:
    """What a call that is under way says of itself, and what it is told. ``callback`` is for llama.cpp's load."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.last = time.monotonic()
        self.callback = native.load().llama_cpp.llama_progress_callback(self._tell)

    def step(self) -> None:
        """Note that something was done."""
        self.last = time.monotonic()

    def _tell(self, _done: float, _data: ctypes.c_void_p) -> bool:
        self.step()
        return not self.is_cancelled


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a call went: a ``value`` or an ``error``; ``crash`` is what ggml gave up with, if it did.

    With ``is_lost`` the thread is still there and always will be, with all that it holds. ``stalled``: seconds in which
    nothing was done, where that is why it was given up. ``log`` has llama.cpp's lines.
    """

    value: T | None
    error: BaseException | None
    crash: str | None
    is_lost: bool
    stalled: float | None
    log: tuple[LogLine, ...]


# One at a time: llama-cpp-python swaps the process's stdout and stderr while it loads, and does not expect company.
_turn = threading.Lock()


def attempt(
    call: Callable[[Progress], T],
    servers: Sequence[str] = (),
    timeout: float | None = None,
    on_lost: Callable[[], None] | None = None,
) -> Outcome[T]:
    """Make ``call`` on a thread of its own, and come back however it ends.

    With ``servers`` (``host:port`` of rpc-servers) it is also given up where nothing is done for ``timeout`` seconds.
    Ctrl-C cancels it at the next tensor, or cuts the connections. ``on_lost`` is called where the thread is lost.
    """
    fitter = native.load().fitter
    progress = Progress()
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
                return Outcome(None, MemoryError(str(error)), None, False, None, ())
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
            crash = native.load().text(fitter.fitter_guard_crash(guard))
            log = log_lines(lambda out: fitter.fitter_guard_log(guard, out))
        finally:
            # one that has not even started has no guard to leave
            if thread.ident is not None:
                fitter.fitter_guard_close(guard)
    return Outcome(
        made[0] if made and state == 1 else None, failed[0] if failed else None, crash, state != 1, stalled, log
    )


def _wait(guard: Any, progress: Progress, servers: Sequence[str], timeout: float | None) -> tuple[int, float | None]:
    """Whether the thread has ended (1) or never will (2), or was given up (0); and after how long without progress."""
    fitter = native.load().fitter
    while not (state := int(fitter.fitter_guard_wait(guard, _SLICE))):
        idle = time.monotonic() - progress.last
        if servers and timeout is not None and idle > timeout:
            progress.is_cancelled = True
            # what waits for a server gives up, and its thread with it
            disconnect(servers)
            return _wait_for(guard, _GRACE), idle
    return state, None


def _wait_for(guard: Any, seconds: float) -> int:
    fitter = native.load().fitter
    end = time.monotonic() + seconds
    while not (state := int(fitter.fitter_guard_wait(guard, _SLICE))) and time.monotonic() < end:
        pass
    return state


def disconnect(servers: Sequence[str]) -> None:
    """Reset this process's connections to ``servers``: who waits for one is told that it is over.

    Not shut down, if it can be helped: a server that answers when nobody is there any more is ended by SIGPIPE.
    """
    connect = ctypes.CDLL(None).connect
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    addresses = set()
    for server in servers:
        host, _, port = server.rpartition(":")
        with contextlib.suppress(OSError):
            addresses.add((socket.gethostbyname(host), int(port)))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            connection = socket.socket(fileno=os.dup(int(name)))
            with connection:
                if connection.family != socket.AF_INET or connection.getpeername() not in addresses:
                    continue
                # some kernels refuse it while a thread waits
                if connect(connection.fileno(), nowhere, len(nowhere)):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _own_streams() -> Iterator[Callable[[], None]]:
    """Gives what puts stdout and stderr back: llama-cpp-python turns them off while it loads without ``verbose``."""
    streams = sys.stdout, sys.stderr
    # Jupyter's streams have descriptors of their own, which are turned off as well.
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
