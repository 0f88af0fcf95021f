"""Which items leave a device that cannot hold all of its layers: choices of single tensors. Bytes.

Items of one size are alike, so that a choice is how many of each size stay; only then is said which layers lose theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fitter.planning.placing.layer_sizes import Item, Unit

_MAX_CHOICES = 20_000
"""How many choices of numbers of items are looked at for one device before a greedy choice has to do."""

_MAX_FILLS_TRIED = 12
"""For how many of those, the fullest first, it is found out which layers lose their items."""

MAX_COMBINED = 300
"""The same as the first for a programme over boundaries, which asks a thousand times."""


def spill_one(units: Sequence[Unit], over: int) -> tuple[Item, ...] | None:
    """The smallest choice of items of a single layer that frees ``over`` bytes."""
    choices = [choice for unit in units if unit.movable >= over for choice in unit.choices if choice[0] >= over]
    return min(choices, key=_size, default=(0, None))[1]


def spill_spread(units: Sequence[Unit], gap: int) -> tuple[Item, ...]:
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


def spill_exact(units: Sequence[Unit], gap: int, apart: int) -> tuple[Item, ...]:
    """Items to spill so that the rest uses the most of ``gap``, every layer that loses one counted as ``apart`` bytes.

    Exact in what is kept of each size, as far as there are few sizes; which layers lose their items is then chosen so
    that few do.
    """
    best = spill_spread(units, gap)
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


@lru_cache(maxsize=4096)
def most_within(counts: tuple[tuple[int, int], ...], gap: int) -> int:
    """The most bytes within ``gap`` that so many items of each size can give.

    Kept, since layers are alike: the same is asked for many ranges of them.
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
