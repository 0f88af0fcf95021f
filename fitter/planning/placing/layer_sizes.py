"""Sizes of a model's layers: weights and caches of each, as llama.cpp asked a buffer type for them. Bytes.

The placements of this package are made from these units; the search records them once for each context.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple

from fitter.llama.types import LAYOUT_DEVICE, Layout, LayoutEntry
from fitter.model.tensors import split_name

_CACHE_LAYER = re.compile(r"_l(\d+)(?:$|\D)")
_STATE = re.compile(r"^cache_(?:ple_)?[rs]_l")

HOST = -1
"""The host, where a device's index is expected."""


class _Item(NamedTuple):
    layer: int
    stem: str
    suffixes: tuple[str, ...]
    bytes: int


class Item(_Item):
    """Tensors of one layer that are placed together, apart from their layer: a weight with its bias and scales.

    ``stem`` is their common name (``blk.3.ffn_up_exps``), ``suffixes`` the ends of their names (``weight``, ``bias``).
    A tuple, since searches compare and sort some hundred thousand of them.
    """

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple([f"{self.stem}.{suffix}" for suffix in self.suffixes])

    @cached_property
    def tail(self) -> tuple[str, ...]:
        """Its names without the layer's number."""
        return tuple([name.split(".", 2)[2] for name in self.names])

    @cached_property
    def order(self) -> tuple[int, int, str]:
        """Sort key: the largest first, then by name."""
        return -self.bytes, self.layer, self.stem


@dataclass(frozen=True)
class Unit:
    """A layer, or the output as the last unit: ``n_gpu_layers`` and ``tensor_split`` place whole units.

    Attributes:
        fixed: weights that stay with their layer.
        cache: the layer's part of the KV cache and of recurrent states.
        items: weights that can leave their layer.
        state: the part of ``cache`` that is a recurrent state.
        rest: the tensors that ``fixed`` counts.
    """

    index: int
    fixed: int
    cache: int
    items: tuple[Item, ...] = ()
    state: int = 0
    rest: tuple[Item, ...] = ()

    def __hash__(self) -> int:
        return hash((self.index, self.fixed, self.cache))

    @property
    def can_be_bare(self) -> bool:
        """Whether a device can have the layer's cache without any of its weights. A recurrent state stays with them."""
        return bool(self.rest and self.cache) and not self.state

    @cached_property
    def bare(self) -> Unit:
        """The layer without its weights."""
        return Unit(self.index, self.fixed - sum(item.bytes for item in self.rest), self.cache)

    @cached_property
    def movable(self) -> int:
        """Weights that can leave their layer."""
        return sum([item.bytes for item in self.items])

    @cached_property
    def brought(self) -> dict[str, tuple[tuple[Item, ...], int]]:
        """Kinds of weights that go to a device together, with their bytes, where the layer is on the host.

        ``layers`` are the items, ``rest`` the other weights, ``all`` all weights.
        """
        kinds = {"layers": self.items, "all": (*self.items, *self.rest), "rest": self.rest}
        return {kind: (each, sum([item.bytes for item in each])) for kind, each in kinds.items()}

    @cached_property
    def _choices(self) -> list[tuple[int, tuple[Item, ...]]]:
        """Every subset of the items, with its bytes, the smallest first."""
        subsets = [subset for size in range(len(self.items) + 1) for subset in combinations(self.items, size)]
        return sorted([(sum([item.bytes for item in items]), items) for items in subsets], key=itemgetter(0))

    def least_of(self, size: int) -> tuple[int, tuple[Item, ...]]:
        """Choose the fewest bytes of the items that are ``size`` or more, at most all of them."""
        return self._choices[min(bisect_left(self._choices, size, key=itemgetter(0)), len(self._choices) - 1)]

    def most_within(self, size: int) -> tuple[int, tuple[Item, ...]]:
        """Choose the most bytes of the items that are ``size`` at most."""
        return self._choices[max(bisect_right(self._choices, size, key=itemgetter(0)), 1) - 1]

    @cached_property
    def weights(self) -> int:
        """All weights of the layer."""
        return self.fixed + self.movable

    @cached_property
    def need(self) -> int:
        """The least bytes that a device must hold to have this layer."""
        return self.fixed + self.cache


