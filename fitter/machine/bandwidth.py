"""Bandwidths of this machine's memory and of remote devices: the user's, or measured, and stored in the cache."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fitter import system
from fitter.errors import LlamaCppError, UsageError
from fitter.llama.types import RPC, DeviceInfo, MeasuredSpeed
from fitter.machine import gpu_catalogue
from fitter.machine.host import host_memory
from fitter.machine.speed import REMOTE, DeviceSpeed, HostSpeed, default_host, speed_of
from fitter.parameters.values import UNITS, shown
from fitter.storage import cache_folder, read_json, write_json
from fitter.text import MIB

_SCHEMA = 1


_BANDWIDTH = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([a-z]+)\s*/\s*s)?", re.IGNORECASE | re.ASCII)
_LEAST, _MOST = 10**8, 10**14
"""Bytes per second that a figure may say; others are a slip of the unit, or of a damaged file."""

_LEAST_READ = 32 * MIB
"""Least bytes per thread, so that reading takes far longer than starting the threads."""

_CACHES = 3
"""Multiple of the last-level caches to read; in order, so that nothing stays in them."""

_SECONDS = 0.25
"""Least seconds of all passes."""
_PASSES = 5
"""Least number of passes; the fastest counts, because other programs slow some down."""


_REMOTE_SCHEMA = 1
_GB = 10**9

_REMOTE_SECONDS = 0.5
"""Approximate seconds to measure a device."""

_MEMORY = 320 * MIB
"""Bytes to read of its memory: more than the caches of most processors hold."""

_STORED_SECONDS = 24 * 3600.0
"""Seconds after which the address may belong to another machine, or the network may have changed."""

Measure = Callable[[str, int, float], MeasuredSpeed]
"""Measures a device, as ``Worker.speed``: its name, bytes of its memory to read, seconds."""


@dataclass(frozen=True)
class Host:
    """The key of a machine in the cache: processor, cores for this process, bytes of memory."""

    processor: str
    cores: int
    memory: int


def parse_bandwidth(text: str) -> float:
    """Parse ``60GB/s``, ``55.9 GiB/s`` or ``60000000000``; return bytes per second.

    Raises:
        UsageError: It is no bandwidth, or not between 0.1 GB/s and 100 TB/s.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    unit = (match[2] or "b").lower() if match else ""
    if not match or unit not in UNITS:
        raise UsageError(f"{shown(text)} is not a bandwidth: write a number and a unit, such as 60GB/s or 56GiB/s")
    bandwidth = float(match[1]) * UNITS[unit]
    if not _LEAST <= bandwidth <= _MOST:
        limits = "0.1GB/s to 100TB/s, such as 60GB/s"
        raise UsageError(f"{shown(text)} is not a bandwidth that memory can have: give {limits}")
    return bandwidth


def given_speed(text: str) -> HostSpeed:
    """Return the host's speed with the user's bandwidth. Raises ``UsageError``."""
    return HostSpeed(parse_bandwidth(text), "given")


def host_speed(measure: Callable[[int], float] | None = None) -> HostSpeed:
    """Return the memory bandwidth of this machine, with all cores; never raises.

    The first call measures it in half a second and stores it in ``cache_path()``. A damaged file is measured again. A
    machine that cannot be measured gets ``default_host``.

    Args:
        measure: Replaces the measurement: from a number of cores to bytes per second.
    """
    host = this_host()
    if (bandwidth := _read(host)) is not None:
        return HostSpeed(bandwidth, "measured earlier", host.cores)
    try:
        bandwidth = (measure or read_bandwidth)(host.cores)
    except (ImportError, MemoryError, OSError, RuntimeError):
        return replace(default_host(), threads=host.cores)
    if not _LEAST <= bandwidth <= _MOST:
        return replace(default_host(), threads=host.cores)
    _write(host, bandwidth)
    return HostSpeed(bandwidth, "measured", host.cores)


def cache_path() -> Path:
    """Name the file: ``llama-fitter/bandwidth.json`` in the platform's cache directory (``XDG_CACHE_HOME``)."""
    return cache_folder() / "bandwidth.json"


def this_host() -> Host:
    """Describe this machine, or this process's container."""
    usable = system.processors()
    cores = min(usable, _physical_cores() or usable)
    return Host(_processor(), cores, host_memory().total)


