"""What ``fitter calibrate`` measured on this machine's devices, in a file in the user's configuration. Bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fitter.errors import AnswerError
from fitter.llama.types import DeviceInfo
from fitter.storage.files import write_json
from fitter.storage.folders import config_folder

_SCHEMA = 1


@dataclass(frozen=True)
class Calibrated:
    """One device.

    ``outside``: bytes that a loaded model takes beyond ``context`` and beyond llama.cpp's own count. ``context``: bytes
    that a process takes just by using the device, ``None`` if the device does not tell. It needs no margin, since a fit
    sees the memory that is free without it.
    """

    backend: str
    description: str
    total: int
    outside: int
    context: int | None = None


def store_path() -> Path:
    """The file: ``llama-fitter/calibration.json`` in the platform's configuration directory (``XDG_CONFIG_HOME``)."""
    return config_folder() / "calibration.json"


def read() -> tuple[Calibrated, ...]:
    """Every stored device; none if there is no file, or if it cannot be read."""
    try:
        document = json.loads(store_path().read_text(encoding="utf-8"))
        return tuple(_device(entry) for entry in document["devices"]) if document["schema"] == _SCHEMA else ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def store(measured: Iterable[Calibrated]) -> Path:
    """Store ``measured`` in addition to other devices, all of it or nothing; returns the file's path.

    Raises ``AnswerError`` if it cannot be written.
    """
    devices = {_key(device): device for device in (*read(), *measured)}
    document = {"schema": _SCHEMA, "devices": [asdict(device) for device in devices.values()]}
    path = store_path()
    try:
        write_json(path, document)
    except OSError as error:
        raise AnswerError(
            f"{path} cannot be written ({error.strerror}): set XDG_CONFIG_HOME, or add --no-store"
        ) from error
    return path


def outside_of(device: DeviceInfo, stored: Iterable[Calibrated]) -> int | None:
    """The stored ``outside`` for a device of the same kind and memory as ``device``, ``None`` if there is none."""
    if device.virtual:
        return None
    key = (device.backend, device.description, device.total)
    return next((entry.outside for entry in stored if _key(entry) == key), None)


def _key(device: Calibrated) -> tuple[str, str, int]:
    return device.backend, device.description, device.total


def _device(entry: dict[str, Any]) -> Calibrated:
    device = Calibrated(entry["backend"], entry["description"], entry["total"], entry["outside"], entry["context"])
    texts, sizes = (device.backend, device.description), (device.total, device.outside, device.context or 0)
    if not (all(isinstance(text, str) for text in texts) and all(isinstance(n, int) and n >= 0 for n in sizes)):
        raise ValueError(device)
    return device
