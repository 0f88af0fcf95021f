"""Packing of layers and tensors into budgets: pure functions, bytes in, placements out.

A budget is the bytes that a device may hold of weights and caches: free memory less margin and compute buffer. These
placements are proposals: nothing here decides that a plan fits. ``search.proposals`` chooses the function to call.
Devices have ranges of layers in their order (``tensor_split``): dynamic programmes, exact in their sums, choose the
boundaries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, repeat
from operator import add, sub
from typing import Literal

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.placement import Placement, gaps_of
from fitter.planning.placing.spill import Ranges

_WINDOW = 8
"""How many layers around its proportional place a boundary is tried at. Twelve change none of the 29 cases."""


_SAME = 1e-9
"""Sums of seconds that differ by this share are equal: without it Gemma 3 27B on four 16 GiB leaves the second idle."""


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

    def within(window: int, device: int, start: int) -> list[tuple[int, float]]:
        low, high = max(start, centers[device + 1] - window), min(len(units), centers[device + 1] + window)
        stops = range(low, high + 1) if device < len(budgets) - 1 else range(len(units), len(units) + 1)
        return ranges.costs(device, start, stops, budgets[device])

    found = (_boundaries(len(units), first, len(budgets), partial(within, window)) for window in (_WINDOW, len(units)))
    return next(filter(None, found), None)


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


Rated = Callable[[int, int], Iterable[tuple[int, float]]]
"""Returns for a device and its first unit the units behind its last one that are possible, each with its cost."""


def _boundaries(n_units: int, first: int, n_devices: int, rated: Rated, same: float = 0.0) -> tuple[int, ...] | None:
    """Count units on each device for the least cost in all, by a dynamic programme; ``None`` where none is possible.

    ``same``: costs that differ by this share are equal.
    """
    # by boundary: the cost of the devices before it, and their counts of units
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0.0, ())}
    for device in range(n_devices):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        # of equal devices the first one gets the layers
        for start in sorted(states):
            before, counts = states[start]
            for stop, cost in rated(device, start):
                if stop not in following or before + cost <= (1 + same) * following[stop][0]:
                    following[stop] = (before + cost, (*counts, stop - start))
        states = following
    return states[n_units][1] if n_units in states else None


Kind = Literal["layers", "all", "rest"]
"""Weights of layers on the host that go to a device: a kind of ``Unit.brought``."""


def _order(pair: tuple[Item, int]) -> tuple[int, int, str]:
    return pair[0].order


def first_found(numbers: range, of: Callable[[int], Placement | None]) -> Placement | None:
    """Return the placement of the first number that has one, as all after it have; ``None`` if none has one."""
    index = bisect_left(numbers, True, key=lambda number: of(number) is not None)
    return of(numbers[index]) if index < len(numbers) else None


def pack_whole(units: Sequence[Unit], budgets: Sequence[int], first: int = 0) -> Placement | None:
    """Place all units from ``first`` on, whole, with the same slack on every device; ``None`` where they do not fit.

    The slack protects against compute buffers that the next measurement finds larger.
    """

    def of(slack: int) -> Placement | None:
        counts = whole_counts(units, [budget - slack for budget in budgets], first)
        return None if counts is None else Placement(first, counts)

    return first_found(range(max([0, *budgets]), -1, -1), of)


def pack_fastest(
    units: Sequence[Unit],
    budgets: Sequence[int],
    seconds: Sequence[Sequence[float]],
    hop: float,
    first: int = 0,
    visits: Sequence[float] = (),
) -> Placement | None:
    """Place all units from ``first`` on, whole, where they take the least time; ``None`` where they do not fit.

    Exact, by a dynamic programme over the boundaries between devices. A device may get nothing.

    Args:
        seconds: for each device, the seconds of each unit there.
        hop: seconds to pass on to another device.
        visits: for each device, further seconds to go there and back, from anywhere.
    """
    size = list(accumulate((unit.weights + unit.cache for unit in units), initial=0))
    spent = [list(accumulate(each, initial=0.0)) for each in seconds]

    def rated(device: int, start: int) -> Iterator[tuple[int, float]]:
        yield start, 0.0
        visit = (hop if start > first else 0.0) + (visits[device] if visits else 0.0)
        for stop in range(start + 1, len(units) + 1):
            if size[stop] - size[start] > budgets[device]:
                break
            yield stop, spent[device][stop] - spent[device][start] + visit

    counts = _boundaries(len(units), first, len(budgets), rated, _SAME)
    return None if counts is None else Placement(first, counts)


def pack(
    ranges: Ranges,
    budgets: Sequence[int],
    first: int,
    counts: Sequence[int] | None = None,
    far: Collection[int] = (),
) -> Placement | None:
    """Place the units from ``first`` on on devices, with as many of their items as fit; ``None`` where none exists.

    Items that their own device has no room for go to another device, else to the host.

    Args:
        counts: units of each device; ``None`` to choose them.
        far: devices that take no items of other devices.
    """
    counts = spread_counts(ranges, budgets, first) if counts is None else counts
    if counts is None:
        return None
    spilled: list[tuple[Item, int]] = []
    gaps, start = [], first
    for home, (budget, count) in enumerate(zip(budgets, counts, strict=True)):
        stop = start + count
        items = ranges.items(start, stop, budget)
        if items is None:
            return None
        spilled += zip(items, repeat(home))
        held = ranges.need(start, stop) + ranges.movable(start, stop) - sum([item.bytes for item in items])
        gaps.append(budget - held)
        start = stop
    open_to = [d for d, count in enumerate(counts) if count and d not in far]
    moved: list[tuple[Item, int]] = []
    largest = max(gaps, default=-1)
    if largest < ranges.least:
        return Placement(first, tuple(counts), tuple(sorted([(item, HOST) for item, _ in spilled])))
    for item, home in sorted(spilled, key=_order):
        target = HOST
        if item.bytes <= largest:
            fitting = [d for d in open_to if gaps[d] >= item.bytes]
            target = home if gaps[home] >= item.bytes else min(fitting, key=gaps.__getitem__, default=HOST)
        if target != HOST:
            gaps[target] -= item.bytes
            largest = max(gaps)
        if target != home:
            moved.append((item, target))
    return Placement(first, tuple(counts), tuple(sorted(moved)))


def in_first_layers(
    units: Sequence[Unit], budgets: Sequence[int], placement: Placement, *, keeps_split: bool
) -> Placement | None:
    """Have the items of the first layers on the host, as llama.cpp's ``--n-cpu-moe`` does, of as few as possible.

    ``None`` where devices have no room for their layers even without items.

    Args:
        keeps_split: keep the layers of each device. Otherwise devices share what stays there.
    """

    def of(count: int) -> Placement | None:
        few = [replace(unit, items=()) if unit.index < count else unit for unit in units]
        kept = Placement(placement.first, placement.counts)
        packed = kept if keeps_split else pack_whole(few, budgets, placement.first)
        if packed is None or min(gaps_of(few, budgets, packed)) < 0:
            return None
        return _with(packed, [(item, HOST) for unit in units[placement.first : count] for item in unit.items])

    return first_found(range(placement.first + 1, len(units) + 1), of)


def bring(
    ranges: Ranges, budgets: Sequence[int], placement: Placement, kind: Kind, far: Collection[int] = ()
) -> Placement:
    """Fill the room that ``placement`` leaves on devices with weights of layers on the host, the last layer first.

    Args:
        kind: which weights. A layer's weights go together where they can, and next to those of the layer after it;
            else some of its items where they fit. Only ``layers`` come after items of the devices' layers: attention
            and shared experts of a host layer may save more.
        far: devices that get such weights only if they have a layer anyway.
    """
    needs, is_first = [ranges.need(start, stop) for start, stop in placement.ranges()], kind != "layers"
    gaps = list(map(sub, budgets, needs)) if is_first else gaps_of(ranges.units, budgets, placement)
    open_to = [d for d, count in enumerate(placement.counts) if count or d not in far]
    moved = _brought(ranges.units, gaps, placement.first, kind, open_to, is_in_parts=not is_first)
    if is_first and moved:
        packed = pack(ranges, list(map(add, gaps, needs)), placement.first, placement.counts)
        return placement if packed is None else _with(packed, moved)
    return _with(placement, moved)


def _with(placement: Placement, moved: Iterable[tuple[Item, int]]) -> Placement:
    return Placement(placement.first, placement.counts, tuple(sorted((*placement.moved, *moved))))


def _brought(
    units: Sequence[Unit],
    gaps: list[int],
    first: int,
    kind: Kind,
    open_to: Sequence[int],
    *,
    is_in_parts: bool,
) -> list[tuple[Item, int]]:
    """Bring weights of layers before ``first`` that fit together, then some items of a layer if ``is_in_parts``.

    Takes from ``gaps``.
    """
    moved: list[tuple[Item, int]] = []
    target = HOST
    for unit in reversed(units[:first]) if open_to else ():
        items, size = unit.brought[kind]
        if target == HOST or gaps[target] < size:
            target = max(open_to, key=gaps.__getitem__)
        if gaps[target] < size:
            size, items = unit.most_within(gaps[target]) if is_in_parts else (0, ())
            if not size:
                # layers are alike
                break
        gaps[target] -= size
        moved += zip(items, repeat(target))
    return moved


def pack_bare(
    units: Sequence[Unit],
    budgets: Sequence[int],
    first: int,
    bare: int,
    counts: Sequence[int] | None = None,
    far: Collection[int] = (),
) -> Placement | None:
    """Place units as ``pack`` does, of the first ``bare`` only the caches."""
    stripped = units[first : first + bare]
    if not all(unit.can_be_bare for unit in stripped):
        return None
    others = [*units[:first], *[unit.bare for unit in stripped], *units[first + bare :]]
    placement = pack(Ranges(others), budgets, first, counts, far)
    rest = [(item, HOST) for unit in stripped for item in (*unit.rest, *unit.items)]
    return placement and _with(placement, rest)
