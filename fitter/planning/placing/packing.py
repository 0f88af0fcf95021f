"""Packing layers and tensors into budgets: pure functions, bytes in, placements out.

A budget is what a device may hold of weights and caches: its free memory less margin and compute buffer. Nothing here
decides that a plan fits; these are proposals, which llama.cpp then measures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from fitter.planning.placing.boundaries import Sums, Times, partial_counts, spread_counts, whole_counts
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.placement import Placement, caches_on, weights_on


def pack_whole(units: Sequence[Unit], budgets: Sequence[int], first: int = 0) -> Placement | None:
    """All units from ``first`` on, whole, with what is left spread over the devices; ``None`` where they do not fit.

    Leaving the same slack everywhere protects against compute buffers that the next measurement finds larger.
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
        chosen: tuple[int, ...] | None = tuple(counts)
        spread = True
    elif spread or first is not None:
        starts = range(len(units)) if first is None else (first,)
        chosen = next((found for start in starts if (found := spread_counts(units, budgets, start, times))), None)
        spread = True
    else:
        chosen = partial_counts(units, budgets, times)
    if chosen is None:
        return None
    placement = Placement(len(units) - sum(chosen), chosen)
    spilled: list[Item] = []
    sums = Sums(units)
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
