"""Where one device ends and the next begins: layers of 20 and 30 bytes that can leave, and 15 that cannot."""

from __future__ import annotations

import pytest

from fitter.planning.boundaries import Sums, Times, partial_counts, spread_counts, whole_counts
from fitter.planning.memory import Item, Unit

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
    kept = sums.keep(0, 2, budget, spread=True)
    assert sums.most(0, 2, budget) == most == (kept and kept.weights)
    assert sums.most(1, 1, -5) == 0
