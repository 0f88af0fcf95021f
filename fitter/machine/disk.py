"""How fast this machine reads a model's file from its disk. Bytes per second."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fitter import system
from fitter.storage.files import read_data
from fitter.text import MIB

_BLOCK = 8 * MIB
_LEAST_READ = 64 * MIB
"""Least bytes to read: of less, the disk's own cache has much."""
_MOST_READ = 1024 * MIB
_SECONDS = 0.5
"""Seconds after which enough was read."""


def default_bandwidth() -> tuple[float, str]:
    """Return the bandwidth of a common disk, and its source in words."""
    data = read_data(__file__)
    return float(data["bandwidth"]), str(data["source"])


def read_bandwidth(path: Path) -> float | None:
    """Measure how fast the end of the file at ``path`` is read, without what the system has of it in memory.

    Returns:
        Bytes per second; ``None`` for a file that is too short, sparse, or cannot be read so.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size = min(status.st_size // 2, _MOST_READ)
            if size < _LEAST_READ or system.disk_bytes(os.path.realpath(path)) < status.st_size // 2:
                return None
            begin = status.st_size - size
            if not system.drop_cached(file.fileno(), begin, size):
                return None
            file.seek(begin)
            block, done, started = bytearray(_BLOCK), 0, time.perf_counter()
            while done < size:
                count = file.readinto(block)
                if not count:
                    break
                done += count
                if time.perf_counter() - started > _SECONDS and done >= _LEAST_READ:
                    break
            return done / max(1e-6, time.perf_counter() - started)
    except OSError:
        return None
