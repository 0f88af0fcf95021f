"""Placements in whole runs of layers: six layers of 81 bytes of weights, 71 of them items, with 5 of cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.placement import Placement
from fitter.planning.placing.runs import in_first_layers, in_runs, is_within

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


def where(placement: Placement) -> dict[tuple[int, str], int]:
    return {(item.layer, item.stem.rpartition("_")[2]): target for item, target in placement.moved}


SPREAD = Placement(0, (7,), ((UNITS[1].items[0], HOST), (UNITS[4].items[1], HOST), (UNITS[5].items[2], HOST)))
PARTS = {
    "a whole layer, though a part is enough": (ALL - 71, True, {(0, "down"), (0, "gate"), (0, "up")}),
    "a layer": (ALL - 71, False, {(0, "down"), (0, "gate"), (0, "up")}),
    "the smallest item that is enough": (ALL - 20, False, {(0, "gate")}),
    "a byte more": (ALL - 21, False, {(0, "up")}),
    "a layer, and the smallest part of the next": (
        *(ALL - 71 - 45, False),
        {(0, "down"), (0, "gate"), (0, "up"), (1, "down"), (1, "gate")},
    ),
    "nothing": (ALL, False, set()),
}


@pytest.mark.parametrize(("budget", "whole", "spilled"), PARTS.values(), ids=PARTS)
def test_a_device_spills_its_first_layers(budget: int, whole: bool, spilled: set[tuple[int, str]]) -> None:
    found = in_runs(UNITS, [budget], SPREAD, whole=whole)
    assert where(found) == dict.fromkeys(spilled, HOST)
    assert (found.first, found.counts) == (0, (7,)) and is_within(UNITS, [budget], found)
    assert not is_within(UNITS, [budget - 72], found)


def test_each_device_spills_its_own() -> None:
    placement = Placement(0, (3, 4), SPREAD.moved)
    found = in_runs(UNITS, [3 * WHOLE - 71, 3 * WHOLE + OUTPUT - 71], placement, whole=True)
    assert found.moved == moved((0, HOST), (3, HOST))


def test_layers_with_states_lose_their_last_ones() -> None:
    units = [replace(unit, state=5) for unit in UNITS]
    assert in_runs(units, [ALL - 71], SPREAD, whole=True).moved == moved((5, HOST))


def test_layers_on_the_host_have_there_what_most_of_them_have() -> None:
    single = ((UNITS[0].items[0], 0),)
    placement = Placement(3, (4,), (*single, *moved((1, 0), (2, 0))))
    budget = 3 * WHOLE + OUTPUT + 2 * 71
    found = in_runs(UNITS, [budget + 30], placement, whole=True)
    assert found.moved == moved((1, 0), (2, 0)), "a single tensor stays"
    # what is brought to a device takes room of its own layers
    assert in_runs(UNITS, [budget - 1], placement, whole=True).moved == moved((1, 0), (2, 0), (3, HOST))


def test_weights_of_attention_that_are_apart_stay_so() -> None:
    bare = tuple((item, HOST) for item in UNITS[2].rest)
    placement = Placement(2, (5,), (*bare, *moved((3, HOST))))
    found = in_runs(UNITS, [4 * WHOLE + OUTPUT - 10 + 5 - 71], placement, whole=True)
    assert {pair for pair in found.moved if pair[0] in UNITS[2].rest} == set(bare)


FIRST_LAYERS: dict[str, tuple[list[int], Placement, bool, tuple[tuple[int, ...], list[int]] | None]] = {
    "one layer is enough": ([ALL - 71], SPREAD, True, ((7,), [0])),
    "a byte less": ([ALL - 72], SPREAD, True, ((7,), [0, 1])),
    "all of them": ([ALL - 6 * 71], SPREAD, True, ((7,), [0, 1, 2, 3, 4, 5])),
    "without room for the rest": ([ALL - 6 * 71 - 1], SPREAD, True, None),
    "after layers on the host": ([4 * WHOLE + OUTPUT - 71], Placement(2, (5,)), True, ((5,), [2])),
    "each device keeps its layers": (
        [3 * WHOLE, 3 * WHOLE + OUTPUT - 71],
        Placement(0, (3, 4)),
        True,
        ((3, 4), [0, 1, 2, 3]),
    ),
    "the first takes more layers": (
        [3 * WHOLE, 3 * WHOLE + OUTPUT - 71],
        Placement(0, (3, 4)),
        False,
        ((4, 3), [0, 1]),
    ),
}


@pytest.mark.parametrize(("budgets", "placement", "keeps_split", "expected"), FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_the_items_of_the_first_layers(
    budgets: list[int],
    placement: Placement,
    keeps_split: bool,
    expected: tuple[tuple[int, ...], list[int]] | None,
) -> None:
    found = in_first_layers(UNITS, budgets, placement, keeps_split=keeps_split)
    if expected is None or found is None:
        assert found is expected
        return
    counts, layers = expected
    assert found == Placement(placement.first, counts, moved(*((layer, HOST) for layer in layers)))
    assert is_within(UNITS, budgets, found)
