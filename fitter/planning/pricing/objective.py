"""Comparison of plans: the objective, the better of two plans, and the gain that is worth another dummy load.

No other module compares plans. Times are estimated seconds of the request's objective, contexts tokens, the rest bytes.
"""

from __future__ import annotations

import math

from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from fitter.planning.speed.cost import Estimate, Workload

GAIN = 0.02
"""A concession must save this share of the estimated time: an estimate is not more exact."""

WORTH_OF_CONTEXT = 2
"""A power: one percent of the context is worth so many percent of the time."""

WORTH_A_LOAD = 0.005
"""Another way to place is tried if it is expected to save this share of the time."""

WORTH_A_CORRECTION = 0.002
"""The same for a correction of a placement that fits. With less, a fit takes a fifth longer for no real gain."""

_ALIKE = 0.01
"""Two trials lack about the same if their lacks differ by at most this share."""


def objective_seconds(request: Request, estimate: Estimate) -> float:
    """Compute the request's objective: the time of its workload, or of the part of it that matters."""
    return seconds_for(request.objective, request.workload, estimate)


def seconds_for(objective: str, workload: Workload, estimate: Estimate) -> float:
    """Compute the time of ``workload``, or of the part of it that matters for ``objective``."""
    if objective == "generation":
        return workload.generate * estimate.generation_seconds
    if objective == "prompt":
        return workload.prompt * estimate.prompt_seconds
    return estimate.seconds


def rank(trial: Trial) -> tuple[bool, int, int, float]:
    """Sort key (larger is better) of trials that place in the same way.

    In this order: it fits, lacks less, has more context, takes less time (without prices: more weights on devices).
    """
    worth = trial.weights if trial.seconds is None else -trial.seconds
    return trial.fits, -trial.deficit, trial.params.n_ctx, worth


def is_better(request: Request, trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` is the better plan: by ``beats`` if both fit and have a price, else by ``rank``."""
    if not (trial.fits and than.fits) or trial.seconds is None or than.seconds is None:
        return rank(trial) > rank(than)
    return beats(request, (trial.params.n_ctx, trial.seconds), (than.params.n_ctx, than.seconds))


def beats(request: Request, one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Whether the first of two fitting plans, pairs of context and seconds, is the better one.

    More context is better unless it costs too much time: see ``loss``. The order is transitive.
    """
    return better_for(request.objective, one, other)


def better_for(objective: str, one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Compare as ``beats`` does, by an objective of ``OBJECTIVES``."""
    if objective != "context" and one[0] != other[0] and min(one[1], other[1]) > 0:
        return loss(*one) < loss(*other)
    return (one[0], -one[1]) > (other[0], -other[1])


def loss(n_ctx: int, seconds: float) -> float:
    """Compute the loss of a plan: the logarithm of its time, less the worth of its context."""
    return math.log(seconds) - WORTH_OF_CONTEXT * math.log(n_ctx)


def ordered(request: Request, one: tuple[int, float] | None, other: tuple[int, float] | None) -> int:
    """Compare for ``sorted``: below 0 if the first is better by ``beats``. ``None`` (not expected to fit) is last."""
    if one is None or other is None:
        return (one is None) - (other is None)
    return beats(request, other, one) - beats(request, one, other)


def lacks_less(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` lacks fewer bytes, or about as many in fewer places."""
    is_alike = abs(trial.deficit - than.deficit) <= _ALIKE * than.deficit
    if is_alike and len(trial.missing) != len(than.missing):
        return len(trial.missing) < len(than.missing)
    return trial.deficit < than.deficit


def is_worth_a_load(seconds: float, than: float) -> bool:
    """Whether another way to place is expected to be fast enough to be tried."""
    return seconds < than * (1 - WORTH_A_LOAD)


def is_worth_a_correction(seconds: float, than: float) -> bool:
    """Whether a correction of a fitting placement is expected to be fast enough to be measured."""
    return seconds < than * (1 - WORTH_A_CORRECTION)


def justifies_concession(request: Request, trial: Trial, than: Trial, *, gives_context: bool) -> bool:
    """Whether a plan with a concession is worth it over ``than``, the plan without: it fits at last, or is faster.

    Less context is only accepted if that is the concession (``gives_context``), and never if it is the objective.
    """
    if not than.fits:
        return trial.fits or trial.deficit < than.deficit
    if not trial.fits:
        return False
    n_ctx, before = trial.params.n_ctx, than.params.n_ctx
    if n_ctx > before and request.objective == "context":
        return True
    if n_ctx < before and (not gives_context or request.objective == "context"):
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
