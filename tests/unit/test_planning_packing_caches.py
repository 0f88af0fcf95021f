"""Layers of which a device has the cache alone: four of 81 bytes of weights, 71 of them items, with 5 of cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.planning.placing.boundaries import Times
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import pack
from fitter.planning.placing.placement import Placement, caches_on, weights_on

SIZES = (("gate", 20), ("up", 21), ("down", 30))
OUTPUT = 15


def layer(index: int, sizes: tuple[tuple[str, int], ...] = SIZES) -> Unit:
    items = tuple(Item(index, f"blk.{index}.ffn_{name}", ("weight",), size) for name, size in sizes)
    return Unit(index, 10, 5, items, rest=(Item(index, f"blk.{index}.attn_q", ("weight",), 10),))


UNITS = [*map(layer, range(4)), Unit(4, OUTPUT, 0)]
WHOLE = 86


def there(placement: Placement) -> dict[str, int]:
    """Tensors that are apart from their layers, by name, with where they are."""
    return {item.stem: target for item, target in placement.moved}


ROOM = {
    "for the caches alone": (0, {}),
    "but too little for an item": (19, {}),
    "for the smallest": (20, {"gate": 0}),
    "for the largest": (30, {"down": 0}),
    "for two": (50, {"down": 0, "gate": 0}),
    "for all but one": (70, {"down": 0, "up": 0}),
    "for all": (71, {"down": 0, "up": 0, "gate": 0}),
}


@pytest.mark.parametrize(("more", "back"), ROOM.values(), ids=ROOM)
def test_items_come_back_where_there_is_room(more: int, back: dict[str, int]) -> None:
    budget = 5 + 3 * WHOLE + OUTPUT + more
    found = pack(UNITS, [budget], spread=True, first=0, bare=1)
    assert found is not None and found.counts == (5,)
    assert there(found) == {f"blk.0.ffn_{name}": back.get(name, HOST) for name, _ in SIZES} | {"blk.0.attn_q": HOST}
    assert weights_on(UNITS, found)[0] + caches_on(UNITS, found)[0] <= budget


def test_nothing_is_bare_before_the_first_layer() -> None:
    found = pack(UNITS, [1000], spread=True, first=1, bare=1)
    assert found is not None and (found.first, found.counts) == (1, (4,))
    assert {item.layer for item, target in found.moved if target == HOST} == {1}
    assert caches_on(UNITS, found) == [15]


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [
        pytest.param((1.0, 2.0), (5, 0), id="the first is faster"),
        pytest.param((2.0, 1.0), (0, 5), id="the second is faster"),
    ],
)
def test_the_faster_device_has_them(seconds: tuple[float, float], counts: tuple[int, ...]) -> None:
    times = Times(tuple((each,) * 5 for each in seconds), (9.0,) * 5, (0.1, 0.1))
    found = pack(UNITS, [600, 600], spread=True, first=0, bare=1, times=times)
    assert found is not None and found.counts == counts


@pytest.mark.parametrize(("far", "target"), [pytest.param((), 0, id="near"), pytest.param((0,), HOST, id="far")])
def test_nothing_comes_back_to_a_far_device(far: tuple[int, ...], target: int) -> None:
    found = pack(UNITS, [5 + 3 * WHOLE + OUTPUT + 30], spread=True, first=0, bare=1, far=far)
    assert found is not None and there(found)["blk.0.ffn_down"] == target


@pytest.mark.parametrize(("far", "target"), [pytest.param((), 1, id="near"), pytest.param((1,), HOST, id="far")])
def test_what_leaves_another_layer_goes_to_no_far_device(far: tuple[int, ...], target: int) -> None:
    """The first device has the bare layer and the next one but for a tensor; the second has room for that one."""
    found = pack(UNITS, [5 + WHOLE - 20, 2 * WHOLE + OUTPUT + 20], spread=True, first=0, bare=1, far=far)
    assert found is not None and found.counts == (2, 3)
    assert there(found)["blk.1.ffn_gate"] == target


@pytest.mark.parametrize(
    ("apart", "away"),
    [
        pytest.param(0, {"blk.1.ffn_up", "blk.2.ffn_up"}, id="the most bytes stay"),
        pytest.param(30, {"blk.2.ffn_up", "blk.2.ffn_down"}, id="a layer less is worth more"),
    ],
)
def test_whole_layers_lose_tensors_of_few(apart: int, away: set[str]) -> None:
    """Two layers of 15 bytes beside tensors of 30 and 40, and 80 bytes for those: 40 and 40, or 70 of one layer."""
    units = [layer(0), *(layer(index, (("up", 30), ("down", 40))) for index in (1, 2)), UNITS[-1]]
    found = pack(units, [5 + 2 * 15 + OUTPUT + 80], spread=True, first=0, bare=1, apart=apart)
    assert found is not None and found.counts == (4,)
    assert {stem for stem in there(found) if not stem.startswith("blk.0")} == away


def test_a_layer_whose_weights_are_not_known_by_name_is_never_bare() -> None:
    units = [replace(UNITS[0], rest=()), *UNITS[1:]]
    assert pack(units, [1000], spread=True, first=0, bare=1) is None
    assert pack(units, [1000], spread=True, first=1, bare=1) is not None