def stays(_: str) -> bool:
    """Let no tensor leave its layer."""
    return False


def units_of(
    layout: Layout, n_layer: int, is_movable: Callable[[str], bool] = stays, pinned: Mapping[str, int] | None = None
) -> tuple[Unit, ...]:
    """Add a recorded layout up to ``n_layer`` layers and the output.

    Tensors without a layer count for the output. Tensors that llama.cpp keeps on the host even with all layers on the
    device count for no unit.

    Args:
        is_movable: whether the tensor with this name may leave its layer.
        pinned: tensors with a fixed place, whatever their layer's place. They count for no unit.
    """
    return _units_of(layout, n_layer, is_movable, frozenset((pinned or {}).items()))


# Several parts of one fit ask for the same units, and so does the next fit of a model.
@lru_cache(maxsize=16)
def _units_of(
    layout: Layout, n_layer: int, is_movable: Callable[[str], bool], pinned: frozenset[tuple[str, int]]
) -> tuple[Unit, ...]:
    cache = [0] * (n_layer + 1)
    state = [0] * (n_layer + 1)
    weights = []
    for entry in layout.entries:
        if entry.buffer_type != LAYOUT_DEVICE:
            continue
        if entry.kind == "model":
            weights.append(entry)
            continue
        size = _aligned(entry.bytes, layout.alignment)
        index = min(cache_layer(entry.name, n_layer), n_layer)
        cache[index] += size
        state[index] += size if is_state(entry.name) else 0
    units = _without_caches(tuple(weights), layout.alignment, n_layer, is_movable, pinned)
    return tuple(
        # a recurrent layer's weights stay where its state is
        replace(unit, cache=cache[unit.index], state=state[unit.index], rest=() if state[unit.index] else unit.rest)
        for unit in units
    )


# contexts differ in their caches alone
@lru_cache(maxsize=16)
def _without_caches(
    weights: tuple[LayoutEntry, ...],
    alignment: int,
    n_layer: int,
    is_movable: Callable[[str], bool],
    pinned: frozenset[tuple[str, int]],
) -> tuple[Unit, ...]:
    pinned_names = {name for name, _ in pinned}
    fixed = [0] * (n_layer + 1)
    items: list[dict[str, tuple[list[str], int]]] = [{} for _ in range(n_layer + 1)]
    rest: list[dict[str, tuple[list[str], int]]] = [{} for _ in range(n_layer + 1)]
    for entry in weights:
        if entry.name in pinned_names:
            continue
        size = _aligned(entry.bytes, alignment)
        layer = layer_index(entry.name)
        index = n_layer if layer is None else min(layer, n_layer)
        is_item = layer is not None and is_movable(entry.name)
        if not is_item:
            fixed[index] += size
        if layer is not None and entry.name.count(".") > 2 and is_movable is not stays:
            stem, _, suffix = entry.name.rpartition(".")
            groups = (items if is_item else rest)[index]
            suffixes, total = groups.get(stem, ([], 0))
            groups[stem] = ([*suffixes, suffix], total + size)
    return tuple(
        Unit(index, fixed[index], 0, _items(index, items[index]), 0, _items(index, rest[index]))
        for index in range(n_layer + 1)
    )


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _items(layer: int, groups: Mapping[str, tuple[list[str], int]]) -> tuple[Item, ...]:
    return tuple(Item(layer, stem, tuple(suffixes), total) for stem, (suffixes, total) in sorted(groups.items()))


# names come back in every layout and every plan of a model
@lru_cache(maxsize=8192)
def layer_index(name: str) -> int | None:
    """Read the layer from a weight's name; ``None`` for a weight of no layer."""
    stack, layer, _ = split_name(name)
    return None if stack else layer


@lru_cache(maxsize=8192)
def is_state(name: str) -> bool:
    """Whether a cache tensor with this name is a recurrent state."""
    return _STATE.match(name) is not None


@lru_cache(maxsize=8192)
def cache_layer(name: str, default: int) -> int:
    """Read the layer from a cache tensor's name; ``default`` for a tensor of no layer."""
    match = _CACHE_LAYER.search(name)
    return int(match.group(1)) if match else default
