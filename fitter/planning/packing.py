"""Packing layers and tensors into budgets: pure functions, bytes in, placements out.

A budget is what a device may hold of weights and caches: its free memory less margin and compute buffer. Nothing here
decides that a plan fits; these are proposals, which llama.cpp then measures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from fitter.planning.memory import HOST, Item, Unit
from fitter.planning.placement import Placement, caches_on, weights_on

_MAX_CHOICES = 20_000
"""How many choices of numbers of items are looked at for one device before a greedy choice has to do."""

_MAX_COMBINED = 300
"""The same for the dynamic programme, which asks a thousand times."""

_MAX_FILLS_TRIED = 12

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
    low, high = 0, max([0, *budgets])
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


def pack_fastest(
    units: Sequence[Unit],
    budgets: Sequence[int],
    seconds: Sequence[Sequence[float]],
    hop: float,
    first: int = 0,
    visits: Sequence[float] = (),
) -> Placement | None:
    """All units from ``first`` on, whole, where they take the least time; ``None`` where they do not fit.

    ``seconds`` has, for every device, those of each unit there; ``hop`` is what passing on to another device costs,
    ``visits`` what going to each and back costs beside that, wherever from.
    Exact, by a dynamic programme over the boundaries between devices; a device may get nothing.
    """
    n_units = len(units)
    size = list(accumulate((unit.weights + unit.cache for unit in units), initial=0))
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0.0, ())}
    for device, budget in enumerate(budgets):
        spent = list(accumulate(seconds[device], initial=0.0))
        visit = visits[device] if visits else 0.0
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        # of equal devices the first one has the layers
        for start, (before, counts) in sorted(states.items(), reverse=True):
            stop = start
            while stop <= n_units and (stop == start or size[stop] - size[start] <= budget):
                total = (
                    before
                    + spent[stop]
                    - spent[start]
                    + (hop if first < start < stop else 0.0)
                    + (visit if start < stop else 0.0)
                )
                if stop not in following or total < following[stop][0]:
                    following[stop] = (total, (*counts, stop - start))
                stop += 1
        states = following
    return Placement(first, states[n_units][1]) if n_units in states else None


def pack(
    units: Sequence[Unit],
    budgets: Sequence[int],
    *,
    spread: bool,
    first: int | None = None,
    counts: Sequence[int] | None = None,
    apart: int = 0,
    far: Collection[int] = (),
    bare: int = 0,
    times: Times | None = None,
) -> Placement | None:
    """The placement with the most weight bytes on devices, ``None`` where not even one exists.

    With ``times`` that which takes the least, as far as they tell: which device has what is theirs to say.
    With ``spread`` (mixture of experts) as many layers as possible are on devices, with as many of their items as fit
    beside them. Without it a device takes whole layers and at most one whose items are partly elsewhere. ``first``
    fixes the first unit on devices; ``counts`` fixes the units per device. Items that their own device cannot hold go
    to another that can and is none of ``far``, else to the host. ``apart``: how many bytes on a device are worth one
    layer less that has items elsewhere. Of the first ``bare`` layers on devices only the caches are there, and what
    items have room.
    """
    if bare:
        return _pack_bare(units, budgets, first or 0, bare, apart, far, times)
    if counts is not None:
        first = len(units) - sum(counts)
        chosen: tuple[int, ...] | None = tuple(counts)
        spread = True
    elif spread or first is not None:
        starts = range(len(units)) if first is None else (first,)
        chosen = next((found for start in starts if (found := _spread_counts(units, budgets, start, times))), None)
        spread = True
    else:
        chosen = _partial_counts(units, budgets, times)
    if chosen is None:
        return None
    placement = Placement(len(units) - sum(chosen), chosen)
    spilled: list[Item] = []
    sums = _Sums(units)
    for budget, (start, stop) in zip(budgets, placement.ranges(), strict=True):
        kept = sums.keep(start, stop, budget, spread, apart)
        if kept is None:
            return None
        spilled += kept.spilled
    return _move(units, budgets, placement, spilled, far)


def brought(
    units: Sequence[Unit],
    budgets: Sequence[int],
    placement: Placement,
    bring: Literal["items", "layers", "all"],
    far: Collection[int] = (),
) -> Placement:
    """``placement`` with weights of layers on the host where there is room, the last layer first.

    Single ``items``, those of whole ``layers``, or ``all`` weights of layers: these go together where they can, and
    next to those of the layer after it. To any device, but to those of ``far`` only where they have a layer anyway.
    """
    gaps = _gaps(units, budgets, placement)
    open_to = [d for d in range(len(gaps)) if placement.counts[d] or d not in far]
    moved = list(placement.moved)
    left: list[Item] = []
    target = HOST
    for unit in reversed(units[: placement.first]):
        if bring == "items":
            left += unit.items
            continue
        items = (*unit.items, *unit.rest) if bring == "all" else unit.items
        size = sum(item.bytes for item in items)
        if target == HOST or gaps[target] < size:
            target = max(open_to, key=lambda d: gaps[d], default=HOST)
        if target == HOST or gaps[target] < size:
            left += unit.items
            continue
        gaps[target] -= size
        moved += [(item, target) for item in items]
    moved += _placed(left, gaps, placement, open_to)
    moved.sort(key=lambda pair: (pair[1], pair[0].layer, pair[0].stem))
    return replace(placement, moved=tuple(moved))


def _gaps(units: Sequence[Unit], budgets: Sequence[int], placement: Placement) -> list[int]:
    used = zip(budgets, weights_on(units, placement), caches_on(units, placement), strict=True)
    return [budget - weights - cache for budget, weights, cache in used]


def _pack_bare(
    units: Sequence[Unit],
    budgets: Sequence[int],
    first: int,
    bare: int,
    apart: int,
    far: Collection[int],
    times: Times | None,
) -> Placement | None:
    stripped = units[first : first + bare]
    if not all(unit.can_be_bare for unit in stripped):
        return None
    others = [*units[:first], *(unit.bare for unit in stripped), *units[first + bare :]]
    found = pack(others, budgets, spread=True, first=first, apart=apart, far=far, times=times)
    if found is None:
        return None
    rest = tuple((item, HOST) for unit in stripped for item in unit.rest)
    items = [item for unit in stripped for item in unit.items]
    away = replace(found, moved=(*found.moved, *rest, *((item, HOST) for item in items)))
    room = _gaps(units, budgets, away)
    return replace(found, moved=(*found.moved, *rest, *_placed(items, room, found, _with_layers(found, far))))


class _Sums:
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
        counts = [(size, up[stop] - up[start]) for size, up in self._counts.items() if up[stop] > up[start]]
        if math.prod(count + 1 for _, count in counts[:-1]) > _MAX_COMBINED:
            kept = self.keep(start, stop, budget, spread=True)
            return kept and kept.weights
        return fixed + _most(counts, gap)

    def keep(self, start: int, stop: int, budget: int, spread: bool, apart: int | None = None) -> _Kept | None:
        """What a device with ``budget`` keeps of a range, ``None`` where it cannot have those units at all.

        ``apart``: choose exactly (see ``_spill_exact``), which takes longer.
        """
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
        if not spread:
            spilled = _spill_one(units, over)
        else:
            spilled = _spill_spread(units, gap) if apart is None else _spill_exact(units, gap, apart)
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


def _spill_exact(units: Sequence[Unit], gap: int, apart: int) -> tuple[Item, ...]:
    """Items to spill so that the rest uses the most of ``gap``, every layer that loses one counted as ``apart`` bytes.

    Exact in what is kept of each size, as far as there are few sizes; which layers lose their items is then chosen so
    that few do.
    """
    best = _spill_spread(units, gap)
    movable = sum(unit.movable for unit in units)
    value = movable - sum(item.bytes for item in best) - apart * len({item.layer for item in best})
    counts = Counter(size for unit in units for size in unit.sizes)
    if math.prod(count + 1 for count in counts.values()) > _MAX_CHOICES:
        return best
    for kept, choice in sorted(_fills(sorted(counts.items(), reverse=True), gap), reverse=True)[:_MAX_FILLS_TRIED]:
        if kept - apart <= value:
            break
        spilled = _lose(units, {size: counts[size] - n for size, n in choice})
        worth = kept - apart * len({item.layer for item in spilled})
        if worth > value:
            best, value = spilled, worth
    return best


def _most(counts: Sequence[tuple[int, int]], gap: int) -> int:
    """The most bytes within ``gap`` that so many items of each size can give."""
    (size, count), *rest = counts
    most = min(count, gap // size) if size else count
    if not rest:
        return most * size
    best = 0
    for n in range(most, -1, -1):
        best = max(best, n * size + _most(rest, gap - n * size))
        if best == gap:
            break
    return best


def _fills(counts: Sequence[tuple[int, int]], gap: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Bytes, and the number of items of each size, of every choice that fits ``gap`` with as many of the last as do."""
    (size, count), *rest = counts
    most = min(count, gap // size) if size else count
    for n in range(most, -1, -1) if rest else (most,):
        if not rest:
            yield n * size, ((size, n),)
            continue
        for kept, choice in _fills(rest, gap - n * size):
            yield kept + n * size, ((size, n), *choice)


def _lose(units: Sequence[Unit], numbers: dict[int, int]) -> tuple[Item, ...]:
    """So many items of each size, of as few layers as a greedy choice finds, late ones first."""
    left = dict(numbers)
    spilled: list[Item] = []
    rest = list(reversed(units))
    for wanted in range(max(len(unit.items) for unit in units), 0, -1):
        for unit in rest:
            if len(items := _takeable(unit, left)) >= wanted:
                for item in items:
                    left[item.bytes] -= 1
                spilled += items
        if not any(left.values()):
            break
        gone = {item.layer for item in spilled}
        rest = [unit for unit in rest if unit.index not in gone]
    return tuple(spilled)


def _takeable(unit: Unit, left: dict[int, int]) -> list[Item]:
    """Items of a layer of which there are some left to take."""
    taken: dict[int, int] = {}
    items = []
    for item in unit.items:
        if taken.get(item.bytes, 0) < left.get(item.bytes, 0):
            taken[item.bytes] = taken.get(item.bytes, 0) + 1
            items.append(item)
    return items


def _exchange(whole: Sequence[Unit], rest: Sequence[Unit], gap: int) -> tuple[Unit, Unit] | None:
    """A whole layer to give up for a larger one that uses the most of ``gap``; ``None`` where nothing is gained."""
    smaller = {unit.movable: unit for unit in whole}
    larger = {unit.movable: unit for unit in reversed(rest)}
    pairs = [(a, b) for a in smaller.values() for b in larger.values() if 0 < b.movable - a.movable <= gap]
    return max(pairs, key=lambda pair: pair[1].movable - pair[0].movable, default=None)


def _spread_counts(
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
        counts = _best_boundaries(_Sums(units, times), budgets, first, centers, window)
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
    sums: _Sums, budgets: Sequence[int], first: int, centers: Sequence[int], window: int
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


def _partial_counts(units: Sequence[Unit], budgets: Sequence[int], times: Times | None) -> tuple[int, ...] | None:
    """Units per device with the most weights on devices, or the least time: whole layers, but for one on each."""
    # what devices d.. are worth with units stop.., built from the last device to the first
    states: dict[int, tuple[float, tuple[int, ...]]] = {len(units): (0, ())}
    sums = _Sums(units, times)
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


def _move(
    units: Sequence[Unit],
    budgets: Sequence[int],
    placement: Placement,
    spilled: Sequence[Item],
    far: Collection[int] = (),
) -> Placement:
    """Give every spilled item to a device that has room for it, nearest in size first, else to the host."""
    at_home = Placement(placement.first, placement.counts, tuple((item, HOST) for item in spilled))
    gaps = _gaps(units, budgets, at_home)
    moved = _placed(spilled, gaps, placement, _with_layers(placement, far))
    return Placement(placement.first, placement.counts, tuple(moved))


def _with_layers(placement: Placement, far: Collection[int]) -> list[int]:
    return [d for d, count in enumerate(placement.counts) if count and d not in far]


def _placed(
    spilled: Sequence[Item], gaps: list[int], placement: Placement, open_to: Collection[int]
) -> list[tuple[Item, int]]:
    """A target for every item, those left out that stay with their layer on the host; takes from ``gaps``."""
    moved = []
    for item in sorted(spilled, key=lambda item: (-item.bytes, item.layer, item.stem)):
        target = min(
            (d for d in open_to if gaps[d] >= item.bytes),
            key=lambda d: gaps[d],
            default=HOST,
        )
        if target != HOST:
            gaps[target] -= item.bytes
        elif item.layer < placement.first:
            # that is where its layer is
            continue
        moved.append((item, target))
    moved.sort(key=lambda pair: (pair[1], pair[0].layer, pair[0].stem))
    return moved
