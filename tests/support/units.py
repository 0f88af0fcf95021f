"""Small models of layers with a few bytes each, for the packing."""

from __future__ import annotations

from collections.abc import Sequence

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.placement import Placement, caches_on, weights_on


def layer(index: int, fixed: int = 10, cache: int = 5, items: tuple[int, ...] = (20, 20, 30)) -> Unit:
    """A layer with feed-forward weights of these sizes as its items."""
    names = ("gate", "up", "down")
    return Unit(
        index,
        fixed,
        cache,
        tuple(Item(index, f"blk.{index}.ffn_{n}", ("weight",), size) for n, size in zip(names, items, strict=False)),
    )


def model(n_layer: int, output: int = 15) -> list[Unit]:
    """Layers of 80 bytes of weights and 5 of cache, and an output."""
    return [*map(layer, range(n_layer)), Unit(n_layer, output, 0)]


def is_within(units: Sequence[Unit], placement: Placement, budgets: Sequence[int]) -> bool:
    """Say whether no device has more than its budget."""
    used = map(sum, zip(weights_on(units, placement), caches_on(units, placement), strict=True))
    return all(size <= max(budget, 0) for size, budget in zip(used, budgets, strict=True))
