"""Boundaries between devices: dynamic programmes that choose each device's range of layers. Bytes and seconds.

Devices have ranges of layers in their order (``tensor_split``), so the boundaries say which device has which layers.
Each programme is exact in its sums, and remembers the best way to reach every boundary. ``packing`` builds placements
from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.spill import MAX_COMBINED, most_within, spill_exact, spill_one, spill_spread

_WINDOW = 8
"""How many layers around its proportional place a boundary is tried at. Twelve change none of the 29 cases."""


class Times(NamedTuple):
    """Seconds of units on devices that differ in speed.

    Attributes:
        units: for each device, the seconds of each unit that it has as a whole.
        host: seconds of each unit on the host.
        by_byte: for each device, the extra seconds for a byte of its units that is on the host.
    """

    units: tuple[tuple[float, ...], ...]
    host: tuple[float, ...]
    by_byte: tuple[float, ...]


class RangeOnDevice(NamedTuple):
    """A device's part of a range of units: its weight bytes, and the items for which it has no room."""

    weights: int
    spilled: tuple[Item, ...]


class Sums:
    """Sums over ranges of units."""

    def __init__(self, units: Sequence[Unit], times: Times | None = None) -> None:
        self.units = units
        self._times = times
        self._seconds = [list(accumulate(seconds, initial=0.0)) for seconds in times.units] if times else []
        # lists, not generators, here and below: searches make thousands of these sums
        self.fixed = list(accumulate([unit.fixed for unit in units], initial=0))
        self.need = list(accumulate([unit.need for unit in units], initial=0))
        self.weights = list(accumulate([unit.weights for unit in units], initial=0))

    @cached_property
    def _counts(self) -> dict[int, list[int]]:
        """For each item size, largest first: the number of such items before each unit."""
        sizes = sorted({size for unit in self.units for size in unit.sizes}, reverse=True)
        return {size: list(accumulate([unit.sizes.count(size) for unit in self.units], initial=0)) for size in sizes}

    def worth(self, device: int, start: int, stop: int, weights: int) -> float:
        """Rate a range with ``weights`` bytes on ``device``. Only differences mean anything; larger is better."""
        if self._times is None:
            return weights
        spilled = self.weights[stop] - self.weights[start] - weights
        seconds = self._seconds[device][stop] - self._seconds[device][start]
        return -(seconds + spilled * self._times.by_byte[device])

    def most(self, start: int, stop: int, budget: int) -> int | None:
        """Find the most weight bytes of a range that ``budget`` holds, any items spilled; ``None`` as in ``fit``."""
        if start == stop:
            return 0
        gap = budget - (self.need[stop] - self.need[start])
        if gap < 0:
            return None
        weights = self.weights[stop] - self.weights[start]
        fixed = self.fixed[stop] - self.fixed[start]
        if weights - fixed <= gap:
            return weights
        counts = tuple((size, up[stop] - up[start]) for size, up in self._counts.items() if up[stop] > up[start])
        if math.prod(count + 1 for _, count in counts[:-1]) > MAX_COMBINED:
            part = self.fit(start, stop, budget, spread=True)
            return part and part.weights
        return fixed + most_within(counts, gap)

    def fit(self, start: int, stop: int, budget: int, spread: bool, apart: int | None = None) -> RangeOnDevice | None:
        """Fit a range into a device's budget; ``None`` where even the units without their items are too large.

        Args:
            spread: spill items of any units, not of a single one.
            apart: choose the items exactly (see ``spill_exact``), which takes longer.
        """
        if start == stop:
            return RangeOnDevice(0, ())
        gap = budget - (self.need[stop] - self.need[start])
        if gap < 0:
            return None
        weights = self.weights[stop] - self.weights[start]
        over = weights - (self.fixed[stop] - self.fixed[start]) - gap
        if over <= 0:
            return RangeOnDevice(weights, ())
        units = self.units[start:stop]
        if not spread:
            spilled = spill_one(units, over)
        else:
            spilled = spill_spread(units, gap) if apart is None else spill_exact(units, gap, apart)
        return None if spilled is None else RangeOnDevice(weights - sum([item.bytes for item in spilled]), spilled)


