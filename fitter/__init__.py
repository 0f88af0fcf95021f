"""Finds the llama.cpp parameters that run a GGUF model fastest inside every device's memory margin."""

from __future__ import annotations

from fitter.errors import (
    AnswerError,
    CancelledError,
    FitterError,
    LibraryError,
    LlamaCppCrashError,
    LlamaCppError,
    ModelError,
    OutOfMemoryError,
    PlanError,
    PlanWarning,
    RemoteError,
    TimeLimitError,
    UsageError,
    WorkerError,
)
from fitter.version import VERSION

# typing's own would cost more than all the rest of this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fitter.api import Plan, calibrate, devices, estimate, fit, inspect, measure, verify
    from fitter.comparing import OnBuild, compare_builds
    from fitter.exploring import explore
    from fitter.fitted import Llama
    from fitter.llama.types import (
        Array,
        Breakdown,
        DeviceInfo,
        LlamaCpp,
        Lora,
        Params,
        Row,
        SharedMemory,
        TensorBuftOverride,
        VirtualDevice,
    )
    from fitter.model.shapes.listing import ShapeInfo, shapes
    from fitter.planner import Planner
    from fitter.planning.calibration import Calibration, Comparison, DeviceCalibration, Difference
    from fitter.planning.cost import Estimate, Part, Workload
    from fitter.planning.explain import Bound, Choice, Reason
    from fitter.planning.explored import Exploration, ExploredAnswer, ExploredCell
    from fitter.planning.inspection import Inspection, LayerSize, RoleSize
    from fitter.planning.layer_map import LayerMap, MapCell
    from fitter.planning.pricing import Price, SpeedSource
    from fitter.planning.quantizations import Quantization, Quantizations
    from fitter.planning.repositories import Repository, RepositoryFile, SideFile
    from fitter.planning.request import Progress
    from fitter.planning.summary import (
        DeviceUse,
        FileStamp,
        HostUse,
        LeftOut,
        ModelSummary,
        PoolUse,
        Problem,
        Search,
        Setting,
        SharedUse,
    )
    from fitter.planning.verified import LaterUse, MemoryUse, ServerUse, Verification, VerifiedDifference, VerifiedRow
    from fitter.programs.later import Later
    from fitter.quantizing import quants
    from fitter.reporting import report
    from fitter.repositories import repository

__version__ = VERSION

_HOMES = {
    "fitter.fitted": ("Llama",),
    "fitter.api": ("Plan", "calibrate", "devices", "estimate", "fit", "inspect", "measure", "verify"),
    "fitter.comparing": ("OnBuild", "compare_builds"),
    "fitter.exploring": ("explore",),
    "fitter.llama.types": (
        "Array",
        "Breakdown",
        "DeviceInfo",
        "LlamaCpp",
        "Lora",
        "Params",
        "Row",
        "SharedMemory",
        "TensorBuftOverride",
        "VirtualDevice",
    ),
    "fitter.planner": ("Planner",),
    "fitter.model.shapes.listing": ("ShapeInfo", "shapes"),
    "fitter.planning.calibration": ("Calibration", "Comparison", "DeviceCalibration", "Difference"),
    "fitter.planning.cost": ("Estimate", "Part", "Workload"),
    "fitter.planning.explain": ("Bound", "Choice", "Reason"),
    "fitter.planning.explored": ("Exploration", "ExploredAnswer", "ExploredCell"),
    "fitter.planning.inspection": ("Inspection", "LayerSize", "RoleSize"),
    "fitter.planning.layer_map": ("LayerMap", "MapCell"),
    "fitter.planning.pricing": ("Price", "SpeedSource"),
    "fitter.planning.quantizations": ("Quantization", "Quantizations"),
    "fitter.planning.repositories": ("Repository", "RepositoryFile", "SideFile"),
    "fitter.planning.request": ("Progress",),
    "fitter.planning.summary": (
        "DeviceUse",
        "FileStamp",
        "HostUse",
        "LeftOut",
        "ModelSummary",
        "PoolUse",
        "Problem",
        "Search",
        "Setting",
        "SharedUse",
    ),
    "fitter.planning.verified": (
        "LaterUse",
        "MemoryUse",
        "ServerUse",
        "Verification",
        "VerifiedDifference",
        "VerifiedRow",
    ),
    "fitter.programs.later": ("Later",),
    "fitter.quantizing": ("quants",),
    "fitter.reporting": ("report",),
    "fitter.repositories": ("repository",),
}
"""Where each name is, beside the errors."""


def __getattr__(name: str) -> Any:
    # importing fitter costs next to nothing until something of it is used
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(home), name)
    raise AttributeError(f"module 'fitter' has no attribute '{name}'")


__all__ = [
    "AnswerError",
    "Array",
    "Bound",
    "Breakdown",
    "Calibration",
    "CancelledError",
    "Choice",
    "Comparison",
    "DeviceCalibration",
    "DeviceInfo",
    "DeviceUse",
    "Difference",
    "Estimate",
    "Exploration",
    "ExploredAnswer",
    "ExploredCell",
    "FileStamp",
    "FitterError",
    "HostUse",
    "Inspection",
    "Later",
    "LaterUse",
    "LayerMap",
    "LayerSize",
    "LeftOut",
    "LibraryError",
    "Llama",
    "LlamaCpp",
    "LlamaCppCrashError",
    "LlamaCppError",
    "Lora",
    "MapCell",
    "MemoryUse",
    "ModelError",
    "ModelSummary",
    "OnBuild",
    "OutOfMemoryError",
    "Params",
    "Part",
    "Plan",
    "PlanError",
    "PlanWarning",
    "Planner",
    "PoolUse",
    "Price",
    "Problem",
    "Progress",
    "Quantization",
    "Quantizations",
    "Reason",
    "RemoteError",
    "Repository",
    "RepositoryFile",
    "RoleSize",
    "Row",
    "Search",
    "ServerUse",
    "Setting",
    "ShapeInfo",
    "SharedMemory",
    "SharedUse",
    "SideFile",
    "SpeedSource",
    "TensorBuftOverride",
    "TimeLimitError",
    "UsageError",
    "Verification",
    "VerifiedDifference",
    "VerifiedRow",
    "VirtualDevice",
    "WorkerError",
    "Workload",
    "__version__",
    "calibrate",
    "compare_builds",
    "devices",
    "estimate",
    "explore",
    "fit",
    "inspect",
    "measure",
    "quants",
    "report",
    "repository",
    "shapes",
    "verify",
]
