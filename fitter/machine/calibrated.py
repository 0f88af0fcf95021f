"""Measurements of ``fitter calibrate`` on this machine's devices, in a file of the user's configuration. Bytes."""

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


def store_path() -> Path:
    """Name the file: ``llama-fitter/calibration.json`` in the configuration directory (``XDG_CONFIG_HOME``)."""
    return config_folder() / "calibration.json"


def read() -> tuple[Calibrated, ...]:
    """Read every stored device; none if the file is missing or damaged."""
    try:
        document = json.loads(store_path().read_text(encoding="utf-8"))
        return tuple(_device(entry) for entry in document["devices"]) if document["schema"] == _SCHEMA else ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def store(measured: Iterable[Calibrated]) -> Path:
    """Add ``measured`` to the file, all or nothing; return the file's path. Raises ``AnswerError``."""
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
    """Return the stored ``outside`` of a device with this name and memory; ``None`` if there is none."""
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
