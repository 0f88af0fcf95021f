"""Choices of the items to spill from a device that has no room for all of its layers. Bytes.

Items of one size are alike. So the number of each size that stays is chosen first, then the layers that lose items.
``boundaries`` asks for such a choice for every range of layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fitter.planning.placing.layer_sizes import Item, Unit

_MAX_CHOICES = 20_000
"""With more choices of numbers than this for one device, the greedy choice is taken.

With that alone DeepSeek V3.1 on eight devices is 4.5 % slower."""

_MAX_FILLS_TRIED = 12
"""For so many of those choices, the fullest first, the layers that lose items are computed.

With four, Qwen3 30B-A3B on 8 GiB and 6 GiB has 3 % less context."""

MAX_COMBINED = 300
"""``_MAX_CHOICES`` for a programme over boundaries, which asks a thousand times.

With the greedy choice alone DeepSeek V3.1 on eight devices is 0.5 % slower."""


def spill_one(units: Sequence[Unit], over: int) -> tuple[Item, ...] | None:
    """Choose the fewest bytes of items of a single layer that free ``over`` bytes; ``None`` if no layer has enough."""
    choices = [choice for unit in units if unit.movable >= over for choice in unit.choices if choice[0] >= over]
    return min(choices, key=lambda choice: choice[0], default=(0, None))[1]


def spill_spread(units: Sequence[Unit], gap: int) -> tuple[Item, ...]:
    """Choose items to spill so that the others fit into ``gap``. As many layers as possible stay whole.

    Late layers lose their items: with some architectures llama.cpp's compute buffer on the first device is much smaller
    then (486 instead of 864 MiB on Qwen3-Next).
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
        (size, staying), unit = max(
            [(choice, unit) for unit in alike.values() for choice in unit.choices if choice[0] <= gap],
            key=lambda pair: pair[0][0],
        )
        if not staying:
            break
        gap -= size
        rest.remove(unit)
        spilled += [item for item in unit.items if item not in staying]
    while exchange := _exchange(whole, rest, gap):
        leaving, entering = exchange
        gap -= entering.movable - leaving.movable
        whole[whole.index(leaving)], rest[rest.index(entering)] = entering, leaving
    return (*spilled, *[item for unit in rest for item in unit.items])


def spill_exact(units: Sequence[Unit], gap: int, apart: int) -> tuple[Item, ...]:
    """Choose items to spill so that the others use the most of ``gap``. A layer that loses items costs ``apart`` bytes.

    The number of each size that stays is exact, where there are few sizes. Then few layers are chosen to lose items.
    """
    best = spill_spread(units, gap)
    movable = sum([unit.movable for unit in units])
    value = movable - sum([item.bytes for item in best]) - apart * len({item.layer for item in best})
    counts = Counter([size for unit in units for size in unit.sizes])
    if math.prod(count + 1 for count in counts.values()) > _MAX_CHOICES:
        return best
    in_a_layer = {size: max([unit.counts[size] for unit in units]) for size in counts}
    for size, choice in sorted(_fills(sorted(counts.items(), reverse=True), gap), reverse=True)[:_MAX_FILLS_TRIED]:
        if size - apart <= value:
            break
        lost = {item_size: counts[item_size] - n for item_size, n in choice}
        # if so many layers lose items, the choice is not better than the best
        too_many = -((value - size) // apart) if apart else len(units) + 1
        if max(-(-n // in_a_layer[item_size]) for item_size, n in lost.items()) >= too_many:
            continue
        if (spilled := _lose(units, lost, in_a_layer, too_many)) is not None:
            best, value = spilled, size - apart * len({item.layer for item in spilled})
    return best


@lru_cache(maxsize=4096)
def most_within(counts: tuple[tuple[int, int], ...], gap: int) -> int:
    """Find the most bytes within ``gap`` from pairs of an item size and its number of items.

    Cached: layers are alike, so many ranges ask the same.
    """
    return _most_within(counts, gap)


def _most_within(counts: Sequence[tuple[int, int]], gap: int) -> int:
    (size, count), *rest = counts
    most = min(count, gap // size) if size else count
    if not rest:
        return most * size
    best, others = 0, sum(other * number for other, number in rest)
    for n in range(most, -1, -1):
        if best == gap or n * size + others <= best:
            break
        best = max(best, n * size + _most_within(rest, gap - n * size))
    return best


def _fills(counts: Sequence[tuple[int, int]], gap: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Yield all choices that fit ``gap``: bytes, and pairs of a size and its number. The last size fills the gap."""
    (size, count), *rest = counts
    most = min(count, gap // size) if size else count
    for n in range(most, -1, -1) if rest else (most,):
        if not rest:
            yield n * size, ((size, n),)
            continue
        for others, choice in _fills(rest, gap - n * size):
            yield others + n * size, ((size, n), *choice)


def _lose(
    units: Sequence[Unit], numbers: dict[int, int], in_a_layer: dict[int, int], too_many: int
) -> tuple[Item, ...] | None:
    """Choose the given number of items of each size, greedily from few layers, late layers first.

    Args:
        in_a_layer: the most items of each size in a layer.
        too_many: the number of layers at which to give up, with ``None``.
    """
    remaining = dict(numbers)
    spilled: list[Item] = []
    rest = list(reversed(units))
    counts_of = {unit.sizes: unit.counts for unit in units}

    def takeable() -> dict[tuple[int, ...], int]:
        """Count the items that each kind of layer can lose."""
        return {
            sizes: sum([min(n, remaining.get(size, 0)) for size, n in counts.items()])
            for sizes, counts in counts_of.items()
        }

    can_lose, n_layers = takeable(), 0
    for wanted in range(max(len(unit.items) for unit in units), 0, -1):
        if max(can_lose.values()) < wanted:
            continue
        for unit in rest:
            if can_lose[unit.sizes] < wanted:
                continue
            n_layers += 1
            if n_layers == too_many:
                return None
            is_less = False
            for item in unit.items:
                if left := remaining.get(item.bytes, 0):
                    remaining[item.bytes] = left - 1
                    is_less |= left <= in_a_layer[item.bytes]
                    spilled.append(item)
            if is_less:
                can_lose = takeable()
        if not any(remaining.values()):
            break
        layers = {item.layer for item in spilled}
        rest = [unit for unit in rest if unit.index not in layers]
    return tuple(spilled)


def _exchange(whole: Sequence[Unit], rest: Sequence[Unit], gap: int) -> tuple[Unit, Unit] | None:
    """Find a whole layer and a larger one to take its place so that the most of ``gap`` is used; ``None`` if none."""
    smaller = {unit.movable: unit for unit in whole}
    larger = {unit.movable: unit for unit in reversed(rest)}
    pairs = [(a, b) for a in smaller.values() for b in larger.values() if 0 < b.movable - a.movable <= gap]
    return max(pairs, key=lambda pair: pair[1].movable - pair[0].movable, default=None)
