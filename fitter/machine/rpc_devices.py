"""Speeds of remote devices: the user's, or measured over the network and stored for a day."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fitter.errors import LlamaCppError, UsageError
from fitter.llama.types import RPC, DeviceInfo, MeasuredSpeed
from fitter.machine import bandwidth, gpu_catalogue
from fitter.machine.speed import REMOTE, DeviceSpeed, speed_of
from fitter.storage import read_json, write_json
from fitter.text import MIB

_SCHEMA = 1
_GB = 10**9

_SECONDS = 0.5
"""Approximate seconds to measure a device."""

_MEMORY = 320 * MIB
"""Bytes to read of its memory: more than the caches of most processors hold."""

_STORED_SECONDS = 24 * 3600.0
"""Seconds after which the address may belong to another machine, or the network may have changed."""

Measure = Callable[[str, int, float], MeasuredSpeed]
"""Measures a device, as ``Worker.speed``: its name, bytes of its memory to read, seconds."""


def parse_bandwidths(given: float | str | Sequence[float | str]) -> tuple[float, ...]:
    """Parse ``900GB/s``, or several such values with commas; return bytes per second. Raises ``UsageError``."""
    values: list[float | str] = [given] if isinstance(given, (str, int, float)) else list(given)
    texts = [text for value in values for text in (value.split(",") if isinstance(value, str) else [f"{value:.0f}"])]
    if not texts:
        raise UsageError("the list of bandwidths of remote devices is empty: give one such as 900GB/s")
    return tuple(map(bandwidth.parse_bandwidth, texts))


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
    stored = _read()
    speeds, fresh = {}, {}
    for index, device in enumerate(remote):
        if device not in devices:
            continue
        key = _key(device, remote[:index])
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
        speeds[device.name] = _speed(device, measured, how, bandwidth_of_user)
    if fresh:
        _write(fresh)
    return speeds


def cache_path() -> Path:
    """Name the file: ``llama-fitter/remote.json`` in the platform's cache directory (``XDG_CACHE_HOME``)."""
    return bandwidth.cache_path().with_name("remote.json")


def _measure_device(device: DeviceInfo, measure: Measure) -> MeasuredSpeed | None:
    try:
        return measure(device.name, min(_MEMORY, device.free // 4), _SECONDS)
    except LlamaCppError:
        return None


def _speed(device: DeviceInfo, measured: MeasuredSpeed | None, how: str, given: float | None) -> DeviceSpeed:
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


def _key(device: DeviceInfo, before: Sequence[DeviceInfo]) -> str:
    """Identify a device by its server, its index there, and its memory."""
    index = sum(other.description == device.description for other in before)
    return f"{device.description}, device {index}, {round(device.total / MIB)} MiB"


def _entries() -> dict[str, tuple[MeasuredSpeed, float]]:
    """Read the entries of the file that are not too old, each with its time."""
    try:
        document = read_json(cache_path())
        if document["schema"] != _SCHEMA:
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


def _read() -> dict[str, MeasuredSpeed]:
    return {key: speed for key, (speed, _) in _entries().items()}


def _write(measured: Mapping[str, MeasuredSpeed]) -> None:
    entries = {**_entries(), **{key: (speed, time.time()) for key, speed in measured.items()}}
    devices = {key: {**asdict(speed), "time": when} for key, (speed, when) in entries.items()}
    # without a place to write, the next process measures again
    with contextlib.suppress(OSError):
        write_json(cache_path(), {"schema": _SCHEMA, "devices": devices})
