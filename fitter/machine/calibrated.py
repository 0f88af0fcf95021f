"""What ``fitter calibrate`` measured on this machine's devices, kept in a file of the user's. Bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fitter.errors import AnswerError
from fitter.llama.types import DeviceInfo

_SCHEMA = 1


@dataclass(frozen=True)
class Calibrated:
    """One device. ``outside`` is what a loaded model takes beyond what llama.cpp counts and what was free before.

    ``context`` is what a process takes by using the device at all, ``None`` where the device cannot tell: it is gone
    from what a fit finds free, so it needs no margin.
    """

    backend: str
    description: str
    total: int
    outside: int
    context: int | None = None


def store_path() -> Path:
    """The file: ``llama-fitter/calibration.json`` where the platform keeps configuration (``XDG_CONFIG_HOME``)."""
    from platformdirs import user_config_path

    return user_config_path("llama-fitter", appauthor=False) / "calibration.json"


def read() -> tuple[Calibrated, ...]:
    """Every device that is stored; none where there is no file, or none that can be read."""
    try:
        document = json.loads(store_path().read_text(encoding="utf-8"))
        return tuple(_device(entry) for entry in document["devices"]) if document["schema"] == _SCHEMA else ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def store(measured: Iterable[Calibrated]) -> Path:
    """Keep ``measured`` beside what is stored of other devices, all or nothing; returns the file's path.

    Raises ``AnswerError`` where it cannot be written.
    """
    kept = {_key(device): device for device in (*read(), *measured)}
    document = {"schema": _SCHEMA, "devices": [asdict(device) for device in kept.values()]}
    path = store_path()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise AnswerError(
            f"{path} cannot be written ({error.strerror}): set XDG_CONFIG_HOME, or add --no-store"
        ) from error
    return path


def outside_of(device: DeviceInfo, known: Iterable[Calibrated]) -> int | None:
    """What was measured for ``device``, ``None`` where nothing was: for a device of this kind, of the same memory."""
    if device.virtual:
        return None
    key = (device.backend, device.description, device.total)
    return next((entry.outside for entry in known if _key(entry) == key), None)


def _key(device: Calibrated) -> tuple[str, str, int]:
    return device.backend, device.description, device.total


def _device(entry: dict[str, Any]) -> Calibrated:
    device = Calibrated(entry["backend"], entry["description"], entry["total"], entry["outside"], entry["context"])
    if not isinstance(device.outside, int) or device.outside < 0:
        raise ValueError(device.outside)
    return device
