"""Repeat the load of a plan: its keywords for ``measure``, and the memory that is missing if it takes more. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fitter.errors import PlanError
from fitter.llama.types import Breakdown
from fitter.output.keywords import fit_kwargs
from fitter.parameters.table import MachineKeywords, Measuring, RawKeywords, taken_by
from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import HOST_NAME, taken
from fitter.planning.request.summary import SharedUse
from fitter.programs import LlamaCppPython
from fitter.text import mib_up


def load_keywords(plan: Plan, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``measure`` for exactly the load of ``plan``.

    Args:
        plan: The plan.
        told: Keywords of the ``fit`` that made it; those of the machine are kept.
    """
    names = {each.name for each in taken_by(Measuring)}
    machine = {name: value for name, value in told.items() if name in MachineKeywords.__annotations__}
    load = {name: value for name, value in fit_kwargs(plan).items() if name in names}
    raw = {name: getattr(plan.params, name) for name in RawKeywords.__annotations__}
    return without_timeout({**load, **raw, **machine})


def fit_keywords_of(plan: Plan) -> dict[str, Any]:
    """Return the keywords of ``fit`` that fix every parameter of ``plan``; margins and reservations are left out."""
    others = ("margin", "host_margin", "reserve", "rpc", "allow")
    return {name: value for name, value in fit_kwargs(plan).items() if name not in others and value is not None}


def without_timeout(told: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keyword that a worker has itself."""
    return {name: value for name, value in told.items() if name != "timeout"}


def with_every_output(plan: Plan, measure: Callable[..., Breakdown]) -> Plan:
    """Return ``plan`` with an output for every token, as a plain ``llama_cpp.Llama`` has.

    Args:
        plan: The plan; other programs' plans return unchanged.
        measure: ``fitter.measure``.

    Raises:
        PlanError: A device or the host has no room for the outputs.
    """
    if plan.program != LlamaCppPython.name or not plan.params.n_outputs_max or not plan.fit_keywords:
        return plan
    keywords = {**load_keywords(plan, plan.fit_keywords), "n_outputs_max": 0}
    breakdown = measure(plan.model.path, timeout=plan.fit_keywords.get("timeout"), **keywords)
    for name, lacking in missing_of(plan, breakdown, plan.shared).items():
        where = "the host" if name == HOST_NAME else name
        raise PlanError(
            f"llama_cpp.Llama makes every token of a batch an output, which the plan does not count, and for which "
            f"{where} lacks {mib_up(lacking)} MiB: use plan.load(), or fit with program='any'"
        )
    return replace(plan, params=replace(plan.params, n_outputs_max=0), breakdown=breakdown)


def missing_of(plan: Plan, breakdown: Breakdown, shared: Sequence[SharedUse] = ()) -> dict[str, int]:
    """Compute the bytes that each device and ``host`` lack if the parameters of ``plan`` take ``breakdown``.

    As in a plan, each row's ``compute`` leaves the margin free, and each row's ``reserved`` fits into the free memory.
    A limit that a fitting plan may exceed (host memory with ``paging``) does not count.

    Args:
        plan: The plan.
        breakdown: Its memory now.
        shared: Memory of draft model, projector and others now.

    Returns:
        Missing bytes by name; empty if all fits.
    """
    real = breakdown.real
    uses = [(use, breakdown.on(use.name).used, real.on(use.name).used) for use in plan.devices]
    lacking = {
        use.name: max(used + use.margin, reserved) + taken(shared, use.name) - use.free
        for use, used, reserved in uses
        if use.fits or not plan.fits
    }
    host = plan.host
    if host.free is not None and (host.fits or not plan.fits):
        taken_there = max(breakdown.host.used + host.margin, real.host.used) + taken(shared, None) + host.later
        lacking[HOST_NAME] = taken_there - host.free
    return {name: size for name, size in lacking.items() if size > 0}
