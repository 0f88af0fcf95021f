"""Waiting in tests: for what happens, however busy the machine is, and never for a time that should be enough."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil
import pytest

SECONDS = 120.0
"""The longest wait for anything: what has not happened by then never will."""
_TRIES = 25

_T = TypeVar("_T")


def until(holds: Callable[[], object], what: str = "it never was so") -> None:
    """Wait until it holds; fail with ``what`` if it never does."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody waits for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(processes: Iterable[psutil.Process]) -> bool:
    """Wait for the end of all of them."""
    left = list(processes)
    end = time.monotonic() + SECONDS
    while left := [process for process in left if is_running(process)]:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def suspended(process: subprocess.Popen[str], seconds: float, *, with_forks: bool) -> set[psutil.Process]:
    """The children of ``process``, each stopped as it begins, once there was no other for so many ``seconds``.

    Without ``with_forks``, one that is still a copy of its parent is left to go on, since it keeps that waiting until
    it is another program.
    """
    own, found = psutil.Process(process.pid), set[psutil.Process]()
    words, end, latest = own.cmdline(), time.monotonic() + SECONDS, math.inf
    while time.monotonic() < latest + seconds:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it starts no process"
        for child in set(own.children(recursive=True)) - found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if with_forks or child.cmdline()[1:] != words[1:]:
                    child.suspend()
                    found.add(child)
                    latest = time.monotonic()
    return found


class TooLateError(Exception):
    """The process that a test disturbs had ended before."""


def in_time(attempt: Callable[[], _T]) -> _T:
    """What ``attempt`` returns, tried again where it raises ``TooLateError``: a busy machine lets a test sleep long."""
    for _ in range(_TRIES):
        try:
            return attempt()
        except TooLateError:
            continue
    pytest.fail(f"too late {_TRIES} times: it does not take what is sent to it, or ends too soon")


def with_more_time(attempt: Callable[[float], None], *limits: float) -> None:
    """``attempt`` with the first of these limits in seconds with which it succeeds.

    A busy machine exceeds a short limit for reasons of its own; what is wrong fails with the longest as well.
    """
    for seconds in limits[:-1]:
        try:
            return attempt(seconds)
        except (Exception, pytest.fail.Exception):
            continue
    return attempt(limits[-1])
