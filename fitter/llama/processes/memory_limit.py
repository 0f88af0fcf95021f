"""The memory limit of a process that plans, so that no file takes all memory of a machine. Bytes.

Only used memory counts, without mapped files. A dummy load reserves far more addresses than it uses, so the system's
limits (``setrlimit``) would end valid loads.
"""

from __future__ import annotations

import functools
import os
import time

from fitter import system
from fitter.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "FITTER_MEMORY_LIMIT"
"""Environment variable with another limit: a size such as ``8GiB``."""

CHECK_SECONDS = 0.1
"""Seconds between two checks; llama.cpp fills some 200 MB in that time."""

_MOST = 4 << 30
"""A plan of a large model with a context of tens of millions of tokens took 1.7 GB."""
_LEAST = 512 << 20
"""Several times the memory for a plan of any known model."""


def check() -> None:
    """Raise ``UsageError`` if the environment's limit is no size."""
    if told := os.environ.get(VARIABLE):
        _parse(told)


@functools.cache
def limit() -> int:
    """Return the limit of this process: the environment's, or 4 GiB, or half of the machine's memory."""
    if told := os.environ.get(VARIABLE):
        try:
            return _parse(told)
        except UsageError:
            # ``check`` reports it
            pass
    return min(_MOST, _half_of_memory())


def divide(processes: int) -> None:
    """Give each of ``processes`` workers its part of half of the machine's memory, unless a limit is set."""
    os.environ.setdefault(VARIABLE, f"{min(_MOST, max(_LEAST, _half_of_memory() // processes))}B")


def excess() -> str | None:
    """Return why this process must end, in one line; ``None`` within its limit."""
    if (taken := system.own_memory()) <= limit():
        return None
    return (
        f"planning takes more than {limit() >> 20} MiB of memory ({taken >> 20} MiB): check the model's file, or allow "
        f"more with {VARIABLE}"
    )


def watch(end: Callable[[str], object]) -> None:
    """Call ``end`` with the reason, on another thread, as soon as this process exceeds its limit."""
    import threading

    def look() -> None:
        while (why := excess()) is None:
            time.sleep(CHECK_SECONDS)
        end(why)

    threading.Thread(target=look, name="fitter-memory", daemon=True).start()


def _half_of_memory() -> int:
    return system.physical_memory() // 2


def _parse(told: str) -> int:
    from fitter.parameters.values import parse_size

    try:
        return parse_size(told)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from None
