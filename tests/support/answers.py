"""Answers made by hand that are not plans, and a terminal to print on."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fitter.llama.types import Array, DeviceInfo, Row, VirtualDevice
from fitter.planning.checked.calibration import Calibration, Comparison, DeviceCalibration, Difference
from fitter.planning.plan.layer_map import Inspection, LayerSize, RoleSize
from fitter.planning.plan.plan import ModelSummary
from tests.support.plans import GIB, MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


CARD = DeviceInfo("CUDA0", "Card", "gpu", "CUDA", 8 * GIB, 7 * GIB, buffer_type="CUDA0")
CALIBRATION = Calibration(
    devices=(
        DeviceCalibration(CARD, VirtualDevice("CUDA0", "Card", "cuda", 890, 8 * GIB, 7 * GIB), 400 * MIB, 600 * MIB),
        DeviceCalibration(replace(CARD, name="RPC0", backend="RPC"), None, None, None),
    ),
    comparisons=(
        Comparison(
            ("CUDA0",),
            "twin",
            96,
            (
                Difference("dense", "defaults", "CUDA0 compute", 5, 3),
                Difference("dense", "defaults", "CUDA_Host model", 5, 7),
                Difference("dense", "long", "load", "loads", "no memory"),
            ),
        ),
        Comparison(("CUDA0",), "real load", 1, ()),
    ),
    stored=Path("kept.json"),
)


INSPECTION = Inspection(
    model=ModelSummary("m.gguf", "M", "llama", 3 * MIB),
    metadata=MappingProxyType({"general.name": "M", "a.list": Array("i32", 2, (1, 2)), "tokens": Array("str", 9)}),
    roles=(RoleSize("attention", 2, 2 * MIB), RoleSize("output", 1, MIB)),
    layers=(
        LayerSize(None, (RoleSize("output", 1, MIB),), 0),
        LayerSize(0, (RoleSize("attention", 2, 2 * MIB),), 5 * MIB),
    ),
    n_ctx=4096,
    rows=(Row("CPU", None, True, 3 * MIB, 5 * MIB, 7 * MIB),),
)
