"""Placements that a person can read: whole runs of layers, and not single tensors of many, are elsewhere. Bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import pack_whole
from fitter.planning.placing.placement import Placement, gaps_of


def in_runs(units: Sequence[Unit], budgets: Sequence[int], placement: Placement, *, whole: bool) -> Placement:
    """Change which items are apart from their layers, so that runs of layers have all of them in one place.

    Each device spills the items of its first layers (llama.cpp's ``--n-cpu-moe`` does so with experts), or of its last
    ones where layers have recurrent states: llama.cpp's compute buffer is smaller then. Layers on the host have all the
    weights on a device that most such layers have there, or none.

    Args:
        whole: spill only whole layers' items. Otherwise one layer of each device may spill a part of its items.
    """
    items = {item for unit in units for item in unit.items}
    brought = _brought(placement)
    kept = [pair for pair in placement.moved if pair[0].layer >= placement.first and pair[0] not in items]
    moved = [*brought, *kept]
    base = replace(placement, moved=tuple(moved))
    gaps = gaps_of(units, budgets, base)
    is_late = any(unit.state for unit in units)
    for (start, stop), gap in zip(placement.ranges(), gaps, strict=True):
        layers = [unit for unit in units[start:stop] if unit.items]
        moved += [(item, HOST) for item in _run(layers[::-1] if is_late else layers, -gap, whole=whole)]
    return replace(placement, moved=tuple(sorted(moved)))


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
        return packed if packed and is_within(few, budgets, packed) else None

    counts = range(placement.first + 1, len(units) + 1)
    index = bisect_left(counts, True, key=lambda count: of(count) is not None)
    if index == len(counts) or (packed := of(counts[index])) is None:
        return None
    items = [item for unit in units[placement.first : counts[index]] for item in unit.items]
    return replace(packed, moved=tuple(sorted((item, HOST) for item in items)))


def is_within(units: Sequence[Unit], budgets: Sequence[int], placement: Placement) -> bool:
    """Return whether every device has room for its weights and caches."""
    return min(gaps_of(units, budgets, placement), default=0) >= 0


def _brought(placement: Placement) -> list[tuple[Item, int]]:
    """List the weights of host layers on devices, of layers that have all there that most layers have."""
    layers: dict[int, list[tuple[Item, int]]] = {}
    for item, target in placement.moved:
        if item.layer < placement.first and target != HOST:
            layers.setdefault(item.layer, []).append((item, target))
    kinds = {layer: frozenset([item.stem.split(".", 2)[2] for item, _ in pairs]) for layer, pairs in layers.items()}
    if not kinds:
        return []
    ((usual, _),) = Counter(kinds.values()).most_common(1)
    return [pair for layer, pairs in layers.items() for pair in pairs if kinds[layer] == usual]


def _run(layers: Sequence[Unit], lacking: int, *, whole: bool) -> list[Item]:
    """List the items of the first ``layers`` that free the ``lacking`` bytes."""
    spilled: list[Item] = []
    for unit in layers:
        if lacking <= 0:
            break
        choices = [choice for choice in unit.choices if choice[0] >= lacking] if not whole else []
        size, items = min(choices, key=lambda choice: choice[0], default=(unit.movable, unit.items))
        spilled += items
        lacking -= size
    return spilled
