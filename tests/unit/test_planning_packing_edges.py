"""Packing by time, and into gaps, at its edges: layers of 10 bytes of weights with a cache, items of 20 and 30."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import bring, pack, pack_fastest
from fitter.planning.placing.placement import Placement
from fitter.planning.placing.spill import Ranges, Times
from tests.support.cases import named_cases


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=2, max_size=5),
    budgets=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    speeds=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    hop=st.integers(0, 4),
    visits=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    first=st.integers(0, 2),
)
def test_caches_visits_and_what_stays_on_the_host_count(
    sizes: list[tuple[int, int]], budgets: list[int], speeds: list[int], hop: int, visits: list[int], first: int
) -> None:
    units = [Unit(i, *size) for i, size in enumerate(sizes)]
    seconds = [[float(unit.weights * speed) for unit in units] for speed in speeds[: len(budgets)]]

    def time_of(counts: tuple[int, ...]) -> float | None:
        stop, spent = first, 0.0
        for d, count in enumerate(counts):
            start, stop = stop, stop + count
            if sum(unit.weights + unit.cache for unit in units[start:stop]) > budgets[d] and count:
                return None
            spent += sum(seconds[d][start:stop]) + (visits[d] if count else 0) + (hop if count and start > first else 0)
        return spent

    every = [c for c in product(range(len(units) + 1), repeat=len(budgets)) if sum(c) == len(units) - first]
    times = [time for counts in every if (time := time_of(counts)) is not None]
    found = pack_fastest(units, budgets, seconds, float(hop), first, visits[: len(budgets)])
    if found is None:
        assert not times
    else:
        assert (found.first, time_of(found.counts)) == (first, min(times))


@named_cases(
    ("one is enough, and the faster one is taken", [100, 100], [[10] * 3, [20] * 3], 1, (), (3, 0)),
    ("wherever it is", [100, 100], [[20] * 3, [10] * 3], 1, (), (0, 3)),
    ("equal ones: one alone", [100, 100], [[10] * 3, [10] * 3], 1, (), (3, 0)),
    ("both are needed, and the faster one is filled", [25, 100], [[10] * 3, [20] * 3], 1, (), (2, 1)),
    ("a byte short", [19, 100], [[10] * 3, [20] * 3], 1, (), (1, 2)),
    ("nothing holds it", [19, 9], [[10] * 3, [20] * 3], 1, (), None),
    ("a hop shorter than what it saves", [99, 99], [[1, 1, 3], [3, 3, 1]], 1, (), (2, 1)),
    ("a longer one", [99, 99], [[1, 1, 3], [3, 3, 1]], 3, (), (3, 0)),
    ("nothing is visited", [20, 99], [[1] * 3, [1.2] * 3], 0, (), (2, 1)),
    ("a visit shorter than what it saves", [99, 99], [[2] * 3, [3] * 3], 0, (2.9, 0), (3, 0)),
    ("a visit longer than that", [99, 99], [[2] * 3, [3] * 3], 0, (3.1, 0), (0, 3)),
)
def test_the_fastest_devices(
    budgets: list[int],
    seconds: list[list[float]],
    hop: float,
    visits: tuple[float, ...],
    counts: tuple[int, ...] | None,
) -> None:
    found = pack_fastest([Unit(i, 10, 0) for i in range(3)], budgets, seconds, hop, visits=visits)
    assert found == (None if counts is None else Placement(0, counts))


def layer(index: int) -> Unit:
    items = (Item(index, f"blk.{index}.a", ("weight",), 20), Item(index, f"blk.{index}.b", ("weight",), 30))
    return Unit(index, 10, 5, items)


UNITS = [*map(layer, range(4)), Unit(4, 15, 0)]
WHOLE = 65


def whole(*targets: int) -> dict[str, int]:
    """All items of the first layers, and where each layer is."""
    return {f"blk.{layer}.{name}": target for layer, target in enumerate(targets) for name in "ab"}


@named_cases(
    ("by bytes", None, (2, 3)),
    ("the first is faster", (1.0, 9.0), (5, 0)),
    ("the second is faster", (9.0, 1.0), (0, 5)),
    ("the first is faster by less than items on the host cost", (2.5, 4.0), (2, 3)),
)
def test_layers_where_they_take_the_least_time(seconds: tuple[float, float] | None, counts: tuple[int, ...]) -> None:
    """Each device holds two layers and the output; with all on one, 130 bytes are on the host, for 6.5 seconds."""
    times = Times(tuple((each,) * 5 for each in seconds), (0.05, 0.05)) if seconds else None
    budgets = [2 * WHOLE + 15, 2 * WHOLE + 15]
    found = pack(Ranges(UNITS, times), budgets, 0)
    assert found is not None and found.counts == counts


@named_cases(
    ("no room", (19, 0), {}),
    ("for the small item", (20, 0), {"blk.1.a": 0}),
    ("for the small item, twice", (20, 20), {"blk.1.a": 0, "blk.0.a": 1}),
    ("for the large item", (0, 30), {"blk.1.b": 1}),
    ("the last layer where the larger gap is", (20, 30), {"blk.1.b": 1, "blk.0.a": 0}),
    ("the large item, twice", (30, 40), {"blk.1.b": 1, "blk.0.b": 0}),
    ("for both of a layer", (50, 0), {"blk.1.b": 0, "blk.1.a": 0}),
    ("for a layer, and a part of the one before", (50, 20), {"blk.1.b": 0, "blk.1.a": 0, "blk.0.a": 1}),
    ("a byte too little for a layer", (49, 49), {"blk.1.b": 0, "blk.0.b": 1}),
    ("for a layer each, the last one where the larger gap is", (50, 51), whole(0, 1)),
    ("the larger gap is the first", (51, 50), whole(1, 0)),
    ("for two in one", (0, 100), whole(1, 1)),
    ("next to one another as far as they go", (60, 100), whole(1, 1)),
)
def test_items_are_brought_where_there_is_room(more: tuple[int, int], expected: dict[str, int]) -> None:
    base = Placement(2, (1, 2))
    budgets = [WHOLE + more[0], WHOLE + 15 + more[1]]
    found = bring(Ranges(UNITS), budgets, base, "layers")
    assert {item.stem: target for item, target in found.moved} == expected


@named_cases(("none is far", (), 1), ("it has no layer and is far", (1,), None))
def test_nothing_is_brought_to_a_far_device_without_a_layer(far: tuple[int, ...], target: int | None) -> None:
    found = bring(Ranges(UNITS), [2 * WHOLE + 15, 20], Placement(2, (3, 0)), "layers", far)
    assert [where for _, where in found.moved] == ([] if target is None else [target])
    at_hand = bring(Ranges(UNITS), [WHOLE, WHOLE + 15 + 20], Placement(2, (1, 2)), "layers", far)
    assert [where for _, where in at_hand.moved] == [1], "a far device that has a layer anyway"


def test_an_item_that_leaves_its_device_is_said_to_be_on_the_host() -> None:
    found = pack(Ranges(UNITS), [2 * WHOLE + 15 - 1], 2)
    assert found is not None and [(item.bytes, target) for item, target in found.moved] == [(20, HOST)]
    assert replace(found, moved=()) == Placement(2, (3,))