def read_bandwidth(cores: int) -> float:
    """Measure the bytes per second that ``cores`` threads read together: the best of a few passes.

    Raises:
        ImportError: numpy is missing.
        MemoryError: There is not enough memory.
    """
    # Its reductions read at full speed and release the interpreter's lock; imported here, since that is slow.
    import numpy

    size = buffer_bytes(cores, cache_bytes(), host_memory().available)
    buffers = [numpy.empty(size // 4, dtype=numpy.float32) for _ in range(cores)]
    # untouched pages are one page of zeros, which would stay in the cache
    _together(cores, lambda thread: buffers[thread].fill(1))
    best, passes, start = math.inf, 0, time.perf_counter()
    while passes < _PASSES or time.perf_counter() - start < _SECONDS:
        best = min(best, _together(cores, lambda thread: buffers[thread].max()))
        passes += 1
    return cores * size / best


def buffer_bytes(cores: int, caches: int, available: int) -> int:
    """Return the bytes that each thread reads: more than ``caches``, at most an eighth of the available memory.

    Whole pages of 4 KiB, at least one.
    """
    wanted = max(_LEAST_READ, _CACHES * caches // cores)
    return max(4096, min(wanted, available // 8 // cores) // 4096 * 4096)


def _together(count: int, work: Callable[[int], object]) -> float:
    """Return the seconds from the first thread's start to the last one's end."""
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


def cache_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the last-level caches; a large desktop machine's if unknown."""
    caches: dict[str, int] = {}
    for index in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "3":
                size = (index / "size").read_text().strip()
                caches[(index / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * 1024
    return sum(caches.values()) or 32 * MIB


def _physical_cores(root: Path = Path("/")) -> int:
    """Return the number of physical cores; 0 if unknown."""
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
    # not Linux, or an architecture whose /proc does not tell; imported here, since that is slow
    import psutil

    with contextlib.suppress(OSError):
        return psutil.cpu_count(logical=False) or 0
    return 0


def _processor(root: Path = Path("/")) -> str:
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return system.processor()


# --- the file


def key_of(host: Host) -> str:
    """Return the key of a host in the file."""
    return f"{host.processor}, {host.cores} cores, {round(host.memory / 2**30)} GiB"


def _entries() -> dict[str, float]:
    try:
        document = read_json(cache_path())
        if document["schema"] != _SCHEMA:
            return {}
        return {str(key): float(value) for key, value in document["hosts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _read(host: Host) -> float | None:
    bandwidth = _entries().get(key_of(host))
    return bandwidth if bandwidth is not None and _LEAST <= bandwidth <= _MOST else None


def _write(host: Host, bandwidth: float) -> None:
    # without a place to write, the next process measures again
    with contextlib.suppress(OSError):
        write_json(cache_path(), {"schema": _SCHEMA, "hosts": {**_entries(), key_of(host): bandwidth}})


def parse_bandwidths(given: float | str | Sequence[float | str]) -> tuple[float, ...]:
    """Parse ``900GB/s``, or several such values with commas; return bytes per second. Raises ``UsageError``."""
    values: list[float | str] = [given] if isinstance(given, (str, int, float)) else list(given)
    texts = [text for value in values for text in (value.split(",") if isinstance(value, str) else [f"{value:.0f}"])]
    if not texts:
        raise UsageError("the list of bandwidths of remote devices is empty: give one such as 900GB/s")
    return tuple(map(parse_bandwidth, texts))


def remote_speeds(
    devices: Sequence[DeviceInfo], every: Sequence[DeviceInfo], measure: Measure, given: Sequence[float] = ()
) -> dict[str, DeviceSpeed]:
    """Return the speeds of the remote devices among ``devices``, by name.

    A device that cannot be measured gets a default, and its ``source`` says so.

    Args:
        devices: The devices.
        every: All devices of the machine.
        measure: Measures a device.
        given: The user's bandwidths in place of measured ones: one for all remote devices, or one for each in
            ``every``.

    Raises:
        UsageError: The number of bandwidths is wrong.
        RemoteError: A server was lost.
    """
    remote = [device for device in every if device.backend == RPC]
    if len(given) not in (0, 1, len(remote)):
        raise UsageError(
            f"--rpc-bandwidth has {len(given)} values, but there are {len(remote)} remote devices: "
            "give one for all, or one for each"
        )
    stored = _read_remote()
    speeds, fresh = {}, {}
    for index, device in enumerate(remote):
        if device not in devices:
            continue
        key = _remote_key(device, remote[:index])
        measured, how = stored.get(key), "measured earlier"
        if measured is None:
            measured, how = _measure_device(device, measure), "measured"
            if measured is not None and not measured.link > 0:
                # a busy machine answers late
                measured = _measure_device(device, measure) or measured
            if measured is not None and measured.bandwidth > 0 and measured.link > 0:
                # a result of 0, for example with full memory, may be another next time
                fresh[key] = measured
        bandwidth_of_user = given[index if len(given) > 1 else 0] if given else None
        speeds[device.name] = _remote_speed(device, measured, how, bandwidth_of_user)
    if fresh:
        _write_remote(fresh)
    return speeds


def remote_cache_path() -> Path:
    """Name the file: ``llama-fitter/remote.json`` in the platform's cache directory (``XDG_CACHE_HOME``)."""
    return cache_path().with_name("remote.json")


def _measure_device(device: DeviceInfo, measure: Measure) -> MeasuredSpeed | None:
    try:
        return measure(device.name, min(_MEMORY, device.free // 4), _REMOTE_SECONDS)
    except LlamaCppError:
        return None


def _remote_speed(device: DeviceInfo, measured: MeasuredSpeed | None, how: str, given: float | None) -> DeviceSpeed:
    """Combine the user's and the measured figures with defaults for the others."""
    default = speed_of(device)
    assumed = gpu_catalogue.default()
    reached = given or (measured.bandwidth if measured else 0.0)
    is_known = reached > 0
    source = "given" if given else how
    if not is_known:
        reached, source = default.bandwidth, default.source
    compute = measured.compute if measured else 0.0
    if compute <= 0:
        # the ratio of compute to bandwidth differs little between devices
        compute = reached * default.compute / default.bandwidth
        source += "; compute estimated from its bandwidth" if is_known else ""
    link, round_trip = (measured.link, measured.round_trip) if measured else (0.0, 0.0)
    network = "network"
    if link <= 0 or round_trip <= 0:
        link, round_trip, network = assumed.remote_link, assumed.remote_round_trip, "assumed network"
    return DeviceSpeed(
        reached,
        compute,
        link,
        REMOTE,
        "",
        f"{source}; reads {_short(reached / _GB)} GB/s; {network}: {_short(link / _GB)} GB/s, "
        f"{_short(round_trip * 1000)} ms round trip",
        is_known,
        round_trip,
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


# --- the file


def _remote_key(device: DeviceInfo, before: Sequence[DeviceInfo]) -> str:
    """Identify a device by its server, its index there, and its memory."""
    index = sum(other.description == device.description for other in before)
    return f"{device.description}, device {index}, {round(device.total / MIB)} MiB"


def _remote_entries() -> dict[str, tuple[MeasuredSpeed, float]]:
    """Read the entries of the file that are not too old, each with its time."""
    try:
        document = read_json(remote_cache_path())
        if document["schema"] != _REMOTE_SCHEMA:
            return {}
        entries = {}
        for key, entry in document["devices"].items():
            figures = {name: float(entry[name]) for name in MeasuredSpeed.__dataclass_fields__}
            when = float(entry["time"])
            if 0 <= time.time() - when < _STORED_SECONDS and all(map(_is_speed, figures.values())):
                entries[str(key)] = MeasuredSpeed(**figures), when
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _is_speed(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _read_remote() -> dict[str, MeasuredSpeed]:
    return {key: speed for key, (speed, _) in _remote_entries().items()}


def _write_remote(measured: Mapping[str, MeasuredSpeed]) -> None:
    entries = {**_remote_entries(), **{key: (speed, time.time()) for key, speed in measured.items()}}
    devices = {key: {**asdict(speed), "time": when} for key, (speed, when) in entries.items()}
    # without a place to write, the next process measures again
    with contextlib.suppress(OSError):
        write_json(remote_cache_path(), {"schema": _REMOTE_SCHEMA, "devices": devices})
