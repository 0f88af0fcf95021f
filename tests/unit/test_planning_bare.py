"""Layers of which a device has the cache alone: four of 81 bytes of weights, 71 of them items, with 5 of cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.planning.boundaries import Times
from fitter.planning.memory import HOST, Item, Unit
from fitter.planning.packing import pack
from fitter.planning.placement import Placement, caches_on, weights_on

SIZES = (("gate", 20), ("up", 21), ("down", 30))
OUTPUT = 15


def layer(index: int) -> Unit:
    items = tuple(Item(index, f"blk.{index}.ffn_{name}", ("weight",), size) for name, size in SIZES)
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


def test_a_layer_whose_weights_are_not_known_by_name_is_never_bare() -> None:
    units = [replace(UNITS[0], rest=()), *UNITS[1:]]
    assert pack(units, [1000], spread=True, first=0, bare=1) is None
    assert pack(units, [1000], spread=True, first=1, bare=1) is not None
