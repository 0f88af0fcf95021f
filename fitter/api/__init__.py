"""What ``import fitter`` offers, a module for each question. Sizes in bytes."""

from __future__ import annotations

from fitter.api import plan_methods as plan_methods
from fitter.api.calibrate_devices import calibrate
from fitter.api.fit_model import fit
from fitter.api.inspect_model import inspect
from fitter.api.list_devices import devices
from fitter.api.measure_load import estimate, measure
from fitter.api.verify_plan import verify
from fitter.planning.plan.plan import Plan

__all__ = ["Plan", "calibrate", "devices", "estimate", "fit", "inspect", "measure", "verify"]
