"""Packing layers and tensors into budgets: pure functions, bytes in, placements out.

A budget is what a device may hold of weights and caches: its free memory less margin and compute buffer. Nothing here
decides that a plan fits; these are proposals, which llama.cpp then measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fitter.planning.memory import HOST, Item, Unit
from fitter.planning.placement import Placement, caches_on, weights_on

_WINDOW = 6
"""How many layers around its proportional place a boundary between two devices is tried at."""


class _Kept(NamedTuple):
    """What a device keeps of a range of units: weight bytes, and the items that it cannot hold."""

    weights: int
    spilled: tuple[Item, ...]


def pack_whole(units: Sequence[Unit], budgets: Sequence[int], first: int = 0) -> Placement | None:
    """All units from ``first`` on, whole, with what is left spread over the devices; ``None`` where they do not fit.

    Leaving the same slack everywhere protects against compute buffers that the next measurement finds larger.
    """
    best = _whole_counts(units, budgets, first)
    if best is None:
        return None
    low, high = 0, max(*budgets, 0)
    while low < high:
        slack = (low + high + 1) // 2
        counts = _whole_counts(units, [budget - slack for budget in budgets], first)
        if counts is None:
            high = slack - 1
        else:
            low, best = slack, counts
    return Placement(first, best)


def _whole_counts(units: Sequence[Unit], budgets: Sequence[int], first: int) -> tuple[int, ...] | None:
    counts = []
    index = first
    for budget in budgets:
        start = index
        while index < len(units) and (size := units[index].weights + units[index].cache) <= budget:
            budget -= size
            index += 1
        counts.append(index - start)
    return tuple(counts) if index == len(units) else None


def pack(
    units: Sequence[Unit],
    budgets: Sequence[int],
    *,
    spread: bool,
    first: int | None = None,
    counts: Sequence[int] | None = None,
) -> Placement | None:
    """The placement with the most weight bytes on devices, ``None`` where not even one exists.

    With ``spread`` (mixture of experts) as many layers as possible are on devices, with as many of their items as fit
    beside them. Without it a device takes whole layers and at most one whose items are partly elsewhere. ``first``
    fixes the first unit on devices; ``counts`` fixes the units per device. Items that their own device cannot hold go
    to another that can, else to the host.
    """
    if counts is not None:
        first = len(units) - sum(counts)
        chosen: tuple[int, ...] | None = tuple(counts)
        spread = True
    elif spread or first is not None:
        starts = range(len(units)) if first is None else (first,)
        chosen = next((found for start in starts if (found := _spread_counts(units, budgets, start))), None)
        spread = True
    else:
        chosen = _partial_counts(units, budgets)
    if chosen is None:
        return None
    placement = Placement(len(units) - sum(chosen), chosen)
    spilled: list[Item] = []
    sums = _Sums(units)
    for budget, (start, stop) in zip(budgets, placement.ranges(), strict=True):
        kept = sums.keep(start, stop, budget, spread)
        if kept is None:
            return None
        spilled += kept.spilled
    return _move(units, budgets, placement, spilled)


class _Sums:
    """Units with sums over ranges of them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.fixed = list(accumulate((unit.fixed for unit in units), initial=0))
        self.need = list(accumulate((unit.need for unit in units), initial=0))
        self.weights = list(accumulate((unit.weights for unit in units), initial=0))

    def keep(self, start: int, stop: int, budget: int, spread: bool) -> _Kept | None:
        """What a device with ``budget`` keeps of a range, ``None`` where it cannot have those units at all."""
        if start == stop:
            return _Kept(0, ())
        gap = budget - (self.need[stop] - self.need[start])
        if gap < 0:
            return None
        weights = self.weights[stop] - self.weights[start]
        over = weights - (self.fixed[stop] - self.fixed[start]) - gap
        if over <= 0:
            return _Kept(weights, ())
        units = self.units[start:stop]
        spilled = _spill_spread(units, gap) if spread else _spill_one(units, over)
        return None if spilled is None else _Kept(weights - sum(item.bytes for item in spilled), spilled)


def _spill_one(units: Sequence[Unit], over: int) -> tuple[Item, ...] | None:
    """The smallest choice of items of a single layer that frees ``over`` bytes."""
    choices = [choice for unit in units if unit.movable >= over for choice in unit.choices if choice[0] >= over]
    return min(choices, key=_size, default=(0, None))[1]


