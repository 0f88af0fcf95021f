"""What ``import fitter`` offers, a module for each question. Sizes in bytes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fitter.api.device_calls import calibrate, devices
    from fitter.api.fits.fit_model import fit
    from fitter.api.measure_load import estimate, inspect, measure
    from fitter.api.real_runs.verify_plan import verify
    from fitter.planning.plan.plan import Plan

_HOMES = {
    "Plan": "fitter.planning.plan.plan",
    "calibrate": "fitter.api.device_calls",
    "devices": "fitter.api.device_calls",
    "estimate": "fitter.api.measure_load",
    "fit": "fitter.api.fits.fit_model",
    "inspect": "fitter.api.measure_load",
    "measure": "fitter.api.measure_load",
    "verify": "fitter.api.real_runs.verify_plan",
}


def __getattr__(name: str) -> Any:
    # a module of this package can be imported without all the others, as fitter.Llama is
    if name not in _HOMES:
        raise AttributeError(f"module 'fitter.api' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


__all__ = ["Plan", "calibrate", "devices", "estimate", "fit", "inspect", "measure", "verify"]
