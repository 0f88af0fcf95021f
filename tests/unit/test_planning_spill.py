"""What a device spills of a range of layers: sizes in bytes, layers by number."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.spill import Ranges, Times
from tests.support.cases import cases, named_cases

NEED = 15


def layer(index: int, sizes: tuple[int, ...], state: int = 0) -> Unit:
    items = tuple(Item(index, f"blk.{index}.{j}", ("weight",), size) for j, size in enumerate(sizes))
    return Unit(index, 10, 5, items, state)


def layers(*sizes: tuple[int, ...], state: int = 0) -> list[Unit]:
    return [layer(index, each, state) for index, each in enumerate(sizes)]


def said(items: list[Item]) -> list[tuple[int, int]]:
    """Layer and size of each."""
    return sorted((item.layer, item.bytes) for item in items)


ALL = (20, 20, 30)


def whole(*indices: int) -> list[tuple[int, int]]:
    return [(index, size) for index in indices for size in ALL]


# bytes that lack room, and what is spilled: from the first layer, and from the last
@named_cases(
    ("room for all", 0, [], []),
    ("room for more", -9, [], []),
    ("the smallest that suffices", 1, [(0, 20)], [(2, 20)]),
    ("exactly the smallest", 20, [(0, 20)], [(2, 20)]),
    ("one larger", 21, [(0, 30)], [(2, 30)]),
    ("two", 31, [(0, 20), (0, 20)], [(2, 20), (2, 20)]),
    ("the largest and one more", 41, [(0, 20), (0, 30)], [(2, 20), (2, 30)]),
    ("a layer", 70, whole(0), whole(2)),
    ("a layer and a part", 71, [*whole(0), (1, 20)], [(1, 20), *whole(2)]),
    ("two layers", 140, whole(0, 1), whole(1, 2)),
    ("two layers and a part", 180, [*whole(0, 1), (2, 20), (2, 20)], [(0, 20), (0, 20), *whole(1, 2)]),
    ("all items", 210, whole(0, 1, 2), whole(0, 1, 2)),
)
def test_layers_in_a_row_and_a_part(lacking: int, first: list[tuple[int, int]], last: list[tuple[int, int]]) -> None:
    budget = 3 * (NEED + 70) - lacking
    for state, expected in ((0, first), (5, last)):
        ranges = Ranges(layers(ALL, ALL, ALL, state=state))
        assert said(ranges.items(0, 3, budget)) == expected
        assert ranges.spilled(0, 3, budget) == sum(size for _, size in expected)


@named_cases(
    ("the last two", (1, 3), 2 * 85 - 71, [*whole(1), (2, 20)]),
    ("one in the middle", (1, 2), 85 - 21, [(1, 30)]),
    ("none", (1, 1), -7, []),
)
def test_only_layers_of_the_range_spill(bounds: tuple[int, int], budget: int, expected: list[tuple[int, int]]) -> None:
    ranges = Ranges(layers(ALL, ALL, ALL))
    assert said(ranges.items(*bounds, budget)) == expected
    assert ranges.spilled(*bounds, budget) == sum(size for _, size in expected)


@cases((3 * NEED, 210), (3 * NEED - 1, None), (-1, None))
def test_layers_without_their_items_need_room(budget: int, expected: int | None) -> None:
    assert Ranges(layers(ALL, ALL, ALL)).spilled(0, 3, budget) == expected


@named_cases(
    ("the-first-that-have-any", 0, [(1, 30), (1, 40), (3, 30)]),
    ("the-last-that-have-any", 5, [(1, 30), (3, 30), (3, 40)]),
)
def test_layers_without_items_spill_nothing(state: int, expected: list[tuple[int, int]]) -> None:
    units = layers((), (40, 30), (), (40, 30), (), state=state)
    assert said(Ranges(units).items(0, 5, 5 * NEED + 140 - 71)) == expected


def test_one_layer_with_a_state_has_the_last_ones_spill() -> None:
    units = [layer(0, ALL), layer(1, ALL, state=5), layer(2, ALL)]
    assert said(Ranges(units).items(0, 3, 3 * 85 - 70)) == whole(2)


@named_cases(
    ("nothing", 0, []),
    ("the smallest", 1, [20]),
    ("between", 25, [30]),
    ("one rather than two of the same size", 50, [50]),
    ("two", 51, [20, 50]),
    ("all", 100, [20, 30, 50]),
    ("more than all", 101, [20, 30, 50]),
)
def test_the_fewest_bytes_that_suffice(size: int, expected: list[int]) -> None:
    total, items = layer(0, (50, 20, 30)).least_of(size)
    assert (total, sorted(item.bytes for item in items)) == (sum(expected), expected)


@named_cases(
    ("less than nothing", -1, 0),
    ("less than the smallest", 19, 0),
    ("the smallest", 20, 20),
    ("between", 49, 30),
    ("two", 79, 70),
    ("all but a byte", 99, 80),
    ("all", 999, 100),
)
def test_the_most_bytes_that_have_room(size: int, expected: int) -> None:
    total, items = layer(0, (50, 20, 30)).most_within(size)
    assert total == sum(item.bytes for item in items) == expected
    assert layer(0, ()).most_within(size) == layer(0, ()).least_of(size) == (0, ())


def test_a_range_is_rated_by_the_bytes_that_it_spills_or_the_seconds_that_it_takes() -> None:
    units, two, one = layers(ALL, ALL), 2 * 85 - 21, 85 - 21
    assert Ranges(units).costs(0, 0, range(1, 3), two) == [(1, 0), (2, 30)]
    assert Ranges(units).costs(0, 0, range(3), 2 * NEED - 1) == [(0, 0), (1, 70)], "two have no room"
    timed = Ranges(units, Times(((1.0, 2.0), (4.0, 8.0)), (0.5, 0.25)))
    for _ in range(2):
        assert timed.costs(0, 0, range(2, 3), two) == [(2, 18)]
        assert timed.costs(0, 1, range(2, 3), one) == [(2, 17)]
        assert timed.costs(1, 0, range(1, 3), two) == [(1, 4), (2, 19.5)]


def test_what_takes_time_spills_the_same() -> None:
    units = layers(ALL, ALL, ALL)
    times = Times(((1.0,) * 3,), (0.5,))
    for budget in range(3 * NEED, 3 * 85):
        assert Ranges(units, times).items(0, 3, budget) == Ranges(units).items(0, 3, budget)


# --- whatever the sizes are

SIZES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6)


@given(sizes=SIZES, has_states=st.booleans(), room=st.integers(0, 200), bounds=st.tuples(*[st.integers(0, 6)] * 2))
def test_what_is_spilled_is_what_the_rule_says(
    sizes: list[tuple[int, ...]], has_states: bool, room: int, bounds: tuple[int, int]
) -> None:
    units = layers(*sizes, state=5 * has_states)
    start, stop = sorted(min(bound, len(units)) for bound in bounds)
    here = units[start:stop]
    movable, need = sum(unit.movable for unit in here), sum(unit.need for unit in here)
    ranges = Ranges(units)
    items, spilled = ranges.items(start, stop, need + room), ranges.spilled(start, stop, need + room)
    assert spilled == sum(item.bytes for item in items) and len(set(items)) == len(items)
    assert movable - spilled <= room, "never more than the budget"
    lacking = movable - room
    for unit in reversed(here) if has_states else here:
        mine = [item for item in items if item.layer == unit.index]
        if lacking >= unit.movable:
            assert sorted(mine) == sorted(unit.items), "whole layers in a row"
        else:
            subsets = [each for n in range(len(unit.items) + 1) for each in combinations(unit.items, n)]
            least = min(size for each in subsets if (size := sum(item.bytes for item in each)) >= lacking)
            assert sum(item.bytes for item in mine) == least, "the smallest part that suffices"
        lacking -= sum(item.bytes for item in mine)
    assert lacking <= 0


@given(sizes=SIZES, budget=st.integers(0, 300))
def test_the_last_ones_are_the_first_ones_backwards(sizes: list[tuple[int, ...]], budget: int) -> None:
    early, late = Ranges(layers(*sizes)), Ranges(layers(*sizes[::-1], state=5))
    n_units = len(sizes)
    assert early.spilled(0, n_units, budget) == late.spilled(0, n_units, budget)
    if early.spilled(0, n_units, budget) is not None:
        mirrored = sorted((n_units - 1 - item.layer, item.bytes) for item in late.items(0, n_units, budget))
        assert mirrored == said(early.items(0, n_units, budget))


def test_a_state_beside_a_cache_is_enough() -> None:
    unit = replace(layer(1, ALL), cache=7, state=2)
    assert said(Ranges([layer(0, ALL), unit]).items(0, 2, 20 + 7 + 5 + 70)) == whole(1)
