"""What is better: what a plan makes small, which of two plans it is to be, and what is worth another dummy load.

The one place that says so. Times are estimated seconds of the request's objective, contexts tokens, the rest bytes.
"""

from __future__ import annotations

import math

from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from fitter.planning.speed.cost import Estimate, Workload

GAIN = 0.02
"""The share of its estimated time that a plan must lose to be worth giving something up: less is within what an
estimate tells."""

WORTH_OF_CONTEXT = 2
"""As a power: a hundredth of the context is worth so many hundredths of the time."""

WORTH_A_LOAD = 0.005
"""Share of the time that another way to place must be expected to save before it is tried."""

WORTH_A_CORRECTION = 0.002
"""The same for a correction of what fits already: less than an estimate tells, and the fit takes a fifth longer."""

_ALIKE = 0.01
"""The share of what two trials lack that is not worth another place that lacks something."""


def objective_seconds(request: Request, estimate: Estimate) -> float:
    """What ``request`` wants small: the time of the whole workload, or of the part of it that matters."""
    return seconds_for(request.objective, request.workload, estimate)


def seconds_for(objective: str, workload: Workload, estimate: Estimate) -> float:
    """The time of the whole ``workload``, or of the part of it that matters for ``objective``."""
    if objective == "generation":
        return workload.generate * estimate.generation_seconds
    if objective == "prompt":
        return workload.prompt * estimate.prompt_seconds
    return estimate.seconds


def rank(trial: Trial) -> tuple[bool, int, int, float]:
    """What is larger is the better plan of those that place in the same way: it fits, lacks less, has more context,
    takes less time (or has more weights on devices, where nothing is priced)."""
    worth = trial.weights if trial.seconds is None else -trial.seconds
    return trial.fits, -trial.deficit, trial.params.n_ctx, worth


def is_better(request: Request, trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` is the better plan: it fits, and is the better one by ``beats``."""
    if not (trial.fits and than.fits) or trial.seconds is None or than.seconds is None:
        return rank(trial) > rank(than)
    return beats(request, (trial.params.n_ctx, trial.seconds), (than.params.n_ctx, than.seconds))


def beats(request: Request, one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Whether the first of two plans that fit is the better one, by contexts and seconds.

    With more context, unless that costs too much time: see ``loss``. It is an order: what is better than something
    better is better.
    """
    return better_for(request.objective, one, other)


def better_for(objective: str, one: tuple[int, float], other: tuple[int, float]) -> bool:
    """The same by an objective of ``OBJECTIVES``."""
    if objective != "context" and one[0] != other[0] and min(one[1], other[1]) > 0:
        return loss(*one) < loss(*other)
    return (one[0], -one[1]) > (other[0], -other[1])


def loss(n_ctx: int, seconds: float) -> float:
    """What a plan makes small, for comparing it with others: the logarithm of its time, its context counted."""
    return math.log(seconds) - WORTH_OF_CONTEXT * math.log(n_ctx)


def ordered(request: Request, one: tuple[int, float] | None, other: tuple[int, float] | None) -> int:
    """Below 0 where the first is to be tried before the other, by ``beats``; what is not expected to fit is last."""
    if one is None or other is None:
        return (one is None) - (other is None)
    return beats(request, other, one) - beats(request, one, other)


def lacks_less(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` lacks fewer bytes; of those that lack about the same the one that does in fewer places."""
    is_alike = abs(trial.deficit - than.deficit) <= _ALIKE * than.deficit
    if is_alike and len(trial.missing) != len(than.missing):
        return len(trial.missing) < len(than.missing)
    return trial.deficit < than.deficit


def is_worth_a_load(seconds: float, than: float) -> bool:
    """Whether another way to place is expected to be so much faster that it is tried."""
    return seconds < than * (1 - WORTH_A_LOAD)


def is_worth_a_correction(seconds: float, than: float) -> bool:
    """Whether a correction of what fits is expected to be so much faster that it is measured."""
    return seconds < than * (1 - WORTH_A_CORRECTION)


def justifies_concession(request: Request, trial: Trial, than: Trial, *, gives_context: bool) -> bool:
    """Whether a plan for which something was given up is worth that, over the one before: fits at last, or is faster.

    Context is only given up where ``gives_context`` says that this is what was, and never where it is the objective.
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
    """Whether what ``trial`` does not give up is superfluous in ``than``."""
    is_wide = trial.params.n_ctx >= than.params.n_ctx
    return trial.fits and is_wide and not is_clearly_faster(than, trial)


def is_clearly_faster(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` is faster by more than ``GAIN``; what has no price is not."""
    if trial.seconds is None or than.seconds is None:
        return False
    return trial.seconds < (1 - GAIN) * than.seconds