def whole_counts(units: Sequence[Unit], budgets: Sequence[int], first: int) -> tuple[int, ...] | None:
    """Fill the devices one after the other with whole units from ``first`` on; ``None`` where some are left."""
    counts = []
    index = first
    for budget in budgets:
        start = index
        while index < len(units) and (size := units[index].weights + units[index].cache) <= budget:
            budget -= size
            index += 1
        counts.append(index - start)
    return tuple(counts) if index == len(units) else None


def spread_counts(
    units: Sequence[Unit], budgets: Sequence[int], first: int, times: Times | None
) -> tuple[int, ...] | None:
    """Count units on each device for the most weights, or the least time, with all units from ``first`` on devices."""
    need = sum([unit.need for unit in units[first:]])
    total = sum(max(budget, 0) for budget in budgets)
    movable = sum([unit.movable for unit in units[first:]])
    if need > total:
        return None
    share = min(1.0, (total - need) / movable) if movable else 1.0
    centers = _proportional(units, budgets, first, share)
    for window in (_WINDOW, len(units)):
        counts = _best_boundaries(Sums(units, times), budgets, first, centers, window)
        if counts is not None:
            return counts
    return None


def _proportional(units: Sequence[Unit], budgets: Sequence[int], first: int, share: float) -> list[int]:
    total = sum(max(budget, 0) for budget in budgets) or 1
    costs = [unit.need + share * unit.movable for unit in units[first:]]
    all_costs = float_sum(costs) or 1.0
    centers, reached, cost, index = [first], 0, 0.0, 0
    for budget in budgets:
        reached += max(budget, 0)
        while index < len(costs) and cost + costs[index] / 2 < all_costs * reached / total:
            cost += costs[index]
            index += 1
        centers.append(first + index)
    centers[-1] = len(units)
    return centers


def _best_boundaries(
    sums: Sums, budgets: Sequence[int], first: int, centers: Sequence[int], window: int
) -> tuple[int, ...] | None:
    """Choose boundaries by a dynamic programme, each within ``window`` layers of its center."""
    n_units, n_devices = len(sums.units), len(budgets)
    # by boundary: the worth of the devices before it, and their counts of units
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0, ())}
    for device, budget in enumerate(budgets):
        center = centers[device + 1]
        stops = range(max(first, center - window), min(n_units, center + window) + 1)
        if device == n_devices - 1:
            stops = range(n_units, n_units + 1)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, counts) in states.items():
            for stop in stops:
                if stop < start:
                    continue
                weights = sums.most(start, stop, budget)
                if weights is None:
                    break
                worth = before + sums.worth(device, start, stop, weights)
                if stop not in following or worth > following[stop][0]:
                    following[stop] = (worth, (*counts, stop - start))
        states = following
    return states[n_units][1] if n_units in states else None


def partial_counts(units: Sequence[Unit], budgets: Sequence[int], times: Times | None) -> tuple[int, ...] | None:
    """Count units on each device for the most weights, or the least time. A device spills items of one unit at most."""
    # by boundary: the worth of the devices after it, and their counts of units, from the last device to the first
    states: dict[int, tuple[float, tuple[int, ...]]] = {len(units): (0, ())}
    sums = Sums(units, times)
    for device in reversed(range(len(budgets))):
        budget = budgets[device]
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop, (before, counts) in states.items():
            for start in range(stop, -1, -1):
                part = sums.fit(start, stop, budget, spread=False)
                if part is None:
                    break
                worth = before + sums.worth(device, start, stop, part.weights)
                if start not in following or worth > following[start][0]:
                    following[start] = (worth, (stop - start, *counts))
        states = following
    host = list(accumulate(times.host, initial=0.0)) if times else [0.0] * (len(units) + 1)
    start = max(states, key=lambda start: states[start][0] - host[start])
    counts = states[start][1]
    return counts if sum(counts) else None
