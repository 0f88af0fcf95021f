"""Which items leave a device that cannot hold all: sizes in bytes, layers by number."""

from __future__ import annotations

import pytest

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.spill import most_within, spill_exact, spill_one, spill_spread


def layers(*items: tuple[int, ...]) -> list[Unit]:
    return [
        Unit(i, 10, 5, tuple(Item(i, f"blk.{i}.{j}", ("weight",), size) for j, size in enumerate(sizes)))
        for i, sizes in enumerate(items)
    ]


def said(items: tuple[Item, ...]) -> list[tuple[int, int]]:
    """Layer and size of each."""
    return sorted((item.layer, item.bytes) for item in items)


ALIKE = layers(*[(20, 20, 30)] * 3)


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        pytest.param(1, [20], id="the-smallest-that-does"),
        pytest.param(21, [30], id="one-larger"),
        pytest.param(31, [20, 20], id="two"),
        pytest.param(70, [20, 20, 30], id="all-of-a-layer"),
        pytest.param(71, None, id="more-than-a-layer"),
    ],
)
def test_one_layer_gives(over: int, expected: list[int] | None) -> None:
    found = spill_one(ALIKE, over)
    assert (found and [size for _, size in said(found)]) == expected
    assert found is None or len({item.layer for item in found}) == 1


@pytest.mark.parametrize(
    ("units", "gap", "expected"),
    [
        pytest.param(ALIKE, 210, [], id="room-for-all"),
        pytest.param(ALIKE, 209, [(2, 20)], id="a-late-layer-loses-one"),
        pytest.param(ALIKE, 140, [(2, 20), (2, 20), (2, 30)], id="a-whole-layer"),
        pytest.param(ALIKE, 30, [(0, 20), (0, 20), *[(i, s) for i in (1, 2) for s in (20, 20, 30)]], id="one-item"),
        pytest.param(layers((40, 40), (10, 60)), 55, [(0, 40), (1, 60)], id="two-layers-lose-a-part-each"),
        pytest.param(layers((10,), (15,)), 15, [(0, 10)], id="a-larger-layer-in-exchange"),
        pytest.param(layers((10,), (10,), (15,), (15,)), 30, [(0, 10), (1, 10)], id="two-in-exchange"),
        pytest.param(layers((30,), (10,), (20,), (35,)), 50, [(1, 10), (3, 35)], id="the-exchange-that-gains-most"),
    ],
)
def test_few_layers_give(units: list[Unit], gap: int, expected: list[tuple[int, int]]) -> None:
    assert said(spill_spread(units, gap)) == expected


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        pytest.param(0, [(0, 30), (1, 30)], id="the-most-bytes-stay"),
        pytest.param(30, [(1, 30), (1, 40)], id="a-layer-less-is-worth-more"),
    ],
)
def test_exact_choice(apart: int, expected: list[tuple[int, int]]) -> None:
    assert said(spill_exact(layers((30, 40), (30, 40)), 80, apart)) == expected


def test_the_most_may_stay_without_the_largest() -> None:
    """Three of 30 bytes fill 90 exactly, one of 50 leaves room for one of 30 only."""
    assert said(spill_exact(layers(*[(50, 30)] * 3), 90, 0)) == [(0, 50), (1, 50), (2, 50)]


@pytest.mark.parametrize(
    ("counts", "gap", "expected"),
    [
        pytest.param([(30, 2), (20, 2)], 70, 70, id="exactly"),
        pytest.param([(30, 2), (20, 2)], 45, 40, id="the-small-ones-do-better"),
        pytest.param([(30, 2), (20, 2)], 19, 0, id="none"),
        pytest.param([(30, 2), (20, 2)], 999, 100, id="all"),
    ],
)
def test_most_within(counts: list[tuple[int, int]], gap: int, expected: int) -> None:
    assert most_within(tuple(counts), gap) == expected
