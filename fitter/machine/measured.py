"""What ``fitter calibrate`` and ``fitter tune`` measured on this machine, in files of the user's configuration.

``calibrate`` measures bytes of devices. A row of ``tune`` has a run's seconds beside those that the cost model gives to
each part at each place: the host, and each device. Factors of the parts make the estimates of all rows the measured
ones, as nearly as possible.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fitter.errors import AnswerError
from fitter.llama.processes import wire
from fitter.llama.types import DeviceInfo
from fitter.machine.speed import DeviceSpeed, Factor, Factors, HostSpeed
from fitter.storage import config_folder, read_json, write_json

_SCHEMA = 1


@dataclass(frozen=True)
class Calibrated:
    """The measurement of one device.

    Attributes:
        backend: Its backend.
        description: The driver's name for it.
        total: Its memory.
        outside: Bytes of a loaded model beyond ``context`` and beyond llama.cpp's count.
        context: Bytes that a process takes by using the device; ``None`` if the device does not tell. They need no
            margin, since free memory does not include them.
    """

    backend: str
    description: str
    total: int
    outside: int
    context: int | None = None


def calibrated_path() -> Path:
    """Name the file: ``llama-fitter/calibration.json`` in the configuration directory (``XDG_CONFIG_HOME``)."""
    return config_folder() / "calibration.json"


def read_calibrated() -> tuple[Calibrated, ...]:
    """Read every stored device; none if the file is missing or damaged."""
    try:
        document = json.loads(calibrated_path().read_text(encoding="utf-8"))
        devices: tuple[Calibrated, ...] = wire.decode(tuple[Calibrated, ...], document["devices"])
        are_possible = all(min(each.total, each.outside, each.context or 0) >= 0 for each in devices)
        return devices if document["schema"] == _SCHEMA and are_possible else ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def store_calibrated(measured: Iterable[Calibrated]) -> Path:
    """Add ``measured`` to the file, all or nothing; return the file's path. Raises ``AnswerError``."""
    devices = {_key(device): device for device in (*read_calibrated(), *measured)}
    document = {"schema": _SCHEMA, "devices": [asdict(device) for device in devices.values()]}
    return _stored(calibrated_path(), document)


def outside_of(device: DeviceInfo, stored: Iterable[Calibrated]) -> int | None:
    """Return the stored ``outside`` of a device with this name and memory; ``None`` if there is none."""
    if device.virtual:
        return None
    key = (device.backend, device.description, device.total)
    return next((entry.outside for entry in stored if _key(entry) == key), None)


def _key(device: Calibrated) -> tuple[str, str, int]:
    return device.backend, device.description, device.total


def _stored(path: Path, document: object) -> Path:
    """Write a file, and return its path. Raises ``AnswerError``."""
    try:
        write_json(path, document)
    except OSError as error:
        raise AnswerError(
            f"{path} cannot be written ({error.strerror}): set XDG_CONFIG_HOME, or add --no-store"
        ) from error
    return path


HOST = "host"
"""The place of what the host computes."""
TUNED = ", tuned"
"""End of the source of a speed that was tuned."""
PART = ": "
"""Between place and part; what has no place, such as graph splits, has none."""

_MOST_ROWS = 200
"""Rows that are kept: the newest."""

_ROUNDS = 200
"""Steps until the factors stand still."""

_MOST = 20.0
"""The largest factor; its inverse is the smallest. Beyond, it was not the same thing that was measured."""


@dataclass(frozen=True)
class Tuned:
    """A run that was measured.

    Attributes:
        machine: The host, as ``bandwidth.key_of`` names it.
        llama_cpp: The key of the build.
        model: The model's name.
        arguments: The arguments of llama-server.
        users: Users at once.
        parts: For each part of the estimate, such as ``host: weights``, seconds of a prompt's token and of a step.
        prompt: Measured seconds of a prompt's token.
        step: Measured seconds of a step that makes a token for each user.
        turn: Measured seconds of a turn.
    """

    machine: str
    llama_cpp: str
    model: str
    arguments: tuple[str, ...]
    users: int
    parts: tuple[tuple[str, float, float], ...]
    prompt: float
    step: float
    turn: float


def tuned_path() -> Path:
    """Name the file: ``llama-fitter/tuned.json`` in the configuration directory (``XDG_CONFIG_HOME``)."""
    return config_folder() / "tuned.json"


