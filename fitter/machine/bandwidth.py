"""How fast this machine reads its memory: measured once and kept in the user's cache directory, or given."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.errors import UsageError
from fitter.machine.host import host_memory
from fitter.machine.speed import HostSpeed, default_host
from fitter.values import UNITS

_SCHEMA = 1

_MIB = 2**20

_BANDWIDTH = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([a-z]+)\s*/\s*s)?", re.IGNORECASE | re.ASCII)
_LEAST, _MOST = 10**8, 10**14

_LEAST_READ = 32 * _MIB
"""Bytes that every thread reads at least: reading must take far longer than starting threads does."""

_CACHES = 3
"""How much more is read than the last level of caches holds; read in order again and again, none of it stays there."""

_SECONDS = 0.25
_PASSES = 5
"""Other programs slow some passes down; the best one counts, and is kept for long."""


@dataclass(frozen=True)
class Host:
    """What a measurement holds for: the processor's name, cores that this process may use, bytes of memory."""

    processor: str
    cores: int
    memory: int


def parse_bandwidth(text: str) -> float:
    """Bytes per second of ``60GB/s``, ``55.9 GiB/s`` or ``60000000000``.

    Raises ``UsageError`` where it is none, or none that the memory of a machine can have: 0.1 GB/s to 100 TB/s.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    unit = (match[2] or "b").lower() if match else ""
    if not match or unit not in UNITS:
        raise UsageError(f"{text!r} is not a bandwidth: write a number and a unit, such as 60GB/s or 56GiB/s")
    bandwidth = float(match[1]) * UNITS[unit]
    if not _LEAST <= bandwidth <= _MOST:
        raise UsageError(f"{text!r} is not a bandwidth that memory can have: write one such as 60GB/s")
    return bandwidth


def given(text: str) -> HostSpeed:
    """The host's speed as the user says it. Raises ``UsageError``, see ``parse_bandwidth``."""
    return HostSpeed(parse_bandwidth(text), "given")


def host_speed(measure: Callable[[int], float] | None = None) -> HostSpeed:
    """What this machine reads from its memory, all cores together.

    The first call measures that, in about half a second, and keeps it for this machine in ``cache_path()``; where the
    file cannot be read it is measured again, and where it cannot be written, every time. Never raises: a machine that
    cannot be measured has ``default_host``'s. ``measure`` takes the number of cores and returns bytes per second.
    """
    host = this_host()
    if (bandwidth := _read(host)) is not None:
        return HostSpeed(bandwidth, "measured, kept since", host.cores)
    try:
        bandwidth = (measure or read_bandwidth)(host.cores)
    except (ImportError, MemoryError, OSError, RuntimeError):
        return replace(default_host(), threads=host.cores)
    if not _LEAST <= bandwidth <= _MOST:
        return replace(default_host(), threads=host.cores)
    _write(host, bandwidth)
    return HostSpeed(bandwidth, "measured", host.cores)


def cache_path() -> Path:
    """The file: ``llama-fitter/bandwidth.json`` where the platform keeps caches (``XDG_CACHE_HOME``)."""
    from platformdirs import user_cache_path

    return user_cache_path("llama-fitter", appauthor=False) / "bandwidth.json"


def this_host() -> Host:
    """This machine, or the container that this process runs in."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(usable, _physical_cores() or usable)
    return Host(_processor(), cores, host_memory().total)


def read_bandwidth(cores: int) -> float:
    """Bytes per second that ``cores`` threads read together, the best of a few passes over more than caches hold.

    Raises ``ImportError`` where there is no numpy (llama-cpp-python needs it, so there is), ``MemoryError`` where there
    is no memory to read.
    """
    # Its reductions read as fast as memory is and leave the interpreter's lock; imported here, for it takes a while.
    import numpy

    size = buffer_bytes(cores, _cache_bytes(), host_memory().available)
    buffers = [numpy.empty(size // 4, dtype=numpy.float32) for _ in range(cores)]
    # Untouched pages are all one page of zeros, which is in the cache.
    _together(cores, lambda thread: buffers[thread].fill(1))
    best, passes, start = math.inf, 0, time.perf_counter()
    while passes < _PASSES or time.perf_counter() - start < _SECONDS:
        best = min(best, _together(cores, lambda thread: buffers[thread].max()))
        passes += 1
    return cores * size / best


def buffer_bytes(cores: int, caches: int, available: int) -> int:
    """Bytes for each of ``cores`` threads to read: more than ``caches`` hold, an eighth of what is available at most.

    Whole pages of 4 KiB; never none.
    """
    wanted = max(_LEAST_READ, _CACHES * caches // cores)
    return max(4096, min(wanted, available // 8 // cores) // 4096 * 4096)


def _together(count: int, work: Callable[[int], object]) -> float:
    """Seconds that ``count`` threads take to do ``work``, from the first that begins to the last that ends."""
    barrier = threading.Barrier(count)
    begun, ended = [0.0] * count, [math.inf] * count

    def run(thread: int) -> None:
        barrier.wait()
        begun[thread] = time.perf_counter()
        with contextlib.suppress(MemoryError):
            work(thread)
            ended[thread] = time.perf_counter()

    threads = [threading.Thread(target=run, args=(thread,), daemon=True) for thread in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if math.inf in ended:
        raise MemoryError
    return max(ended) - min(begun)


def _cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of the processors' last level caches; what a large desktop has where nothing says it."""
    caches: dict[str, int] = {}
    for index in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "3":
                size = (index / "size").read_text().strip()
                caches[(index / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * 1024
    return sum(caches.values()) or 32 * _MIB


def _physical_cores(root: Path = Path("/")) -> int:
    """Cores of this machine, two threads of one counted once; 0 where nothing says it."""
    cores, package = set(), ""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "physical id":
                package = value.strip()
            elif key.strip() == "core id":
                cores.add((package, value.strip()))
    if cores:
        return len(cores)
    # not Linux, or an architecture whose /proc does not tell; imported here, for it takes a while
    import psutil

    return psutil.cpu_count(logical=False) or 0


def _processor(root: Path = Path("/")) -> str:
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


# --- the file


def _key(host: Host) -> str:
    return f"{host.processor}, {host.cores} cores, {round(host.memory / 2**30)} GiB"


def _entries() -> dict[str, float]:
    try:
        document = json.loads(cache_path().read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            return {}
        return {str(key): float(value) for key, value in document["hosts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _read(host: Host) -> float | None:
    bandwidth = _entries().get(_key(host))
    return bandwidth if bandwidth is not None and _LEAST <= bandwidth <= _MOST else None


def _write(host: Host, bandwidth: float) -> None:
    keep(cache_path(), {"schema": _SCHEMA, "hosts": {**_entries(), _key(host): bandwidth}})


def keep(path: Path, document: object) -> None:
    """Write a file of JSON: all or nothing, and nothing where it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
