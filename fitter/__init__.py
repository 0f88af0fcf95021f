"""Finds the llama.cpp parameters that run a GGUF model fastest inside every device's memory margin."""

from __future__ import annotations

from fitter.errors import (
    AnswerError,
    CancelledError,
    ExpertCacheError,
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
    from fitter.api.compare_builds import OnBuild, compare_builds
    from fitter.api.explore.explore_grid import explore
    from fitter.api.gpu_layers import MemoryEstimate, estimate_gpu_layers
    from fitter.api.plan_fleet import fleet
    from fitter.api.plan_repository import repository
    from fitter.api.planner import Planner
    from fitter.api.quantizations import best_shapes, quants
    from fitter.api.real_runs.load_plan import Llama
    from fitter.api.real_runs.tune_plan import tune
    from fitter.api.report_plan import report
    from fitter.api.server_client import Client
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
    from fitter.model.shapes.catalogue import ShapeInfo, shapes
    from fitter.planning.checked.calibration import Calibration, Comparison, DeviceCalibration, Difference
    from fitter.planning.checked.tuning import Tuning, TuningChange, TuningRun
    from fitter.planning.fleet.fleet import Disk, Fleet, FleetModel, PlaceUse, ResidentSet, Swap
    from fitter.planning.plan.layer_map import Inspection, LayerMap, LayerSize, MapCell, RoleSize
    from fitter.planning.plan.turns import BestDepth, Depth, Drafting, Turns, UserSpeed
    from fitter.planning.plan.verified import (
        LaterUse,
        MemoryGrowth,
        MemoryUse,
        ServerUse,
        Verification,
        VerifiedDifference,
        VerifiedRow,
    )
    from fitter.planning.pricing.pricing import Price, SpeedAt, SpeedSource
    from fitter.planning.request.request import Progress
    from fitter.planning.request.session import Session
    from fitter.planning.request.summary import (
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
    from fitter.planning.speed.cost import Estimate, Part, Workload
    from fitter.planning.speed.explain import Alternative, Bound, Choice, Reason
    from fitter.planning.tables.exploration import Exploration, ExploredAnswer, ExploredCell
    from fitter.planning.tables.file_rows import Repository, RepositoryFile, SideFile
    from fitter.planning.tables.quantization_rows import Quantization, Quantizations, ShapePlan, ShapePlans
    from fitter.programs.later import Later

__version__ = VERSION

_HOMES = {
    "fitter.api.real_runs.load_plan": ("Llama",),
    "fitter.api": ("Plan", "calibrate", "devices", "estimate", "fit", "inspect", "measure", "verify"),
    "fitter.api.compare_builds": ("OnBuild", "compare_builds"),
    "fitter.api.explore.explore_grid": ("explore",),
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
    "fitter.api.planner": ("Planner",),
    "fitter.model.shapes.catalogue": ("ShapeInfo", "shapes"),
    "fitter.planning.checked.calibration": ("Calibration", "Comparison", "DeviceCalibration", "Difference"),
    "fitter.planning.speed.cost": ("Estimate", "Part", "Workload"),
    "fitter.planning.speed.explain": ("Alternative", "Bound", "Choice", "Reason"),
    "fitter.planning.tables.exploration": ("Exploration", "ExploredAnswer", "ExploredCell"),
    "fitter.planning.checked.tuning": ("Tuning", "TuningChange", "TuningRun"),
    "fitter.planning.plan.turns": ("BestDepth", "Depth", "Drafting", "Turns", "UserSpeed"),
    "fitter.planning.plan.layer_map": ("Inspection", "LayerMap", "LayerSize", "MapCell", "RoleSize"),
    "fitter.planning.pricing.pricing": ("Price", "SpeedAt", "SpeedSource"),
    "fitter.planning.tables.quantization_rows": ("Quantization", "Quantizations", "ShapePlan", "ShapePlans"),
    "fitter.planning.tables.file_rows": ("Repository", "RepositoryFile", "SideFile"),
    "fitter.planning.request.request": ("Progress",),
    "fitter.planning.request.session": ("Session",),
    "fitter.planning.request.summary": (
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
    "fitter.planning.plan.verified": (
        "LaterUse",
        "MemoryGrowth",
        "MemoryUse",
        "ServerUse",
        "Verification",
        "VerifiedDifference",
        "VerifiedRow",
    ),
    "fitter.programs.later": ("Later",),
    "fitter.api.quantizations": ("best_shapes", "quants"),
    "fitter.api.report_plan": ("report",),
    "fitter.api.gpu_layers": ("MemoryEstimate", "estimate_gpu_layers"),
    "fitter.api.server_client": ("Client",),
    "fitter.api.real_runs.tune_plan": ("tune",),
    "fitter.api.plan_repository": ("repository",),
    "fitter.api.plan_fleet": ("fleet",),
    "fitter.planning.fleet.fleet": ("Disk", "Fleet", "FleetModel", "PlaceUse", "ResidentSet", "Swap"),
}
"""The module of each public name; the errors are imported above."""


def __getattr__(name: str) -> Any:
    # importing fitter costs next to nothing until something of it is used
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(home), name)
    raise AttributeError(f"module 'fitter' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


__all__ = [
    "Alternative",
    "AnswerError",
    "Array",
    "BestDepth",
    "Bound",
    "Breakdown",
    "Calibration",
    "CancelledError",
    "Choice",
    "Client",
    "Comparison",
    "Depth",
    "DeviceCalibration",
    "DeviceInfo",
    "DeviceUse",
    "Difference",
    "Disk",
    "Drafting",
    "Estimate",
    "ExpertCacheError",
    "Exploration",
    "ExploredAnswer",
    "ExploredCell",
    "FileStamp",
    "FitterError",
    "Fleet",
    "FleetModel",
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
    "MemoryEstimate",
    "MemoryGrowth",
    "MemoryUse",
    "ModelError",
    "ModelSummary",
    "OnBuild",
    "OutOfMemoryError",
    "Params",
    "Part",
    "PlaceUse",
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
    "ResidentSet",
    "RoleSize",
    "Row",
    "Search",
    "ServerUse",
    "Session",
    "Setting",
    "ShapeInfo",
    "ShapePlan",
    "ShapePlans",
    "SharedMemory",
    "SharedUse",
    "SideFile",
    "SpeedAt",
    "SpeedSource",
    "Swap",
    "TensorBuftOverride",
    "TimeLimitError",
    "Tuning",
    "TuningChange",
    "TuningRun",
    "Turns",
    "UsageError",
    "UserSpeed",
    "Verification",
    "VerifiedDifference",
    "VerifiedRow",
    "VirtualDevice",
    "WorkerError",
    "Workload",
    "__version__",
    "best_shapes",
    "calibrate",
    "compare_builds",
    "devices",
    "estimate",
    "estimate_gpu_layers",
    "explore",
    "fit",
    "fleet",
    "inspect",
    "measure",
    "quants",
    "report",
    "repository",
    "shapes",
    "tune",
    "verify",
]