def read_tuned(path: Path | None = None) -> tuple[Tuned, ...]:
    """Read the rows of a file, by default this machine's; none if it is missing or damaged."""
    try:
        return tuned_rows(read_json(path or tuned_path()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def tuned_rows(document: Any) -> tuple[Tuned, ...]:
    """Check a document of rows. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    if document["schema"] != _SCHEMA:
        raise ValueError("unknown schema")
    rows: tuple[Tuned, ...] = wire.decode(tuple[Tuned, ...], document["runs"])
    for row in rows:
        seconds = (row.prompt, row.step, row.turn, *(each for _, *both in row.parts for each in both))
        if not (row.prompt and row.step and all(0 <= each < math.inf for each in seconds)):
            raise ValueError(row)
    return rows


def tuned_document(rows: Iterable[Tuned]) -> dict[str, Any]:
    """Return rows as a document, which ``tuned_rows`` reads."""
    return {"schema": _SCHEMA, "runs": [asdict(row) for row in rows]}


def store_tuned(rows: Iterable[Tuned], path: Path | None = None) -> Path:
    """Add ``rows`` to a file, all or nothing; a run with the same arguments replaces the earlier one.

    Returns:
        The file's path, by default that of this machine.

    Raises:
        AnswerError: It cannot be written.
    """
    path = path or tuned_path()
    kept = {
        (row.machine, row.llama_cpp, row.model, row.arguments, row.users): row for row in (*read_tuned(path), *rows)
    }
    return _stored(path, tuned_document(list(kept.values())[-_MOST_ROWS:]))


def factors_of(rows: Sequence[Tuned], machine: str, llama_cpp: str) -> dict[str, Factor]:
    """Compute the factor of each part from the rows of a machine and a build; none without such rows.

    Each step multiplies a part's factor by the mean of measured by estimated, weighted with the part's share of each
    row (Richardson and Lucy's iteration). What belongs to no place keeps its estimate.
    """
    mine = [row for row in rows if (row.machine, row.llama_cpp) == (machine, llama_cpp)]
    kinds = [
        _fitted([({name: each[kind] for name, *each in row.parts}, (row.prompt, row.step)[kind]) for row in mine])
        for kind in (0, 1)
    ]
    return {name: Factor(kinds[0].get(name, 1.0), kinds[1].get(name, 1.0)) for name in {**kinds[0], **kinds[1]}}


def of_place(factors: Mapping[str, Factor], place: str) -> Factors | None:
    """Return the factors of one place; ``None`` without any."""
    found = {part: factors[name] for part in Factors._fields if (name := f"{place}{PART}{part}") in factors}
    return Factors(**found) if found else None


def factors_of_here(rows: Sequence[Tuned], llama_cpp: str) -> dict[str, Factor]:
    """Compute the factors of this machine's parts, as ``factors_of`` does."""
    if not rows:
        return {}
    from fitter.machine.bandwidth import key_of, this_host

    return factors_of(rows, key_of(this_host()), llama_cpp)


def corrected(
    speeds: Mapping[str, DeviceSpeed], host: HostSpeed, devices: Iterable[DeviceInfo], llama_cpp: str
) -> tuple[dict[str, DeviceSpeed], HostSpeed]:
    """Correct the speeds of this machine's devices, by name, and of its host by what was measured with a build."""
    factors = factors_of_here(read_tuned(), llama_cpp)
    places = {device.name: place_of(device.name, device.description) for device in devices}
    found = dict(speeds)
    for name, speed in speeds.items():
        if of_device := of_place(factors, places.get(name, "")):
            found[name] = replace(speed, factors=of_device, source=f"{speed.source}{TUNED}", known=True)
    if of_host := of_place(factors, HOST):
        host = replace(host, factors=of_host, source=f"{host.source}{TUNED}", known=True)
    return found, host


def _fitted(rows: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    shares = [({name: seconds / measured for name, seconds in parts.items()}) for parts, measured in rows]
    factors = {name: 1.0 for row in shares for name, share in row.items() if PART in name and share > 0}
    for _ in range(_ROUNDS):
        ratios = [1 / max(1e-9, sum(share * factors.get(name, 1.0) for name, share in row.items())) for row in shares]
        for name in factors:
            weights = [row.get(name, 0.0) for row in shares]
            mean = sum(weight * ratio for weight, ratio in zip(weights, ratios, strict=True)) / sum(weights)
            factors[name] = min(_MOST, max(1 / _MOST, factors[name] * mean))
    return factors


def place_of(name: str, description: str) -> str:
    """Name the place of a device by its name in llama.cpp without the number, and the driver's; equal ones are one."""
    return f"{name.rstrip('0123456789')} {description}"
