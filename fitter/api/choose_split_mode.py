"""``--split-mode auto``: plan with the split modes ``layer`` and ``tensor``, and keep the better plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from fitter.errors import LibraryError, LlamaCppError, TimeLimitError, UsageError
from fitter.parameters.table import PARAMETERS, Fitting
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.objective import GAIN, best_pair, longest_for, seconds_for
from fitter.planning.pricing.split_price import pipelined
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import Search
from fitter.planning.speed.explain import Choice

MODES = ("layer", "tensor")
"""The split modes that are compared."""

_DONE = "done"

OnProgress = Callable[[Progress], None]


def either(
    fit: Callable[..., Plan],
    model: str,
    parameters: Fitting,
    on_progress: OnProgress | None = None,
    **others: Any,
) -> Plan:
    """Fit with each split mode, and return the better plan.

    The plan with ``layer`` wins unless ``tensor`` fits too and is clearly faster for its context. Both fits share the
    time limit. Where ``tensor`` has no plan, a note of the plan says why.

    Args:
        fit: ``fitter.fit``.
        model: Path or address.
        parameters: Keywords of ``fit``.
        on_progress: Called at each step, with the dummy loads of both fits.
        others: Further keywords of ``fit``, passed on unchanged.

    Raises:
        FitterError: As ``fit`` raises it with ``layer``.
    """
    started = time.monotonic()
    words = cast(Fitting, {name: value for name, value in parameters.items() if name != "split_mode"})
    by_layer = fit(model, split_mode="layer", **words, on_progress=counting(on_progress, 0), **others)
    limit = parameters.get("time_limit")
    by_tensor, reason = None, ""
    if limit is None or (left := limit - (time.monotonic() - started)) > 0:
        remaining = words if limit is None else cast(Fitting, {**words, "time_limit": left})
        say = counting(on_progress, by_layer.search.dummy_loads)
        try:
            by_tensor = fit(model, split_mode="tensor", **remaining, on_progress=say, **others)
        except (UsageError, LlamaCppError, LibraryError, TimeLimitError) as error:
            reason = _without_remedy(error)
    else:
        reason = "the time limit was over"
    plan = by_layer if by_tensor is None else _better(by_layer, by_tensor, parameters)
    if reason:
        plan = replace(plan, notes=(*plan.notes, f"planned with split mode 'layer' alone: {reason}"))
    search = joined_searches(
        by_layer.search, None if by_tensor is None else by_tensor.search, time.monotonic() - started
    )
    if on_progress is not None:
        on_progress(Progress(search.dummy_loads, _DONE))
    told = {**plan.fit_keywords, "on_progress": on_progress}
    if "time_limit" in parameters:
        told["time_limit"] = limit
    return replace(plan, search=search, fit_keywords=told)


def _better(by_layer: Plan, by_tensor: Plan, parameters: Fitting) -> Plan:
    """Return the better plan, with the other one as its alternative."""
    objective, context_cost = parameters.get("objective") or Ask.objective, parameters.get("context_cost")
    longest = Ask.context_cost if context_cost is None else PARAMETERS["context_cost"].check(context_cost)
    if not (by_layer.fits and by_tensor.fits):
        return by_tensor if by_tensor.fits else by_layer
    layer, tensor = (seconds_of(plan, objective) for plan in (by_layer, by_tensor))
    if layer is None or tensor is None:
        return by_layer
    by_figures = ((by_layer.params.n_ctx, layer * (1 - GAIN)), (by_tensor.params.n_ctx, tensor))
    is_better = best_pair(by_figures, lambda quickest: longest_for(objective, longest, quickest)) != by_figures[0]
    chosen, seconds, other = (by_tensor, tensor, layer) if is_better else (by_layer, layer, tensor)
    modes = MODES[::-1] if is_better else MODES
    choice = Choice("how the model is split over the devices", f"by {modes[0]}", seconds, f"by {modes[1]}", other)
    return replace(chosen, choices=(*chosen.choices, choice))


def seconds_of(plan: Plan, objective: str) -> float | None:
    """Estimate the seconds of a plan for its objective.

    Devices that hold a whole model layer by layer work on one prompt at once; the estimate includes that.
    """
    price = plan.estimate
    if price is None:
        return None
    estimate = price.estimate
    is_whole = not any(part.name.startswith("host:") for part in estimate.parts)
    devices = [name for name in plan.breakdown.devices if plan.breakdown.on(name).model]
    if plan.params.split_mode == "layer" and is_whole and devices:
        estimate = pipelined(estimate, len(devices), price.workload, plan.params.n_ubatch)
    return seconds_for(objective, price.workload, estimate)


def counting(on_progress: OnProgress | None, before: int) -> OnProgress | None:
    """Wrap ``on_progress``: add ``before`` to the dummy loads, and drop the end of a single search."""
    if on_progress is None:
        return None

    def say(step: Progress) -> None:
        if step.text != _DONE:
            on_progress(replace(step, dummy_loads=before + step.dummy_loads))

    return say


def _without_remedy(error: Exception) -> str:
    """Cut the advice to use another split mode from an error, because that is being done."""
    text, colon, _ = str(error).rpartition(": use ")
    return text if colon else str(error)


def joined_searches(first: Search, second: Search | None, seconds: float) -> Search:
    """Join the effort of two searches that took ``seconds`` together."""
    if second is None:
        return replace(first, seconds=seconds)
    return Search(
        first.dummy_loads + second.dummy_loads,
        seconds,
        first.shared_loads + second.shared_loads,
        first.is_cut_short or second.is_cut_short,
    )
