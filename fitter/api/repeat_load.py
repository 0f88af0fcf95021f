"""Exactly the load of a plan, once more: its keywords, and what it lacks if it takes something else. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fitter.errors import PlanError
from fitter.llama.types import Breakdown
from fitter.output.formats.python import fit_kwargs
from fitter.parameters.table import MachineKeywords, Measuring, RawKeywords, taken_by
from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import HOST_NAME, taken
from fitter.planning.request.summary import SharedUse
from fitter.programs import LlamaCppPython
from fitter.text import mib_up


def same_load(plan: Plan, told: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``measure`` for exactly the load of ``plan``, on the machine of the keywords ``told`` to ``fit``."""
    known = {each.name for each in taken_by(Measuring)}
    machine = {name: value for name, value in told.items() if name in MachineKeywords.__annotations__}
    load = {name: value for name, value in fit_kwargs(plan).items() if name in known}
    raw = {name: getattr(plan.params, name) for name in RawKeywords.__annotations__}
    return without_timeout({**load, **raw, **machine})


def without_timeout(told: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords without those that are the worker's own."""
    return {name: value for name, value in told.items() if name != "timeout"}


def with_every_output(plan: Plan, measure: Callable[..., Breakdown]) -> Plan:
    """``plan`` with an output for every token, as a ``llama_cpp.Llama`` of one's own has, where it has room for that.

    ``measure`` is ``fitter.measure``. Raises ``PlanError`` where it has not.
    """
    if plan.program != LlamaCppPython.name or not plan.params.n_outputs_max or not plan.fit_keywords:
        return plan
    keywords = {**same_load(plan, plan.fit_keywords), "n_outputs_max": 0}
    breakdown = measure(plan.model.path, timeout=plan.fit_keywords.get("timeout"), **keywords)
    for name, lacking in missing_of(plan, breakdown, plan.shared).items():
        where = "the host" if name == HOST_NAME else name
        raise PlanError(
            f"llama_cpp.Llama makes every token of a batch an output, which the plan does not count, and for which "
            f"{where} lacks {mib_up(lacking)} MiB: use plan.load(), or fit with program='any'"
        )
    return replace(plan, params=replace(plan.params, n_outputs_max=0), breakdown=breakdown)


def missing_of(plan: Plan, breakdown: Breakdown, shared: Sequence[SharedUse] = ()) -> dict[str, int]:
    """Bytes that are missing where the parameters of ``plan`` take ``breakdown``, and ``shared`` is beside the model.

    As for a plan: margins are kept by ``compute`` of each row, and what a real load reserves has room in what is free.
    What a plan that fits may exceed, such as the host's memory with ``paging``, is no limit.
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
