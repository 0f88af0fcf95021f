"""Where one device ends and the next begins: layers of 20 and 30 bytes that can leave, and 15 that cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.placing.boundaries import Sums, Times, partial_counts, spread_counts, whole_counts
from fitter.planning.placing.layer_sizes import Item, Unit

UNITS = [
    Unit(i, 10, 5, (Item(i, f"blk.{i}.a", ("weight",), 20), Item(i, f"blk.{i}.b", ("weight",), 30))) for i in range(4)
]


def times(*seconds: float, host: float = 9.0, by_byte: float = 0.1) -> Times:
    return Times(tuple((each,) * 4 for each in seconds), (host,) * 4, (by_byte,) * len(seconds))


@pytest.mark.parametrize(
    ("budgets", "first", "expected"),
    [
        pytest.param([130, 130], 0, (2, 2), id="two-each"),
        pytest.param([129, 195], 0, (1, 3), id="a-byte-short"),
        pytest.param([129, 194], 0, None, id="no-room"),
        pytest.param([129, 65], 2, (1, 1), id="the-last-two"),
    ],
)
def test_whole(budgets: list[int], first: int, expected: tuple[int, ...] | None) -> None:
    assert whole_counts(UNITS, budgets, first) == expected


@pytest.mark.parametrize(
    ("budgets", "first", "seconds", "expected"),
    [
        pytest.param([130, 130], 0, None, (2, 2), id="all-of-it"),
        pytest.param([30, 30], 0, None, (2, 2), id="without-an-item"),
        pytest.param([29, 30], 0, None, None, id="not-even-that"),
        pytest.param([29, 31], 0, None, None, id="enough-for-no-layer-more"),
        pytest.param([35, 195], 0, None, (1, 3), id="most-bytes"),
        pytest.param([300, 300], 0, times(1.0, 2.0), (4, 0), id="the-faster-one"),
        pytest.param([300, 300], 0, times(2.0, 1.0), (0, 4), id="the-faster-one-is-the-second"),
        pytest.param([300, 300], 2, times(2.0, 1.0), (0, 2), id="from-the-third-on"),
    ],
)
def test_spread(budgets: list[int], first: int, seconds: Times | None, expected: tuple[int, ...] | None) -> None:
    assert spread_counts(UNITS, budgets, first, seconds) == expected


@pytest.mark.parametrize(
    ("budgets", "seconds", "expected"),
    [
        pytest.param([130], None, (2,), id="whole-layers"),
        pytest.param([145], None, (3,), id="and-one-without-items"),
        pytest.param([144], None, (2,), id="not-that-one"),
        pytest.param([130, 65], None, (2, 1), id="on-two"),
        pytest.param([14], None, None, id="nothing"),
        pytest.param([145], times(1.0, host=1.5), (2,), id="items-apart-cost-more-than-the-host"),
        pytest.param([145], times(1.0, host=9.0), (3,), id="the-host-costs-more"),
    ],
)
def test_partial(budgets: list[int], seconds: Times | None, expected: tuple[int, ...] | None) -> None:
    assert partial_counts(UNITS, budgets, seconds) == expected


@pytest.mark.parametrize(
    ("budget", "most"),
    [
        pytest.param(130, 120, id="all"),
        pytest.param(129, 100, id="without-the-smaller-item"),
        pytest.param(30, 20, id="without-any-item"),
        pytest.param(29, None, id="not-even-that"),
    ],
)
def test_sums_know_the_most_that_a_device_keeps(budget: int, most: int | None) -> None:
    sums = Sums(UNITS)
    kept = sums.fit(0, 2, budget, spread=True)
    assert sums.most(0, 2, budget) == most == (kept and kept.weights)
    assert sums.most(1, 1, -5) == 0


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
    times = st.builds(Times, st.tuples(*[of_units] * len(budgets)), of_units, st.tuples(*[seconds] * len(budgets)))
    return units, budgets, draw(st.none() | times)


def most_kept(units: Sequence[Unit], gap: int) -> int:
    """The most bytes of items that fit."""
    items = [item.bytes for unit in units for item in unit.items]
    return max(sum(c) for n in range(len(items) + 1) for c in itertools.combinations(items, n) if sum(c) <= gap)


def most_kept_but_of_one(units: Sequence[Unit], gap: int) -> int | None:
    """The same where only one of the units may lose any."""
    movable = sum(unit.movable for unit in units)
    left = [movable - sum(lost) for unit in units for n in (0, 1, 2) for lost in itertools.combinations(unit.sizes, n)]
    return max((size for size in left if size <= gap), default=None)


def ways(n_units: int, n_devices: int, first: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(range(n_units + 1), repeat=n_devices):
        if sum(counts) == n_units - first:
            yield counts


def worth(
    units: Sequence[Unit],
    budgets: Sequence[int],
    times: Times | None,
    counts: Sequence[int],
    keep: Callable[[Sequence[Unit], int], int | None],
) -> float:
    """Bytes on devices, or seconds less than none; nothing where a device cannot have what it is given."""
    total, stop = 0.0, len(units) - sum(counts)
    if times:
        total -= sum(times.host[:stop])
    for device, (count, budget) in enumerate(zip(counts, budgets, strict=True)):
        start, stop = stop, stop + count
        here = units[start:stop]
        gap = budget - sum(unit.need for unit in here)
        kept = keep(here, gap) if gap >= 0 else None
        if here and kept is None:
            return -math.inf
        if times is None:
            total += sum(unit.fixed for unit in here) + (kept or 0)
        elif here:
            spilled = sum(unit.movable for unit in here) - (kept or 0)
            total -= sum(times.units[device][start:stop]) + spilled * times.by_byte[device]
    return total


@given(cases(), st.integers(0, 2))
def test_no_choice_of_boundaries_is_better(case: tuple[list[Unit], list[int], Times | None], first: int) -> None:
    units, budgets, times = case
    first = min(first, len(units))
    found = spread_counts(units, budgets, first, times)
    every = {
        counts: worth(units, budgets, times, counts, most_kept)
        - worth(units, budgets, times, [0] * len(budgets), most_kept)
        for counts in ways(len(units), len(budgets), first)
    }
    best = max(every.values())
    assert (found is None) is (best == -math.inf)
    assert found is None or every[found] == best


@given(cases())
def test_no_choice_of_whole_layers_but_one_is_better(case: tuple[list[Unit], list[int], Times | None]) -> None:
    units, budgets, times = case
    found = partial_counts(units, budgets, times)
    every = {
        counts: worth(units, budgets, times, counts, most_kept_but_of_one)
        for first in range(len(units) + 1)
        for counts in ways(len(units), len(budgets), first)
    }
    best = max(every.values())
    assert every[found or (0,) * len(budgets)] == best


@given(cases(), st.integers(0, 60))
def test_a_device_keeps_the_most_that_fits(case: tuple[list[Unit], list[int], Times | None], budget: int) -> None:
    units, _, _ = case
    sums = Sums(units)
    for start, stop in itertools.combinations(range(len(units) + 1), 2):
        here = units[start:stop]
        gap = budget - sum(unit.need for unit in here)
        most = None if gap < 0 else sum(unit.fixed for unit in here) + most_kept(here, gap)
        assert sums.most(start, stop, budget) == most


LAYERS = [unit_of(i, 10, 0, (20,)) for i in range(90)]


@pytest.mark.parametrize(
    ("budgets", "first", "expected"),
    [
        pytest.param([75 * 30, 15 * 30], 0, (75, 15), id="large-and-small"),
        pytest.param([15 * 30, 75 * 30], 0, (15, 75), id="small-and-large"),
        pytest.param([60 * 30, 10 * 30], 20, (60, 10), id="from-the-twentieth-on"),
        pytest.param([60 * 30, -10, 30 * 30], 0, (60, 0, 30), id="one-is-full"),
        pytest.param([15 * 30] * 6, 0, (15,) * 6, id="six"),
        pytest.param([30 * 30, 5 * 30, 30 * 30, 5 * 30, 20 * 30], 0, (30, 5, 30, 5, 20), id="five-that-differ"),
    ],
)
def test_boundaries_of_many_layers(budgets: list[int], first: int, expected: tuple[int, ...]) -> None:
    # exactly what all devices have: any other boundaries would have some items leave
    assert spread_counts(LAYERS, budgets, first, None) == expected


def test_boundaries_where_layers_differ() -> None:
    units = [unit_of(i, 10, 0, (20,)) if i < 60 else unit_of(i, 20, 10, (120,)) for i in range(90)]
    assert spread_counts(units, [60 * 30, 30 * 150], 0, None) == (60, 30)
    assert spread_counts(units, [40 * 30, 20 * 30, 30 * 150], 0, None) == (40, 20, 30)


@pytest.mark.parametrize("budget", [100, 200, 399, 400, 1000, 5000])
def test_items_of_many_sizes_are_within_the_budget(budget: int) -> None:
    # more combinations than are looked at
    units = [unit_of(i, 10, 0, range(3 + i, 9 + i)) for i in range(20)]
    sums = Sums(units)
    kept, most = sums.fit(0, 20, budget, spread=True), sums.most(0, 20, budget)
    total = sum(unit.weights for unit in units)
    assert (kept is None) == (most is None) == (budget < 200)
    assert kept is None or most == kept.weights == total - sum(item.bytes for item in kept.spilled) <= budget
    assert most is None or most > min(budget, total) - 3, "nothing that would have fitted has left"
