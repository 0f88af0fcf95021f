"""Where one device ends and the next begins: programmes over the boundaries between devices. Bytes and seconds.

Devices have ranges of layers in their order (``tensor_split``), so a choice of boundaries says which device has what.
Each programme is exact in what it adds up, and keeps for every boundary the best way to reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.spill import MAX_COMBINED, most_within, spill_exact, spill_one, spill_spread

_WINDOW, _WINDOW_OF_MANY, _MANY = 12, 8, 5
"""How many layers around its proportional place a boundary between two devices is tried at; where there are many
devices fewer do, since the other boundaries make up for it."""


class Times(NamedTuple):
    """What units take in time on devices that differ in speed. Seconds.

    ``units``: of every device, each unit that is there as a whole; ``by_byte``: of every device, what a byte of a unit
    there that is on the host costs more.
    """

    units: tuple[tuple[float, ...], ...]
    host: tuple[float, ...]
    by_byte: tuple[float, ...]


class RangeOnDevice(NamedTuple):
    """What a device keeps of a range of units: weight bytes, and the items that it cannot hold."""

    weights: int
    spilled: tuple[Item, ...]


class Sums:
    """Units with sums over ranges of them."""

    def __init__(self, units: Sequence[Unit], times: Times | None = None) -> None:
        self.units = units
        self._times = times
        self._seconds = [list(accumulate(seconds, initial=0.0)) for seconds in times.units] if times else []
        self.fixed = list(accumulate((unit.fixed for unit in units), initial=0))
        self.need = list(accumulate((unit.need for unit in units), initial=0))
        self.weights = list(accumulate((unit.weights for unit in units), initial=0))

    @cached_property
    def _counts(self) -> dict[int, list[int]]:
        """For each size of items, the large ones first, how many there are up to every unit."""
        sizes = sorted({size for unit in self.units for size in unit.sizes}, reverse=True)
        return {size: list(accumulate((unit.sizes.count(size) for unit in self.units), initial=0)) for size in sizes}

    def worth(self, device: int, start: int, stop: int, kept: int) -> float:
        """What it is worth to keep so many weight bytes of a range on ``device``; only differences mean anything."""
        if self._times is None:
            return kept
        spilled = self.weights[stop] - self.weights[start] - kept
        seconds = self._seconds[device][stop] - self._seconds[device][start]
        return -(seconds + spilled * self._times.by_byte[device])

    def most(self, start: int, stop: int, budget: int) -> int | None:
        """The most weight bytes that a device can keep of a range, any items spilled; ``None`` as ``keep`` says it."""
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
            kept = self.keep(start, stop, budget, spread=True)
            return kept and kept.weights
        return fixed + most_within(counts, gap)

    def keep(self, start: int, stop: int, budget: int, spread: bool, apart: int | None = None) -> RangeOnDevice | None:
        """What a device with ``budget`` keeps of a range, ``None`` where it cannot have those units at all.

        ``apart``: choose exactly (see ``spill_exact``), which takes longer.
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
        return None if spilled is None else RangeOnDevice(weights - sum(item.bytes for item in spilled), spilled)


def whole_counts(units: Sequence[Unit], budgets: Sequence[int], first: int) -> tuple[int, ...] | None:
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
    """Units per device with the most weights on devices, or the least time, all from ``first`` on being there."""
    need = sum(unit.need for unit in units[first:])
    total = sum(max(budget, 0) for budget in budgets)
    movable = sum(unit.movable for unit in units[first:])
    if need > total:
        return None
    share = min(1.0, (total - need) / movable) if movable else 1.0
    centers = _proportional(units, budgets, first, share)
    for window in (_WINDOW_OF_MANY if len(budgets) >= _MANY else _WINDOW, len(units)):
        counts = _best_boundaries(Sums(units, times), budgets, first, centers, window)
        if counts is not None:
            return counts
    return None


def _proportional(units: Sequence[Unit], budgets: Sequence[int], first: int, share: float) -> list[int]:
    total = sum(max(budget, 0) for budget in budgets) or 1
    costs = [unit.need + share * unit.movable for unit in units[first:]]
    all_costs = sum(costs) or 1.0
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
    """Dynamic programme over the boundaries between devices, each within ``window`` layers of its center."""
    n_units, n_devices = len(sums.units), len(budgets)
    # what devices have up to a boundary is worth, and the boundaries before it
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0, ())}
    for device, budget in enumerate(budgets):
        last = device == n_devices - 1
        stops = (
            [n_units]
            if last
            else range(max(first, centers[device + 1] - window), min(n_units, centers[device + 1] + window) + 1)
        )
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, counts) in states.items():
            for stop in stops:
                if stop < start:
                    continue
                kept = sums.most(start, stop, budget)
                if kept is None:
                    break
                worth = before + sums.worth(device, start, stop, kept)
                if stop not in following or worth > following[stop][0]:
                    following[stop] = (worth, (*counts, stop - start))
        states = following
    return states[n_units][1] if n_units in states else None


def partial_counts(units: Sequence[Unit], budgets: Sequence[int], times: Times | None) -> tuple[int, ...] | None:
    """Units per device with the most weights on devices, or the least time: whole layers, but for one on each."""
    # what devices d.. are worth with units stop.., built from the last device to the first
    states: dict[int, tuple[float, tuple[int, ...]]] = {len(units): (0, ())}
    sums = Sums(units, times)
    for device in reversed(range(len(budgets))):
        budget = budgets[device]
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop, (before, counts) in states.items():
            for start in range(stop, -1, -1):
                kept = sums.keep(start, stop, budget, spread=False)
                if kept is None:
                    break
                worth = before + sums.worth(device, start, stop, kept.weights)
                if start not in following or worth > following[start][0]:
                    following[start] = (worth, (stop - start, *counts))
        states = following
    host = list(accumulate(times.host, initial=0.0)) if times else [0.0] * (len(units) + 1)
    start = max(states, key=lambda start: states[start][0] - host[start])
    counts = states[start][1]
    return counts if sum(counts) else None
