"""Boundaries between devices: dynamic programmes that choose each device's range of layers. Bytes and seconds.

Devices have ranges of layers in their order (``tensor_split``), so the boundaries say which device has which layers.
Each programme is exact in its sums, and remembers the best way to reach every boundary. ``packing`` builds placements
from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.spill import Ranges

_WINDOW = 8
"""How many layers around its proportional place a boundary is tried at. Twelve change none of the 29 cases."""


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


def spread_counts(ranges: Ranges, budgets: Sequence[int], first: int) -> tuple[int, ...] | None:
    """Count units on each device for the most weights, or the least time, with all units from ``first`` on devices."""
    units = ranges.units
    if len(budgets) == 1:
        return None if ranges.spilled(first, len(units), budgets[0]) is None else (len(units) - first,)
    need, movable = ranges.need(first, len(units)), ranges.movable(first, len(units))
    total = sum([max(budget, 0) for budget in budgets])
    if need > total:
        return None
    share = min(1.0, (total - need) / movable) if movable else 1.0
    centers = _proportional(units, budgets, first, share)
    for window in (_WINDOW, len(units)):
        counts = _best_boundaries(ranges, budgets, first, centers, window)
        if counts is not None:
            return counts
    return None


def _proportional(units: Sequence[Unit], budgets: Sequence[int], first: int, share: float) -> list[int]:
    total = sum([max(budget, 0) for budget in budgets]) or 1
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
    ranges: Ranges, budgets: Sequence[int], first: int, centers: Sequence[int], window: int
) -> tuple[int, ...] | None:
    """Choose boundaries by a dynamic programme, each within ``window`` layers of its center."""
    n_units, n_devices = len(ranges.units), len(budgets)
    # by boundary: the worth of the devices before it, and their counts of units
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0, ())}
    for device, budget in enumerate(budgets):
        center = centers[device + 1]
        low, high = max(first, center - window), min(n_units, center + window)
        if device == n_devices - 1:
            low = high = n_units
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, counts) in states.items():
            for stop, worth in ranges.worths(device, start, range(max(start, low), high + 1), budget):
                if stop not in following or before + worth >= following[stop][0]:
                    following[stop] = (before + worth, (*counts, stop - start))
        states = following
    return states[n_units][1] if n_units in states else None
