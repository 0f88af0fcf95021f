"""``--split-mode auto``: a plan with each of the split modes ``layer`` and ``tensor``, and the better one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from fitter.errors import LibraryError, LlamaCppError, UsageError
from fitter.parameters import Fitting
from fitter.planning.ask import Ask
from fitter.planning.explain import Choice
from fitter.planning.objective import GAIN, loss, seconds_for
from fitter.planning.plan import Plan
from fitter.planning.split_price import pipelined

MODES = ("layer", "tensor")
"""What is chosen between."""


def either(fit: Callable[..., Plan], model: str, parameters: Fitting, **others: Any) -> Plan:
    """The better plan of the two that ``fit`` makes with these ``parameters`` and a split mode each.

    It is the one with split mode ``layer``, unless the other one fits too and is clearly faster for the context that it
    has. Raises what ``fit`` raises for ``layer``.
    """
    words = cast(Fitting, {name: value for name, value in parameters.items() if name != "split_mode"})
    by_layer = fit(model, split_mode="layer", **words, **others)
    objective = parameters.get("objective") or Ask.objective
    try:
        by_tensor = fit(model, split_mode="tensor", **words, **others)
    except (UsageError, LlamaCppError, LibraryError):
        # what llama.cpp does not split so, or nobody has compared
        return by_layer
    if not by_tensor.fits:
        return by_layer
    if not by_layer.fits:
        return by_tensor
    layer, tensor = (seconds_of(plan, objective) for plan in (by_layer, by_tensor))
    if layer is None or tensor is None:
        return by_layer
    is_better = loss(by_tensor.params.n_ctx, tensor) < loss(by_layer.params.n_ctx, layer * (1 - GAIN))
    if objective == "context":
        is_better = by_tensor.params.n_ctx > by_layer.params.n_ctx
    chosen, seconds, other = (by_tensor, tensor, layer) if is_better else (by_layer, layer, tensor)
    modes = MODES[::-1] if is_better else MODES
    choice = Choice("how the model is split over the devices", f"by {modes[0]}", seconds, f"by {modes[1]}", other)
    return replace(chosen, choices=(*chosen.choices, choice))


def seconds_of(plan: Plan, objective: str) -> float | None:
    """What the plan takes of what it is to be fast at, devices that work on one prompt at once counted."""
    price = plan.estimate
    if price is None:
        return None
    estimate = price.estimate
    is_whole = not any(part.name.startswith("host:") for part in estimate.parts)
    devices = [name for name in plan.breakdown.devices if plan.breakdown.on(name).model]
    if plan.params.split_mode == "layer" and is_whole and devices:
        estimate = pipelined(estimate, len(devices), price.workload, plan.params.n_ubatch)
    return seconds_for(objective, price.workload, estimate)
