"""How fast a remote device is: measured over the network and kept for a day, or given."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fitter.errors import LlamaCppError, UsageError
from fitter.llama.types import RPC, DeviceInfo, MeasuredSpeed
from fitter.machine import bandwidth, catalogue
from fitter.machine.speed import REMOTE, DeviceSpeed, speed_of

_SCHEMA = 1
_MIB = 2**20
_GB = 10**9

_SECONDS = 0.5
"""What measuring a device may take."""

_MEMORY = 320 * _MIB
"""Bytes of it that are read: more than a cache holds, of most processors."""

_KEPT_SECONDS = 24 * 3600.0
"""After that another machine may have the address, or another cable."""

Measure = Callable[[str, int, float], MeasuredSpeed]
"""Measures the device of a name in so many bytes of its memory and about so many seconds, as ``Worker.speed`` does."""


def parse_bandwidths(given: float | str | Sequence[float | str]) -> tuple[float, ...]:
    """Bytes per second of ``900GB/s``, or of several with commas between them. Raises ``UsageError``."""
    values: list[float | str] = [given] if isinstance(given, (str, int, float)) else list(given)
    texts = [text for value in values for text in (value.split(",") if isinstance(value, str) else [f"{value:.0f}"])]
    if not texts:
        raise UsageError("no bandwidth of remote devices is given: write one such as 900GB/s")
    return tuple(map(bandwidth.parse_bandwidth, texts))


def remote_speeds(
    devices: Sequence[DeviceInfo], every: Sequence[DeviceInfo], measure: Measure, given: Sequence[float] = ()
) -> dict[str, DeviceSpeed]:
    """The speed of those of ``devices`` that are remote, by name; ``every`` device of their servers is known as well.

    ``given`` has a bandwidth for all, or one for each of ``every`` that is remote, in place of what is measured. What
    cannot be measured has a default that its ``source`` states. Raises ``UsageError`` for another number of bandwidths,
    and what ``measure`` raises where the server is lost.
    """
    remote = [device for device in every if device.backend == RPC]
    if len(given) not in (0, 1, len(remote)):
        raise UsageError(
            f"--rpc-bandwidth has {len(given)} values, and there are {len(remote)} remote devices: "
            "give one for all, or one for each"
        )
    known = _read()
    speeds, fresh = {}, {}
    for index, device in enumerate(remote):
        if device not in devices:
            continue
        key = _key(device, remote[:index])
        measured, how = known.get(key), "measured, kept since"
        if measured is None:
            measured, how = _measured(device, measure), "measured"
            if measured is not None:
                fresh[key] = measured
        own = given[index if len(given) > 1 else 0] if given else None
        speeds[device.name] = _speed(device, measured, how, own)
    if fresh:
        _write(fresh)
    return speeds


def cache_path() -> Path:
    """The file: ``llama-fitter/remote.json`` where the platform keeps caches (``XDG_CACHE_HOME``)."""
    return bandwidth.cache_path().with_name("remote.json")


def _measured(device: DeviceInfo, measure: Measure) -> MeasuredSpeed | None:
    try:
        return measure(device.name, min(_MEMORY, device.free // 4), _SECONDS)
    except LlamaCppError:
        return None


def _speed(device: DeviceInfo, measured: MeasuredSpeed | None, how: str, given: float | None) -> DeviceSpeed:
    """What is known of a device, with what a default has in place of the rest."""
    default = speed_of(device)
    assumed = catalogue.default()
    reached = given or (measured.bandwidth if measured else 0.0)
    known = reached > 0
    said = "given" if given else how
    if not known:
        reached, said = default.bandwidth, default.source
    compute = measured.compute if measured else 0.0
    if compute <= 0:
        # no device is known that computes much more, or less, for what it reads
        compute = reached * default.compute / default.bandwidth
        said += "; compute estimated from its bandwidth" if known else ""
    link, round_trip = (measured.link, measured.round_trip) if measured else (0.0, 0.0)
    network = "network"
    if link <= 0 or round_trip <= 0:
        link, round_trip, network = assumed.remote_link, assumed.remote_round_trip, "network by default"
    return DeviceSpeed(
        reached,
        compute,
        link,
        REMOTE,
        "",
        f"{said}; reads {_short(reached / _GB)} GB/s; {network}: {_short(link / _GB)} GB/s, "
        f"{_short(round_trip * 1000)} ms there and back",
        known,
        round_trip,
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


# --- what is kept


def _key(device: DeviceInfo, before: Sequence[DeviceInfo]) -> str:
    """The server, which of its devices it is, and how large."""
    index = sum(other.description == device.description for other in before)
    return f"{device.description}, device {index}, {round(device.total / _MIB)} MiB"


def _entries() -> dict[str, tuple[MeasuredSpeed, float]]:
    """What is in the file and not too old, with the time of each."""
    try:
        document = json.loads(cache_path().read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            return {}
        entries = {}
        for key, entry in document["devices"].items():
            figures = {name: float(entry[name]) for name in MeasuredSpeed.__dataclass_fields__}
            when = float(entry["time"])
            if 0 <= time.time() - when < _KEPT_SECONDS and all(map(_is_speed, figures.values())):
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
    bandwidth.keep(cache_path(), {"schema": _SCHEMA, "devices": devices})
