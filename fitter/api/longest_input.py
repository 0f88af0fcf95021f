"""Embedders and rerankers: the context with the longest input that costs little time. Tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.planning.plan.plan import Plan, is_on_devices
from fitter.planning.pricing.objective import best_pair, longest_for
from fitter.planning.request.request import Request


def longest_input(request: Request, fit: Callable[[Request], Plan]) -> Plan:
    """Fit ``request``; where batches hold a whole input, with the largest context that takes little longer than others.

    Batches grow with the context there, and compute buffers with both. So contexts are fitted one by one: the model's
    own, and halves of it down to one with all on devices, or the smallest one.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    if not request.whole_inputs or "n_ctx" in request.fixed:
        return fit(request)
    plans: list[Plan] = []
    has_devices = any(device.target > 0 for device in request.devices)
    failed: LlamaCppError | TimeLimitError | None = None
    for n_ctx in _contexts(request):
        try:
            plans.append(fit(request.with_context(n_ctx)))
        except LlamaCppError as error:
            # it may be too large for llama.cpp
            failed = error
            continue
        except TimeLimitError as error:
            failed = error
            break
        if plans[-1].fits and (not has_devices or is_on_devices(plans[-1])):
            break
    fitting = {
        (plan.params.n_ctx, plan.estimate.seconds if plan.estimate else 0.0): plan for plan in plans if plan.fits
    }
    if not fitting and failed is not None:
        raise failed
    plan = plans[-1]
    if fitting:
        best = best_pair([*fitting], lambda quickest: longest_for(request.objective, request.context_cost, quickest))
        plan = fitting[best]
    loads = max(each.search.dummy_loads for each in plans)
    seconds = sum(each.search.seconds for each in plans)
    return replace(plan, search=replace(plan.search, dummy_loads=loads, seconds=seconds))


def _contexts(request: Request) -> Iterator[int]:
    """Yield the largest context, halves of it, and the smallest."""
    n_ctx, step = request.n_ctx_max, request.alignment
    while n_ctx > request.n_ctx_min:
        yield n_ctx
        n_ctx = n_ctx // 2 // step * step
    yield request.n_ctx_min
