"""Where one device ends and the next begins: layers of 20 and 30 bytes that can leave, and 15 that cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.packing import spread_counts, whole_counts
from fitter.planning.placing.spill import Ranges, Times
from tests.support.cases import named_cases

UNITS = [
    Unit(i, 10, 5, (Item(i, f"blk.{i}.a", ("weight",), 20), Item(i, f"blk.{i}.b", ("weight",), 30))) for i in range(4)
]


def times(*seconds: float, by_byte: float = 0.1) -> Times:
    return Times(tuple((each,) * 4 for each in seconds), (by_byte,) * len(seconds))


@named_cases(
    ("two-each", [130, 130], 0, (2, 2)),
    ("a-byte-short", [129, 195], 0, (1, 3)),
    ("no-room", [129, 194], 0, None),
    ("the-last-two", [129, 65], 2, (1, 1)),
)
def test_whole(budgets: list[int], first: int, expected: tuple[int, ...] | None) -> None:
    assert whole_counts(UNITS, budgets, first) == expected


@named_cases(
    ("all-of-it", [130, 130], 0, None, (2, 2)),
    ("without-an-item", [30, 30], 0, None, (2, 2)),
    ("not-even-that", [29, 30], 0, None, None),
    ("enough-for-no-layer-more", [29, 31], 0, None, None),
    ("most-bytes", [35, 195], 0, None, (1, 3)),
    ("the-faster-one", [300, 300], 0, times(1.0, 2.0), (4, 0)),
    ("the-faster-one-is-the-second", [300, 300], 0, times(2.0, 1.0), (0, 4)),
    ("from-the-third-on", [300, 300], 2, times(2.0, 1.0), (0, 2)),
)
def test_spread(budgets: list[int], first: int, seconds: Times | None, expected: tuple[int, ...] | None) -> None:
    assert spread_counts(Ranges(UNITS, seconds), budgets, first) == expected


# --- against every choice there is


def unit_of(index: int, fixed: int, cache: int, sizes: Sequence[int]) -> Unit:
    items = tuple(Item(index, f"blk.{index}.{i}", ("weight",), size) for i, size in enumerate(sizes))
    return Unit(index, fixed, cache, items)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Unit], list[int], Times | None]:
    sizes = st.lists(st.integers(1, 9), max_size=2)
    drawn = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), sizes), min_size=1, max_size=5))
    units = [unit_of(i, *each) for i, each in enumerate(drawn)]
    budgets = draw(st.lists(st.integers(-1, 40), min_size=1, max_size=3))
    seconds = st.integers(0, 9).map(float)
    of_units = st.tuples(*[seconds] * len(units))
    times = st.builds(Times, st.tuples(*[of_units] * len(budgets)), st.tuples(*[seconds] * len(budgets)))
    return units, budgets, draw(st.none() | times)


def ways(n_units: int, n_devices: int, first: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(range(n_units + 1), repeat=n_devices):
        if sum(counts) == n_units - first:
            yield counts


def worth(case: tuple[Sequence[Unit], Sequence[int], Times | None], counts: Sequence[int]) -> float:
    """Bytes on the host, or seconds, less than none; nothing where a device cannot have what it is given."""
    units, budgets, times = case
    ranges = Ranges(units)
    total, stop = 0.0, len(units) - sum(counts)
    for device, (count, budget) in enumerate(zip(counts, budgets, strict=True)):
        start, stop = stop, stop + count
        spilled = ranges.spilled(start, stop, budget)
        if spilled is None:
            return -math.inf
        of_units, by_byte = (times.units[device], times.by_byte[device]) if times else ([0.0] * len(units), 1.0)
        total -= sum(of_units[start:stop]) + spilled * by_byte
    return total


@given(cases(), st.integers(0, 2))
def test_no_choice_of_boundaries_is_better(case: tuple[list[Unit], list[int], Times | None], first: int) -> None:
    units, budgets, times = case
    first = min(first, len(units))
    found = spread_counts(Ranges(units, times), budgets, first)
    every = {counts: worth(case, counts) for counts in ways(len(units), len(budgets), first)}
    best = max(every.values())
    assert (found is None) is (best == -math.inf)
    assert found is None or every[found] == best


LAYERS = [unit_of(i, 10, 0, (20,)) for i in range(90)]


@named_cases(
    ("large-and-small", [75 * 30, 15 * 30], 0, (75, 15)),
    ("small-and-large", [15 * 30, 75 * 30], 0, (15, 75)),
    ("from-the-twentieth-on", [60 * 30, 10 * 30], 20, (60, 10)),
    ("one-is-full", [60 * 30, -10, 30 * 30], 0, (60, 0, 30)),
    ("six", [15 * 30] * 6, 0, (15,) * 6),
    ("five-that-differ", [30 * 30, 5 * 30, 30 * 30, 5 * 30, 20 * 30], 0, (30, 5, 30, 5, 20)),
)
def test_boundaries_of_many_layers(budgets: list[int], first: int, expected: tuple[int, ...]) -> None:
    # exactly what all devices have: any other boundaries would have some items leave
    assert spread_counts(Ranges(LAYERS), budgets, first) == expected


def test_boundaries_where_layers_differ() -> None:
    units = [unit_of(i, 10, 0, (20,)) if i < 60 else unit_of(i, 20, 10, (120,)) for i in range(90)]
    assert spread_counts(Ranges(units), [60 * 30, 30 * 150], 0) == (60, 30)
    assert spread_counts(Ranges(units), [40 * 30, 20 * 30, 30 * 150], 0) == (40, 20, 30)
