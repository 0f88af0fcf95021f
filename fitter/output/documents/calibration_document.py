"""The document of ``fitter calibrate --json``."""

from __future__ import annotations

from fitter.llama.types import VirtualDevice
from fitter.machine.gpu_catalogue import capability_text
from fitter.output.documents.document import Key, document
from fitter.planning.checked.calibration import Calibration, Comparison, DeviceCalibration, Difference

CAPABILITY = Key(
    "compute_capability",
    change=lambda number: capability_text(number) if number else None,
    hint=str | None,
    about="Such as 8.9 or gfx1100.",
)

CALIBRATION = document(
    Calibration,
    Key("exact", "is_exact"),
    Key(
        "devices",
        of=document(
            DeviceCalibration,
            *(Key(name, f"info.{name}") for name in ("name", "description", "backend", "total", "free")),
            Key("twin", of=document(VirtualDevice, Key("profile", about="How the twin behaves."), CAPABILITY)),
            *("context", "outside", "margin"),
        ),
    ),
    Key(
        "comparisons",
        of=document(
            Comparison,
            *("devices", "between", "loads"),
            Key("differences", of=document(Difference, "model", "configuration", "what", "real", "other")),
        ),
    ),
    "stored",
    title="A calibration",
)
