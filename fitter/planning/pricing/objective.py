"""Comparison of plans: the objective, the better of two plans, and the gain that is worth another dummy load.

No other module compares plans. Times are estimated seconds of the request's objective, contexts tokens, the rest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from fitter.planning.speed.cost import Estimate, Workload

GAIN = 0.02
"""A concession must save this share of the estimated time: an estimate is not more exact."""

AS_QUICK = 0.01
"""Contexts are equally quick if their times differ by at most this share: the largest of them is the quickest."""

LITTLE_CONTEXT = 1 / 8
"""More context by a smaller share is not worth more time: Llama 3.1 8B on 8 GiB would be 8 % slower for 2 % more."""

WORTH_A_LOAD = 0.005
"""Another placement is measured if it is expected to save this share of the time.

With 0.002 for corrections, the 66 cases of ``tools.comparisons.cases`` take 2 % more loads and save 0.1 % of the time
at most."""

WORTH_SHARING = 0.08
"""An integrated GPU that llama.cpp does not use by default must save this share of the time: no measurement holds
estimates of two devices that share the host's memory.

With 0.05, Qwen3 30B-A3B at Q5_K_M on an RTX 4060 and a Radeon 780M has half of its layers on the latter for 6 %."""


def objective_seconds(request: Request, estimate: Estimate) -> float:
    """Compute the request's objective: the time of its workload, or of the part of it that matters."""
    return seconds_for(request.objective, request.workload, estimate)


def seconds_for(objective: str, workload: Workload, estimate: Estimate) -> float:
    """Compute the time of ``workload``, or of the part of it that matters for ``objective``."""
    if objective == "generation":
        return workload.generate * estimate.generation_seconds
    if objective == "prompt":
        return workload.users * (workload.prompt * estimate.prompt_seconds)
    return estimate.seconds


def workload_of(request: Request) -> Workload:
    """Return the part of the request's workload that matters for its objective: only that takes time."""
    workload = request.workload
    if request.objective == "generation":
        return replace(workload, prompt=0, cached=workload.cached + workload.prompt)
    return replace(workload, generate=0) if request.objective == "prompt" else workload


def rank(trial: Trial) -> tuple[bool, int, int, float]:
    """Sort key (larger is better) of trials that place in the same way.

    In this order: it fits, lacks less, has more context, takes less time (without prices: more weights on devices).
    """
    worth = trial.weights if trial.seconds is None else -trial.seconds
    return trial.fits, -trial.deficit, trial.params.n_ctx, worth


def longest_seconds(request: Request, quickest: float) -> float:
    """Compute the longest time that a plan may take for more context, from the time with the quickest context."""
    return longest_for(request.objective, request.context_cost, quickest)


def longest_for(objective: str, context_cost: float, quickest: float) -> float:
    """Compute ``longest_seconds`` for an objective of ``OBJECTIVES``."""
    return math.inf if objective == "context" else quickest * (1 + max(AS_QUICK, context_cost))


def best_of(trials: Sequence[Trial], request: Request) -> Trial:
    """Return the best of several trials, the first of equal ones.

    Of those that fit and have a price: the largest context that takes at most ``longest_seconds`` of the quickest.
    Where none has a price, or none fits: the first by ``rank``.
    """
    pairs = {(trial.params.n_ctx, trial.seconds): trial for trial in reversed(trials) if trial.fits and trial.seconds}
    if not pairs:
        return max(trials, key=rank)
    return pairs[best_pair([*pairs], lambda quickest: longest_seconds(request, quickest))]


def best_pair(pairs: Sequence[tuple[int, float]], longest: Callable[[float], float]) -> tuple[int, float]:
    """Return the best of several plans that fit, pairs of context and seconds.

    Args:
        longest: the longest time for more context, from the time of the quickest (``longest_seconds``).
    """
    quick = min(seconds for _, seconds in pairs)
    allowed, quickest = (
        max((pair for pair in pairs if pair[1] <= most), key=lambda pair: (pair[0], -pair[1]))
        for most in (longest(quick), quick * (1 + AS_QUICK))
    )
    is_little = allowed[0] - quickest[0] < LITTLE_CONTEXT * quickest[0]
    return quickest if is_little and not math.isinf(longest(quick)) else allowed


def lacks_less(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` lacks fewer bytes, or as many in fewer places."""
    return (trial.deficit, len(trial.missing)) < (than.deficit, len(than.missing))


def is_worth_a_load(seconds: float, than: float) -> bool:
    """Whether another placement is expected to be fast enough to be measured."""
    return seconds < than * (1 - WORTH_A_LOAD)


def justifies_concession(request: Request, trial: Trial, than: Trial, *, gives_context: bool) -> bool:
    """Whether a plan with a concession is worth it over ``than``, the plan without: it fits at last, or is faster.

    Less context is only accepted if that is the concession (``gives_context``), and never if it is the objective.
    """
    if not than.fits:
        return trial.fits or trial.deficit < than.deficit
    if not trial.fits:
        return False
    n_ctx, before = trial.params.n_ctx, than.params.n_ctx
    if n_ctx > before and request.is_for_most_context:
        return True
    if n_ctx < before and (not gives_context or request.is_for_most_context):
        return False
    return is_clearly_faster(trial, than)


def does_as_well(trial: Trial, than: Trial) -> bool:
    """Whether ``trial``, with fewer concessions than ``than``, is as good."""
    is_wide = trial.params.n_ctx >= than.params.n_ctx
    return trial.fits and is_wide and not is_clearly_faster(than, trial)


def is_clearly_faster(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` is faster by more than ``GAIN``. Without prices it is not."""
    if trial.seconds is None or than.seconds is None:
        return False
    return trial.seconds < (1 - GAIN) * than.seconds