def _spill_spread(units: Sequence[Unit], gap: int) -> tuple[Item, ...]:
    """Items to spill so that the rest fits into ``gap``: whole layers stay first, then parts of as few as possible.

    Late layers are the ones to lose theirs: with some architectures llama.cpp's compute buffer on the first device is
    much smaller then (486 instead of 864 MiB on Qwen3-Next).
    """
    whole: list[Unit] = []
    rest: list[Unit] = []
    for unit in units:
        if unit.movable <= gap:
            gap -= unit.movable
            whole.append(unit)
        else:
            rest.append(unit)
    spilled: list[Item] = []
    while rest:
        alike = {unit.sizes: unit for unit in reversed(rest)}
        (size, kept), unit = max(
            ((choice, unit) for unit in alike.values() for choice in unit.choices if choice[0] <= gap),
            key=lambda pair: pair[0][0],
        )
        if not kept:
            break
        gap -= size
        rest.remove(unit)
        spilled += [item for item in unit.items if item not in kept]
    while exchange := _exchange(whole, rest, gap):
        leaving, entering = exchange
        gap -= entering.movable - leaving.movable
        whole[whole.index(leaving)], rest[rest.index(entering)] = entering, leaving
    return (*spilled, *(item for unit in rest for item in unit.items))


def _size(choice: tuple[int, tuple[Item, ...]]) -> int:
    return choice[0]


def _exchange(whole: Sequence[Unit], rest: Sequence[Unit], gap: int) -> tuple[Unit, Unit] | None:
    """A whole layer to give up for a larger one that uses the most of ``gap``; ``None`` where nothing is gained."""
    smaller = {unit.movable: unit for unit in whole}
    larger = {unit.movable: unit for unit in reversed(rest)}
    pairs = [(a, b) for a in smaller.values() for b in larger.values() if 0 < b.movable - a.movable <= gap]
    return max(pairs, key=lambda pair: pair[1].movable - pair[0].movable, default=None)


def _spread_counts(units: Sequence[Unit], budgets: Sequence[int], first: int) -> tuple[int, ...] | None:
    """Units per device with the most weights on devices, all from ``first`` on being there."""
    need = sum(unit.need for unit in units[first:])
    total = sum(max(budget, 0) for budget in budgets)
    movable = sum(unit.movable for unit in units[first:])
    if need > total:
        return None
    share = min(1.0, (total - need) / movable) if movable else 1.0
    centers = _proportional(units, budgets, first, share)
    for window in (_WINDOW, len(units)):
        counts = _best_boundaries(units, budgets, first, centers, window)
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
    units: Sequence[Unit], budgets: Sequence[int], first: int, centers: Sequence[int], window: int
) -> tuple[int, ...] | None:
    """Dynamic programme over the boundaries between devices, each within ``window`` layers of its center."""
    n_units, n_devices = len(units), len(budgets)
    sums = _Sums(units)
    # weights on devices up to a boundary, and the boundaries before it
    states: dict[int, tuple[int, tuple[int, ...]]] = {first: (0, ())}
    for device, budget in enumerate(budgets):
        last = device == n_devices - 1
        stops = (
            [n_units]
            if last
            else range(max(first, centers[device + 1] - window), min(n_units, centers[device + 1] + window) + 1)
        )
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (weights, counts) in states.items():
            for stop in stops:
                if stop < start:
                    continue
                kept = sums.keep(start, stop, budget, spread=True)
                if kept is None:
                    break
                if stop not in following or weights + kept.weights > following[stop][0]:
                    following[stop] = (weights + kept.weights, (*counts, stop - start))
        states = following
    return states[n_units][1] if n_units in states else None


def _partial_counts(units: Sequence[Unit], budgets: Sequence[int]) -> tuple[int, ...] | None:
    """Units per device with the most weights on devices, whole layers but for at most one on each."""
    # best weights of devices d.. for units stop.., built from the last device to the first
    states: dict[int, tuple[int, tuple[int, ...]]] = {len(units): (0, ())}
    sums = _Sums(units)
    for budget in reversed(budgets):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for stop, (weights, counts) in states.items():
            for start in range(stop, -1, -1):
                kept = sums.keep(start, stop, budget, spread=False)
                if kept is None:
                    break
                if start not in following or weights + kept.weights > following[start][0]:
                    following[start] = (weights + kept.weights, (stop - start, *counts))
        states = following
    best = max(states.values(), key=lambda state: state[0])
    return best[1] if sum(best[1]) else None


def _move(units: Sequence[Unit], budgets: Sequence[int], placement: Placement, spilled: Sequence[Item]) -> Placement:
    """Give every spilled item to a device that has room for it, nearest in size first, else to the host."""
    at_home = Placement(placement.first, placement.counts, tuple((item, HOST) for item in spilled))
    gaps = [
        budget - weights - cache
        for budget, weights, cache in zip(budgets, weights_on(units, at_home), caches_on(units, placement), strict=True)
    ]
    moved = []
    for item in sorted(spilled, key=lambda item: (-item.bytes, item.layer, item.stem)):
        target = min(
            (d for d, gap in enumerate(gaps) if gap >= item.bytes and placement.counts[d]),
            key=lambda d: gaps[d],
            default=HOST,
        )
        if target != HOST:
            gaps[target] -= item.bytes
        moved.append((item, target))
    moved.sort(key=lambda pair: (pair[1], pair[0].layer, pair[0].stem))
    return Placement(placement.first, placement.counts, tuple(moved))
