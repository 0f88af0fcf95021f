"""Finds the llama.cpp parameters that run a GGUF model fastest inside every device's memory margin."""

from __future__ import annotations

from fitter.errors import (
    AnswerError,
    FitterError,
    LibraryError,
    LlamaCppError,
    ModelError,
    OutOfMemoryError,
    PlanError,
    PlanWarning,
    RemoteError,
    TimeLimitError,
    UsageError,
)

# typing's own would cost more than all the rest of this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fitter.api import Plan, Price, calibrate, devices, estimate, fit, inspect, measure, verify
    from fitter.fitted import Llama
    from fitter.llama.types import Breakdown, Params, VirtualDevice

__version__ = "0.1.0"

_HOMES = {
    "Llama": "fitter.fitted",
    "Plan": "fitter.api",
    "Price": "fitter.planning.pricing",
    "calibrate": "fitter.api",
    "devices": "fitter.api",
    "estimate": "fitter.api",
    "fit": "fitter.api",
    "inspect": "fitter.api",
    "measure": "fitter.api",
    "verify": "fitter.api",
    "Breakdown": "fitter.llama.types",
    "Params": "fitter.llama.types",
    "VirtualDevice": "fitter.llama.types",
}


def __getattr__(name: str) -> Any:
    # importing fitter costs next to nothing until something of it is used
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fitter' has no attribute '{name}'")


__all__ = [
    "AnswerError",
    "Breakdown",
    "FitterError",
    "LibraryError",
    "Llama",
    "LlamaCppError",
    "ModelError",
    "OutOfMemoryError",
    "Params",
    "Plan",
    "PlanError",
    "PlanWarning",
    "Price",
    "RemoteError",
    "TimeLimitError",
    "UsageError",
    "VirtualDevice",
    "__version__",
    "calibrate",
    "devices",
    "estimate",
    "fit",
    "inspect",
    "measure",
    "verify",
]
