"""What a model's layers weigh: per layer, from the sizes that llama.cpp itself asked of a buffer type. Bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

from fitter.llama.types import LAYOUT_DEVICE, Layout

_LAYER = re.compile(r"^blk\.(\d+)\.")
_CACHE_LAYER = re.compile(r"_l(\d+)(?:$|\D)")
_STATE = re.compile(r"^cache_(?:ple_)?[rs]_l")

HOST = -1
"""Stands for the host where the index of a device is expected."""


@dataclass(frozen=True)
class Item:
    """Tensors of one layer that can be placed apart from it, together: a weight with its bias and scales.

    ``stem`` is the common name (``blk.3.ffn_up_exps``), ``suffixes`` what follows it (``weight``, ``bias``).
    """

    layer: int
    stem: str
    suffixes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Unit:
    """A layer, or as the last unit the output: what moves when ``n_gpu_layers`` or ``tensor_split`` changes.

    ``fixed``: weights that go where the layer goes, ``rest`` what they are. ``cache``: its part of the KV cache or
    recurrent state, of which ``state`` is the latter.
    """

    index: int
    fixed: int
    cache: int
    items: tuple[Item, ...] = ()
    state: int = 0
    rest: tuple[Item, ...] = ()

    @property
    def can_be_bare(self) -> bool:
        """Whether a layer's cache can be on a device without any of its weights: not where it is a recurrent state."""
        return bool(self.rest and self.cache) and not self.state

    @cached_property
    def bare(self) -> Unit:
        """The layer without its weights."""
        return Unit(self.index, self.fixed - sum(item.bytes for item in self.rest), self.cache)

    @cached_property
    def movable(self) -> int:
        """Weights that can be placed elsewhere."""
        return sum(item.bytes for item in self.items)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the items, in their order: layers with the same are alike."""
        return tuple(item.bytes for item in self.items)

    @cached_property
    def choices(self) -> tuple[tuple[int, tuple[Item, ...]], ...]:
        """Every choice of items, with its bytes."""
        chosen = [c for size in range(len(self.items) + 1) for c in combinations(self.items, size)]
        return tuple((sum(item.bytes for item in items), items) for items in chosen)

    @cached_property
    def weights(self) -> int:
        """All weights of the layer."""
        return self.fixed + self.movable

    @cached_property
    def need(self) -> int:
        """The least that a device must hold to have this layer at all."""
        return self.fixed + self.cache


def units_of(
    layout: Layout, n_layer: int, is_movable: Callable[[str], bool], pinned: Mapping[str, int] | None = None
) -> tuple[Unit, ...]:
    """Sum a recorded layout up into ``n_layer`` layers and the output.

    ``is_movable`` says of a tensor's name whether it may leave its layer. ``pinned`` holds tensors that are where they
    are, whatever their layer's place: they count for no layer. Tensors without a layer count for the output;
    those that llama.cpp keeps on the host even with all layers on the device count for none.
    """
    return _units_of(layout, n_layer, is_movable, frozenset((pinned or {}).items()))


def whole_units_of(layout: Layout, n_layer: int) -> tuple[Unit, ...]:
    """The same where no tensor leaves its layer."""
    return _units_of(layout, n_layer, _is_kept, frozenset())


def _is_kept(_: str) -> bool:
    return False


# Several parts of one fit ask for the same, and so does the next fit of a model.
@lru_cache(maxsize=16)
def _units_of(
    layout: Layout, n_layer: int, is_movable: Callable[[str], bool], placed: frozenset[tuple[str, int]]
) -> tuple[Unit, ...]:
    pinned = dict(placed)
    fixed = [0] * (n_layer + 1)
    cache = [0] * (n_layer + 1)
    state = [0] * (n_layer + 1)
    items: list[dict[str, tuple[list[str], int]]] = [{} for _ in range(n_layer + 1)]
    rest: list[dict[str, tuple[list[str], int]]] = [{} for _ in range(n_layer + 1)]
    for entry in layout.entries:
        if entry.buffer_type != LAYOUT_DEVICE:
            continue
        size = -(-entry.bytes // layout.alignment) * layout.alignment
        if entry.kind == "context":
            index = min(cache_layer(entry.name, n_layer), n_layer)
            cache[index] += size
            state[index] += size if is_state(entry.name) else 0
            continue
        if entry.name in pinned:
            continue
        layer = layer_index(entry.name)
        index = n_layer if layer is None else min(layer, n_layer)
        is_item = layer is not None and is_movable(entry.name)
        if not is_item:
            fixed[index] += size
        if layer is not None and entry.name.count(".") > 2:
            stem, _, suffix = entry.name.rpartition(".")
            kind = items if is_item else rest
            suffixes, total = kind[index].get(stem, ([], 0))
            kind[index][stem] = ([*suffixes, suffix], total + size)
    return tuple(
        Unit(
            index=index,
            fixed=fixed[index],
            cache=cache[index],
            items=_items(index, items[index]),
            state=state[index],
            # what a recurrent layer computes with goes where its state is
            rest=() if state[index] else _items(index, rest[index]),
        )
        for index in range(n_layer + 1)
    )


def _items(layer: int, found: Mapping[str, tuple[list[str], int]]) -> tuple[Item, ...]:
    return tuple(Item(layer, stem, tuple(suffixes), total) for stem, (suffixes, total) in sorted(found.items()))


def layer_index(name: str) -> int | None:
    """Layer of a weight by its name, ``None`` where it belongs to none."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else None


def is_state(name: str) -> bool:
    """Whether a tensor of a cache is a recurrent state, by its name."""
    return _STATE.match(name) is not None


def cache_layer(name: str, default: int) -> int:
    """Layer of a tensor of a cache by its name, ``default`` where it belongs to none."""
    match = _CACHE_LAYER.search(name)
    return int(match.group(1)) if match else default


def between(low: Sequence[Unit], n_ctx_low: int, high: Sequence[Unit], n_ctx_high: int, n_ctx: int) -> tuple[Unit, ...]:
    """Units at ``n_ctx``, caches interpolated between those of two recorded contexts (a proposal, never an answer)."""
    if n_ctx_high == n_ctx_low:
        return tuple(high)
    share = (n_ctx - n_ctx_low) / (n_ctx_high - n_ctx_low)
    return tuple(
        Unit(a.index, b.fixed, max(0, round(a.cache + (b.cache - a.cache) * share)), b.items, b.state, b.rest)
        for a, b in zip(low, high, strict=True)
    )
