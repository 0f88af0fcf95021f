"""What layers on the host have on devices: their weights or some of their items, or the cache of a layer alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import bring, pack, pack_bare
from fitter.planning.placing.placement import Placement, caches_on, gaps_of, weights_on
from fitter.planning.placing.spill import Ranges
from tests.support.cases import cases, named_cases
from tests.support.units import is_within, layer, model


def with_rest(units: list[Unit]) -> list[Unit]:
    """The same layers, whose fixed weights are known by name."""
    return [
        replace(unit, rest=(Item(unit.index, f"blk.{unit.index}.attn_q", ("weight",), unit.fixed),))
        if unit.items
        else unit
        for unit in units
    ]


def test_layers_on_the_host_bring_their_tensors_to_devices_with_room() -> None:
    units = with_rest(model(4))
    # the last two layers and the output, and room for one layer's items and 15 bytes more
    budgets = [85 * 2 + 15 + 70 + 15]
    base = pack(Ranges(units), budgets, 2)
    assert base is not None
    together = bring(Ranges(units), budgets, base, "layers")
    assert {item.layer for item, _ in together.moved} == {1} and len(together.moved) == 3
    assert weights_on(units, together)[0] + caches_on(units, together)[0] <= budgets[0]
    assert all(target == 0 for _, target in together.moved), "what stays with its layer is not moved"


def test_layers_on_the_host_come_before_items_of_the_devices_own_layers() -> None:
    # of the first layer nothing has room then
    units = with_rest([layer(0, items=(100,)), *model(4)[1:]])
    # without items the last two layers and the output take 45 bytes, and a layer of the host 80
    base = pack(Ranges(units), [45 + 140], 2)
    assert base is not None and not base.moved
    found = bring(Ranges(units), [45 + 140], base, "all")
    # 60 of 140 bytes are left for items
    assert [(item.layer, item.bytes) for item, at in found.moved if at == HOST] == [(2, 30), (2, 20), (2, 20), (3, 20)]
    assert {item.layer for item, at in found.moved if at == 0} == {1} and weights_on(units, found) == [35 + 80 + 50]


def test_rest_of_host_layers_comes_before_items_of_the_devices_own_layers() -> None:
    # of the first layer nothing has room then
    units = with_rest([layer(0, fixed=200, items=(100,)), *model(4)[1:]])
    # without items the last two layers and the output take 45 bytes, and the rest of a layer of the host 10
    base = pack(Ranges(units), [45 + 140], 2)
    assert base is not None and not base.moved
    found = bring(Ranges(units), [45 + 140], base, "rest")
    # 130 of 140 bytes are left for items
    assert [(item.layer, item.bytes) for item, at in found.moved if at == HOST] == [(2, 20)]
    assert {item.layer for item, at in found.moved if at == 0} == {1} and weights_on(units, found) == [35 + 10 + 120]
    # no room
    assert bring(Ranges(units), [40], base, "rest") == base


@given(
    st.lists(st.integers(-5, 200), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(1, 60)), min_size=2, max_size=6),
    st.integers(0, 6),
    st.sets(st.integers(0, 2)),
    st.sampled_from(["layers", "all", "rest"]),
)
def test_what_bringing_promises(
    budgets: list[int],
    sizes: list[tuple[int, int, int]],
    first: int,
    far: set[int],
    kind: Literal["layers", "all", "rest"],
) -> None:
    units = with_rest([layer(i, *size[:2], items=(size[2], size[2] // 2 + 1)) for i, size in enumerate(sizes)])
    units.append(Unit(len(units), 15, 0))
    ranges, first = Ranges(units), min(first, len(units))
    base = pack(ranges, budgets, first, far=far)
    if base is None:
        return
    found = bring(ranges, budgets, base, kind, far)
    assert kind != "layers" or set(base.moved) <= set(found.moved), "it fills the room that is left"
    movable = {item for unit in units[:first] for item in unit.brought[kind][0]}
    assert (found.first, found.counts) == (first, base.counts) and is_within(units, found, budgets)
    brought = [(item, target) for item, target in found.moved if item.layer < first]
    assert len({item for item, _ in found.moved}) == len(found.moved)
    for item, target in brought:
        assert item in movable and (found.counts[target] or target not in far)
    if budgets and not {d for d, count in enumerate(base.counts) if not count} & far:
        gaps = gaps_of(units, budgets, found)
        near = next((unit for unit in units[:first][::-1] if unit.brought[kind][0]), None)
        is_brought = bool(brought)
        assert is_brought or near is None or near.brought[kind][1] > max(gaps), "the last one, where it has room"


@cases("layers", "all")
def test_layers_on_the_host_stay_there_where_all_devices_are_far(kind: Literal["layers", "all"]) -> None:
    nowhere = Placement(5, (0,))
    assert bring(Ranges(with_rest(model(4))), [1000], nowhere, kind, far=(0,)) == nowhere


# caches of two layers, and the other two with the output: 195 bytes
@named_cases(
    ("only the caches", 195, [20], 160 + 15, []),
    ("a byte less, and an item of a whole layer leaves", 194, [20], 160 + 15 - 20, [(2, 20)]),
    ("without any item", 195 - 140, [20], 20 + 15, [(2, 20), (2, 20), (2, 30), (3, 20), (3, 20), (3, 30)]),
    ("no room", 195 - 141, None, None, None),
)
def test_only_the_caches_of_bare_layers_are_on_devices(
    budget: int, caches: list[int] | None, weights: int | None, away: list[tuple[int, int]] | None
) -> None:
    units = with_rest(model(4))
    placement = pack_bare(units, [budget], 0, 2)
    assert (placement is None) is (away is None)
    if placement is None:
        return
    assert placement.counts == (5,) and {target for _, target in placement.moved} == {HOST}
    assert (caches_on(units, placement), weights_on(units, placement)) == (caches, [weights])
    assert sorted((item.layer, item.bytes) for item, _ in placement.moved if item.layer > 1) == away
    assert {item for item, _ in placement.moved if item.layer < 2} == {
        item for unit in units[:2] for item in (*unit.items, *unit.rest)
    }


def test_some_layers_are_never_bare() -> None:
    units = with_rest(model(4))
    assert pack_bare(units, [1000], 0, 2) is not None
    states = [replace(unit, state=unit.cache) for unit in units]
    assert pack_bare(states, [1000], 0, 2) is None, "a recurrent state needs its weights"
    unnamed = [units[0], replace(units[1], rest=()), *units[2:]]
    assert pack_bare(unnamed, [1000], 0, 2) is None, "weights that are not known by name"
    assert pack_bare(unnamed, [1000], 2, 2) is not None
