"""Placements in whole runs of layers: six layers of 81 bytes of weights, 71 of them items, with 5 of cache."""

from __future__ import annotations

from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import in_first_layers
from fitter.planning.placing.placement import Placement, gaps_of
from tests.support.cases import cases

SIZES = (("down", 30), ("gate", 20), ("up", 21))
OUTPUT = 15


def layer(index: int) -> Unit:
    items = tuple(Item(index, f"blk.{index}.ffn_{name}", ("weight",), size) for name, size in SIZES)
    return Unit(index, 10, 5, items, rest=(Item(index, f"blk.{index}.attn_q", ("weight",), 10),))


UNITS = [*map(layer, range(6)), Unit(6, OUTPUT, 0)]
WHOLE = 86
ALL = 6 * WHOLE + OUTPUT


def moved(*pairs: tuple[int, int]) -> tuple[tuple[Item, int], ...]:
    """All items of layers, with their targets."""
    return tuple((item, target) for index, target in pairs for item in UNITS[index].items)


SPREAD = Placement(0, (7,), ((UNITS[1].items[0], HOST), (UNITS[4].items[1], HOST), (UNITS[5].items[2], HOST)))
FIRST_LAYERS: dict[str, tuple[list[int], Placement, bool, tuple[tuple[int, ...], list[int]] | None]] = {
    "one layer is enough": ([ALL - 71], SPREAD, True, ((7,), [0])),
    "a byte less": ([ALL - 72], SPREAD, True, ((7,), [0, 1])),
    "all of them": ([ALL - 6 * 71], SPREAD, True, ((7,), [0, 1, 2, 3, 4, 5])),
    "without room for the rest": ([ALL - 6 * 71 - 1], SPREAD, True, None),
    "after layers on the host": ([4 * WHOLE + OUTPUT - 71], Placement(2, (5,)), True, ((5,), [2])),
    "each keeps its layers": ([3 * WHOLE, 3 * WHOLE + OUTPUT - 71], Placement(0, (3, 4)), True, ((3, 4), [0, 1, 2, 3])),
    "the first takes more": ([3 * WHOLE, 3 * WHOLE + OUTPUT - 71], Placement(0, (3, 4)), False, ((4, 3), [0, 1])),
}


@cases(FIRST_LAYERS)
def test_the_items_of_the_first_layers(
    budgets: list[int], placement: Placement, keeps_split: bool, expected: tuple[tuple[int, ...], list[int]] | None
) -> None:
    found = in_first_layers(UNITS, budgets, placement, keeps_split=keeps_split)
    if expected is None or found is None:
        assert found is expected
        return
    counts, layers = expected
    assert found == Placement(placement.first, counts, moved(*((layer, HOST) for layer in layers)))
    assert min(gaps_of(UNITS, budgets, found)) >= 0
