"""Packing of layers and tensors into budgets: pure functions, bytes in, placements out.

A budget is the bytes that a device may hold of weights and caches: free memory less margin and compute buffer. These
placements are proposals: nothing here decides that a plan fits. ``search.proposals`` chooses the function to call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Literal

from fitter.planning.placing.boundaries import Sums, Times, partial_counts, spread_counts, whole_counts
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.placement import Placement, gaps_of

Bring = Literal["layers", "all", "dense", "rest"]
"""Weights of layers on the host that go to a device: a kind of ``Unit.brought``, or the ``rest``, which are ``dense``
weights and then ``others``."""

_SAME = 1e-9
"""Sums of seconds that differ by this share are equal: without it Gemma 3 27B on four 16 GiB leaves the second idle."""

_LARGEST_FIRST = attrgetter("order")


def pack_whole(units: Sequence[Unit], budgets: Sequence[int], first: int = 0) -> Placement | None:
    """Place all units from ``first`` on, whole, with the same slack on every device; ``None`` where they do not fit.

    The slack protects against compute buffers that the next measurement finds larger.
    """
    best = whole_counts(units, budgets, first)
    if best is None:
        return None
    low, high = 0, max([0, *budgets])
    while low < high:
        slack = (low + high + 1) // 2
        counts = whole_counts(units, [budget - slack for budget in budgets], first)
        if counts is None:
            high = slack - 1
        else:
            low, best = slack, counts
    return Placement(first, best)


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
    n_units = len(units)
    size = list(accumulate((unit.weights + unit.cache for unit in units), initial=0))
    states: dict[int, tuple[float, tuple[int, ...]]] = {first: (0.0, ())}
    for device, budget in enumerate(budgets):
        spent = list(accumulate(seconds[device], initial=0.0))
        visit = visits[device] if visits else 0.0
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        # of equal devices the first one gets the layers
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
                if stop not in following or total < (1 - _SAME) * following[stop][0]:
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
    apart: int | None = None,
    far: Collection[int] = (),
    bare: int = 0,
    times: Times | None = None,
) -> Placement | None:
    """Place the most weight bytes on devices; ``None`` where no placement exists.

    Items that their own device has no room for go to another device, else to the host.

    Args:
        spread: have as many layers as possible on devices, with as many of their items as fit (mixture of experts).
            Without it a device has whole layers, and at most one whose items are partly elsewhere.
        first: the first unit on devices; ``None`` to choose it.
        counts: units of each device; ``None`` to choose them.
        apart: bytes on a device that are worth one layer less with items elsewhere, to choose these items exactly.
        far: devices that take no items of other devices.
        bare: of so many layers, the first on devices, devices have only the caches, and the items that fit.
        times: choose the least time, as far as these tell, in place of the most bytes.
    """
    if bare:
        return _pack_bare(units, budgets, first or 0, counts, bare, apart, far, times)
    spread = spread or first is not None or counts is not None
    if counts is None and spread:
        starts = range(len(units)) if first is None else (first,)
        counts = next(filter(None, (spread_counts(units, budgets, start, times) for start in starts)), None)
    elif counts is None:
        counts = partial_counts(units, budgets, times)
    if counts is None:
        return None
    placement = Placement(len(units) - sum(counts), tuple(counts))
    spilled: list[Item] = []
    sums = Sums(units)
    for budget, (start, stop) in zip(budgets, placement.ranges(), strict=True):
        part = sums.fit(start, stop, budget, spread, apart)
        if part is None:
            return None
        spilled += part.spilled
    gaps = gaps_of(units, budgets, replace(placement, moved=tuple(zip(spilled, repeat(HOST)))))
    return replace(placement, moved=tuple(_placed(spilled, gaps, placement, _with_layers(placement, far))))


def bring_back(
    units: Sequence[Unit],
    budgets: Sequence[int],
    placement: Placement,
    bring: Bring,
    far: Collection[int] = (),
) -> Placement:
    """Fill the room that ``placement`` leaves on devices with weights of layers on the host, the last layer first.

    Args:
        bring: which weights. A layer's weights go together where they can, and next to those of the layer after it;
            else single items where they fit.
        far: devices that get such weights only if they have a layer anyway.
    """
    gaps, open_to = gaps_of(units, budgets, placement), _open_to(placement, far)
    moved, single = _brought(units, gaps, placement.first, bring, open_to)
    return replace(
        placement, moved=tuple(sorted((*placement.moved, *moved, *_placed(single, gaps, placement, open_to))))
    )


def bring_first(
    units: Sequence[Unit], budgets: Sequence[int], placement: Placement, bring: Bring, far: Collection[int] = ()
) -> Placement:
    """Bring weights of host layers before devices have items of their own layers, which get the room that is left.

    Attention and shared experts of a host layer may save more than experts.
    """
    ranges = placement.ranges()
    gaps = [budget - sum([unit.need for unit in units[a:b]]) for budget, (a, b) in zip(budgets, ranges, strict=True)]
    before = list(gaps)
    moved, _ = _brought(units, gaps, placement.first, bring, _open_to(placement, far))
    left = [budget - (size - gap) for budget, size, gap in zip(budgets, before, gaps, strict=True)]
    packed = pack(units, left, spread=True, counts=placement.counts) if moved else None
    return placement if packed is None else replace(packed, moved=tuple(sorted((*packed.moved, *moved))))


def _open_to(placement: Placement, far: Collection[int]) -> list[int]:
    return [d for d, count in enumerate(placement.counts) if count or d not in far]


def _brought(
    units: Sequence[Unit], gaps: list[int], first: int, bring: Bring, open_to: Sequence[int]
) -> tuple[list[tuple[Item, int]], list[Item]]:
    """Bring weights of layers before ``first`` that fit together; return them, and single items of the others.

    Takes from ``gaps``.
    """
    moved: list[tuple[Item, int]] = []
    single: list[Item] = []
    for kind in ("dense", "others") if bring == "rest" else (bring,):
        target = HOST
        for unit in reversed(units[:first]):
            items, size = unit.brought[kind]
            if target == HOST or gaps[target] < size:
                target = max(open_to, key=gaps.__getitem__, default=HOST)
            if target != HOST and gaps[target] >= size:
                gaps[target] -= size
                moved += zip(items, repeat(target))
            elif kind in ("layers", "all"):
                single += unit.items
    return moved, single


def _pack_bare(
    units: Sequence[Unit],
    budgets: Sequence[int],
    first: int,
    counts: Sequence[int] | None,
    bare: int,
    apart: int | None,
    far: Collection[int],
    times: Times | None,
) -> Placement | None:
    stripped = units[first : first + bare]
    if not all(unit.can_be_bare for unit in stripped):
        return None
    others = [*units[:first], *[unit.bare for unit in stripped], *units[first + bare :]]
    placement = pack(others, budgets, spread=True, first=first, counts=counts, apart=apart, far=far, times=times)
    if placement is None:
        return None
    rest = [(item, HOST) for unit in stripped for item in unit.rest]
    items = [item for unit in stripped for item in unit.items]
    moved = (*placement.moved, *rest)
    gaps = gaps_of(units, budgets, replace(placement, moved=(*moved, *zip(items, repeat(HOST)))))
    return replace(placement, moved=(*moved, *_placed(items, gaps, placement, _with_layers(placement, far))))


def _with_layers(placement: Placement, far: Collection[int]) -> list[int]:
    return [d for d, count in enumerate(placement.counts) if count and d not in far]


def _placed(
    spilled: Sequence[Item], gaps: list[int], placement: Placement, open_to: Collection[int]
) -> list[tuple[Item, int]]:
    """Give every item to the device with the smallest gap that holds it, else to the host. Takes from ``gaps``.

    Items that stay with their layer on the host are left out.
    """
    moved = []
    largest = max([gaps[d] for d in open_to], default=-1)
    for item in sorted(spilled, key=_LARGEST_FIRST):
        target = HOST
        if item.bytes <= largest:
            target = min([d for d in open_to if gaps[d] >= item.bytes], key=gaps.__getitem__)
            gaps[target] -= item.bytes
            largest = max([gaps[d] for d in open_to])
        elif item.layer < placement.first:
            continue
        moved.append((item, target))
    moved.sort()
    return moved
