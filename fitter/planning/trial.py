"""A placement that llama.cpp measured, and which of two is the better plan. Bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown, Params
from fitter.planning.placement import Placement
from fitter.planning.request import DeviceLimit, Request

GAIN = 0.02
"""The share of its estimated time that a plan must lose to be worth giving something up: less is within what an
estimate tells."""

WORTH_OF_CONTEXT = 2
"""As a power: a hundredth of the context is worth so many hundredths of the time."""


@dataclass(frozen=True)
class Trial:
    """A placement that llama.cpp measured. ``missing`` pairs a device's name, or ``host``, with the bytes it lacks.

    ``seconds`` is the objective as it is estimated, ``None`` where nothing is priced; ``expected`` is what it was
    before llama.cpp counted the graph's splits, which is what to compare a proposal with.
    """

    placement: Placement
    devices: tuple[DeviceLimit, ...]
    params: Params
    breakdown: Breakdown
    missing: tuple[tuple[str, int], ...]
    seconds: float | None = None
    expected: float | None = None

    @property
    def fits(self) -> bool:
        """Whether every device and the host keep their margin."""
        return not self.missing

    @property
    def weights(self) -> int:
        """Bytes of weights on devices."""
        return sum(row.model for row in self.breakdown.rows if not row.is_host)

    @property
    def used(self) -> tuple[tuple[DeviceLimit, ...], Placement]:
        """The devices that llama.cpp was told of, and the placement on those."""
        names = self.params.devices or ()
        kept = [d for d, device in enumerate(self.devices) if device.name in names]
        return tuple(self.devices[d] for d in kept), self.placement.on(kept)

    @property
    def deficit(self) -> int:
        """Bytes missing in all."""
        return sum(missing for _, missing in self.missing)


def rank(trial: Trial) -> tuple[bool, int, int, float]:
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
    if request.objective != "context" and one[0] != other[0] and min(one[1], other[1]) > 0:
        return loss(*one) < loss(*other)
    return (one[0], -one[1]) > (other[0], -other[1])


def loss(n_ctx: int, seconds: float) -> float:
    """What a plan makes small, for comparing it with others: the logarithm of its time, its context counted."""
    return math.log(seconds) - WORTH_OF_CONTEXT * math.log(n_ctx)


def missing_of(request: Request, breakdown: Breakdown, devices: Sequence[DeviceLimit]) -> tuple[tuple[str, int], ...]:
    """What each device and the host lack of their margin, those that lack nothing left out."""
    occupied = {device.name for device in request.beside}
    every = (*devices, *(device for device in request.beside if device not in devices))
    lacks = [(device.name, breakdown.on(device.name).used - device.target) for device in every]
    host, target = breakdown.host, request.host.target
    if target is not None:
        lacks.append(("host", host.used - (host.model if request.host.paging else 0) - target))
    # a device that nothing was put on has nothing to answer for, however little of it is free
    used = occupied | {row.device for row in breakdown.rows if row.used and not row.is_host}
    return tuple((name, lack) for name, lack in lacks if lack > 0 and (name == "host" or name in used))
