"""What could be placed: eight layers of 120 MiB with a cache, and an output of 100."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.llama.types import Params
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.layer_sizes import HOST, units_of
from fitter.planning.placing.packing import pack, pack_bare
from fitter.planning.placing.placement import Placement, caches_on, weights_on
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.prices import PriceList
from fitter.planning.request.request import Request
from fitter.planning.search.proposals import (
    Situation,
    add_caches,
    in_place,
    place_partial,
    place_whole,
    swap_caches_for_weights,
)
from fitter.planning.search.room import Room
from fitter.planning.speed.cost import Workload
from tests.support.cases import cases, named_cases
from tests.support.synthetic import (
    CARD,
    DENSE,
    MIB,
    MOE,
    REMOTE_CARD,
    SLOW_CARD,
    SyntheticLlama,
    SyntheticModel,
    limits,
    priced,
    request,
)

CACHES = SyntheticModel(cache=65536)
N_CTX = 4096
SPLIT = ("tensor_split",)
ON_A_FAST_NETWORK, ON_A_SLOW_NETWORK = (replace(REMOTE_CARD, round_trip=each, pcie=1e12) for each in (0.0, 5e-2))


def situation(
    *mib: int,
    model: SyntheticModel = DENSE,
    fixed: tuple[str, ...] = (),
    params: Params | None = None,
    speeds: tuple[DeviceSpeed, ...] = (CARD,),
    is_priced: bool = True,
) -> Situation:
    devices = limits(*mib)
    asked: Request = priced(request(model, devices, params=params, fixed=fixed), model, *speeds)
    layout = SyntheticLlama(model, devices).record(Params(n_ctx=N_CTX))
    units = units_of(layout, model.n_layer, asked.is_movable)
    budgets = tuple(device.free for device in devices)
    prices = PriceList(asked, devices, {N_CTX: units}) if is_priced else None
    return Situation(asked, devices, N_CTX, units, Room(*[budgets] * 4), prices)


def is_within(at: Situation, placement: Placement) -> bool:
    used = zip(weights_on(at.units, placement), caches_on(at.units, placement), strict=True)
    return all(w + c <= budget for (w, c), budget in zip(used, at.room.with_caches, strict=True))


def layers_apart(placement: Placement) -> int:
    return len({item.layer for item, _ in placement.moved})


@named_cases(
    ("one", situation(3000), (9,)),
    ("no-room", situation(1000), None),
    ("left-even", situation(800, 800, is_priced=False), (4, 5)),
    ("split", situation(800, 800, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), (3, 6)),
    ("too-much", situation(800, 300, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), None),
    # the first has 3 layers of 136 MiB with their caches, the second 5 and the output
    ("just-fits", situation(408, 780, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), (3, 6)),
    ("by-a-cache", situation(407, 780, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), None),
    ("as-many-as-the-user-says", situation(500, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=3)), (3,)),
)
def test_whole(at: Situation, counts: tuple[int, ...] | None) -> None:
    found = place_whole(at)
    assert (found and found.counts) == counts


@named_cases(
    ("nothing-on-the-slow-one", (SLOW_CARD, CARD), (3000, 3000), (0, 9)),
    ("nothing-over-a-network", (CARD, REMOTE_CARD), (3000, 3000), (9, 0)),
    ("over-a-network-that-takes-no-time", (SLOW_CARD, ON_A_FAST_NETWORK), (3000, 3000), (0, 9)),
    ("over-a-network-that-takes-long", (SLOW_CARD, ON_A_SLOW_NETWORK), (3000, 3000), (9, 0)),
    ("what-the-fast-one-holds", (SLOW_CARD, CARD), (3000, 500), (6, 3)),
    ("no-room", (SLOW_CARD, CARD), (300, 500), None),
)
def test_fastest(speeds: tuple[DeviceSpeed, ...], mib: tuple[int, ...], counts: tuple[int, ...] | None) -> None:
    found = place_whole(situation(*mib, speeds=speeds))
    assert (found and found.counts) == counts


NGL = Params(n_gpu_layers=4)


# first layer on devices, layers of each, and how many have items elsewhere: of 136 MiB with their caches, 100 of items
ANCHORS = {
    "all fits": (situation(1188, is_priced=False), [(0, (9,), 0)]),
    "a MiB short": (situation(1187, is_priced=False), [(0, (9,), 1)]),
    "all without items, or three and a part of one": (situation(500, is_priced=False), [(0, (9,), 7), (5, (4,), 1)]),
    "all but one without items, or two": (situation(387, is_priced=False), [(1, (8,), 7), (6, (3,), 0)]),
    "the output alone": (situation(100, is_priced=False), [(8, (1,), 0)]),
    "nothing": (situation(99, is_priced=False), [(9, (0,), 0)]),
    "nothing on two": (situation(99, 99, is_priced=False), [(9, (0, 0), 0)]),
    "two devices": (situation(300, 300, is_priced=False), [(0, (4, 5), 7), (4, (2, 3), 1)]),
    "experts are apart": (situation(2500, model=MOE), [(0, (9,), 5)]),
    "experts over a network": (situation(2500, model=MOE, speeds=(REMOTE_CARD,)), [(0, (9,), 5), (4, (5,), 1)]),
    "the user's layers": (situation(500, fixed=("n_gpu_layers",), params=NGL), [(5, (4,), 1)]),
    "the user's layers without items": (
        situation(500, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=9)),
        [(0, (9,), 7)],
    ),
    "none, says the user": (situation(10, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=0)), [(9, (0,), 0)]),
    "the user's layers do not fit": (situation(10, fixed=("n_gpu_layers",), params=NGL), []),
    # four of five layers, three of four; two of three, with room for a tensor on the other device
    "the user's split": (
        situation(300, 300, fixed=SPLIT, params=Params(tensor_split=(1.0, 1.0)), is_priced=False),
        [(0, (5, 4), 7), (4, (3, 2), 2)],
    ),
    "the user's layers and split": (
        situation(400, 400, fixed=(*SPLIT, "n_gpu_layers"), params=Params(tensor_split=(1.0, 1.0), n_gpu_layers=6)),
        [(3, (3, 3), 1)],
    ),
    "which do not fit": (
        situation(400, 70, fixed=(*SPLIT, "n_gpu_layers"), params=Params(tensor_split=(1.0, 1.0), n_gpu_layers=6)),
        [],
    ),
}


@cases(ANCHORS)
def test_most_layers_or_whole_ones_are_there(at: Situation, expected: list[tuple[int, tuple[int, ...], int]]) -> None:
    found = in_place(at)
    assert [(each.first, each.counts, layers_apart(each)) for each in found] == expected
    assert all(is_within(at, each) for each in found)


@given(
    mib=st.lists(st.integers(0, 900), min_size=1, max_size=3),
    model=st.sampled_from([DENSE, MOE, replace(CACHES, n_layer=5)]),
    n_gpu_layers=st.none() | st.integers(0, 6),
)
def test_no_more_layers_have_room(mib: list[int], model: SyntheticModel, n_gpu_layers: int | None) -> None:
    fixed, params = ((), None) if n_gpu_layers is None else (("n_gpu_layers",), Params(n_gpu_layers=n_gpu_layers))
    at = situation(*mib, model=model, fixed=fixed, params=params, is_priced=False)
    found, budgets = in_place(at), at.room.with_caches
    assert all(is_within(at, each) for each in found)
    if at.first is not None:
        assert [each.first for each in found] == ([at.first] if pack(at.ranges, budgets, at.first) else [])
        return
    most, whole = found[0], found[-1]
    assert len(found) <= (1 if model.experts else 2) and most.first <= whole.first
    assert most.first == 0 or pack(at.ranges, budgets, most.first - 1) is None
    if not model.experts and whole.counts != (0,) * len(mib):
        assert layers_apart(whole) <= len(mib)
        fewer = None if whole is most else pack(at.ranges, budgets, whole.first - 1)
        assert fewer is None or layers_apart(fewer) > len(mib)


@named_cases(
    ("whole-layers-and-a-part", situation(500, is_priced=False), 5),
    ("experts", situation(2500, model=MOE, is_priced=False), 0),
    ("nothing-fits", situation(10, is_priced=False), 9),
)
def test_without_prices(at: Situation, first: int) -> None:
    found = place_partial(at)
    assert found in in_place(at) and found is not None and found.first == first


@named_cases(
    ("dense", situation(500)),
    ("a-slow-card", situation(500, 300, speeds=(CARD, SLOW_CARD))),
    ("large-caches", situation(700, model=CACHES)),
)
def test_a_plain_proposal_is_the_fastest_in_place(at: Situation) -> None:
    at = replace(at, is_plain=True)
    assert at.prices is not None
    found = place_partial(at)
    assert found == min(in_place(at), key=at.prices.seconds)


@cases(((CARD, SLOW_CARD), (7, 2)), ((SLOW_CARD, CARD), (2, 7)))
def test_the_faster_device_has_what_it_holds(speeds: tuple[DeviceSpeed, ...], counts: tuple[int, ...]) -> None:
    found = place_partial(situation(1000, 1000, speeds=speeds))
    assert found is not None and (found.first, found.counts, found.is_spilled) == (0, counts, False)


def test_the_users_layers_are_tried_without_items_before_none_fit() -> None:
    params = Params(tensor_split=(1.0, 1.0), n_gpu_layers=6)
    at = situation(400, 400, fixed=(*SPLIT, "n_gpu_layers"), params=params)
    found = place_partial(replace(at, room=Room(*[(10 * MIB, 10 * MIB)] * 4)))
    assert found is not None and (found.first, found.counts) == (3, (3, 3))
    assert {item for item, _ in found.moved} == {item for unit in at.units[3:] for item in unit.items}


def test_a_priced_proposal_is_none_the_slower_for_each_step() -> None:
    at = situation(700, 500, model=CACHES, speeds=(CARD, SLOW_CARD))
    assert at.prices is not None
    full = place_partial(at)
    assert full is not None and is_within(at, full)
    fastest = min(map(at.prices.seconds, in_place(at)))
    assert at.prices.seconds(full) < fastest, "large caches should give way to weights"


def test_without_prices_no_step_changes_anything() -> None:
    found = Placement(4, (5,))
    assert swap_caches_for_weights(situation(500, is_priced=False), found) == found


def test_small_caches_stay_with_their_layers() -> None:
    at = situation(500, model=replace(DENSE, cache=512))
    assert at.prices is not None
    found = min(in_place(at), key=at.prices.seconds)
    assert swap_caches_for_weights(at, found) is found


@named_cases(("layers", ()), ("layers-and-split", SPLIT))
def test_the_users_layers_leave_room_for_weights_of_others(fixed: tuple[str, ...]) -> None:
    params = Params(tensor_split=(1.0, 1.0), n_gpu_layers=3)
    at = situation(400, 400, fixed=(*fixed, "n_gpu_layers"), params=params)
    (plain,), found = in_place(at), place_partial(at)
    assert found is not None and at.prices is not None
    assert found.n_gpu_layers == plain.n_gpu_layers == 3 and is_within(at, found)
    assert at.prices.seconds(found) < 0.9 * at.prices.seconds(plain)


def test_a_split_of_the_users_may_leave_a_single_layer() -> None:
    at = situation(100, 0, fixed=SPLIT, params=Params(tensor_split=(1.0, 0.0)))
    assert [each.counts for each in in_place(at)] == [(1, 0)], "the output alone"
    found = place_partial(at)
    assert found is not None and found.counts == (1, 0)


TWO_LAYERS = replace(CACHES, n_layer=2)
"""Each with 20 MiB of attention, 100 of tensors and 256 of cache, and an output of 100 MiB."""


@named_cases(("a layer is on the host", 500, False, 2), ("tensors are on the host", 652, True, 1))
def test_large_caches_give_way_to_what_is_on_the_host(mib: int, tensors_on_host: bool, first: int) -> None:
    at = situation(mib, model=TWO_LAYERS)
    items = [item for unit in at.units for item in unit.items]
    found = Placement(0, (3,), tuple((item, HOST) for item in items)) if tensors_on_host else Placement(1, (2,))
    assert at.prices is not None and is_within(at, found)
    better = swap_caches_for_weights(at, found)
    assert better.first == first and is_within(at, better)
    assert at.prices.seconds(better) < at.prices.seconds(found)


@cases(None, 0, 5, 11, 15)
def test_where_it_was_before_does_not_hide_the_fastest(near: int | None) -> None:
    """With room for half of the weights and few caches, the fastest placement has hardly a cache on the device."""
    at = situation(1600, model=replace(CACHES, n_layer=15))
    at = replace(at, near={} if near is None else {1: near})
    items = tuple((item, HOST) for unit in at.units for item in unit.items)
    found = swap_caches_for_weights(at, Placement(0, (len(at.units),), items))
    assert at.prices is not None
    others = [replace(at, near={1: first}, fillings={}) for first in range(len(at.units))]
    fastest = min(at.prices.seconds(swap_caches_for_weights(each, found)) for each in others)
    assert at.prices.seconds(found) == pytest.approx(fastest, rel=GAIN) and at.near[1] == found.first


def test_a_device_without_a_cache_has_more_room() -> None:
    at = situation(700, model=CACHES)
    at = replace(at, room=Room(*[(90 * MIB,)] * 3, (700 * MIB,)))
    found = swap_caches_for_weights(at, Placement(9, (0,)))
    assert found.first == 8 and weights_on(at.units, found) == [(100 + 6 * 100) * MIB]


def test_weights_that_caches_give_way_to_go_to_the_faster_device() -> None:
    for speeds, counts in (((CARD, SLOW_CARD), (6, 3)), ((SLOW_CARD, CARD), (2, 7))):
        at = situation(1240, 1240, model=replace(CACHES, cache=16384), speeds=speeds)
        assert swap_caches_for_weights(at, Placement(9, (0, 0))).counts == counts


def test_no_single_tensor_goes_to_a_remote_device_without_a_layer() -> None:
    at = situation(242, 661, model=replace(CACHES, cache=16384), speeds=(replace(REMOTE_CARD, round_trip=5e-3), CARD))
    found = swap_caches_for_weights(at, Placement(9, (0, 0)))
    assert found.counts[0] == 0 and {target for _, target in found.moved} == {1}


def long_prompts(mib: int, gives: Workload, n_layer: int = 8) -> Situation:
    at = situation(mib, model=replace(DENSE, cache=8192, n_layer=n_layer))
    asked = replace(at.request, workload=gives)
    return replace(at, request=asked, prices=PriceList(asked, at.devices, {N_CTX: at.units}))


@named_cases(
    ("all-caches", 400, Workload(30000, 512), 0),
    ("as-many-as-fit", 300, Workload(30000, 512), 2),
    ("short-prompts-need-none", 400, Workload(2048, 512), 3),
    ("all-layers-are-there-anyway", 600, Workload(30000, 512), 0),
)
def test_caches_come_to_the_device_for_long_prompts(mib: int, gives: Workload, first: int) -> None:
    at = long_prompts(mib, gives)
    assert at.prices is not None
    plain = min(in_place(at), key=at.prices.seconds)
    found = add_caches(at, plain)
    assert is_within(at, found) and found.first == first
    assert (found is plain) or at.prices.seconds(found) < at.prices.seconds(plain)
    assert (found is plain) is (plain.first == first)
    # nothing of a state can be there without its weights
    states = replace(at, units=tuple(replace(unit, state=unit.cache) for unit in at.units))
    assert add_caches(states, plain) is plain


@named_cases(("eight", 360, 0, 8), ("four", 280, 3, 4), ("six", 300, 2, 6))
def test_no_more_layers_are_bare_than_there_is_no_room_for(mib: int, first: int, count: int) -> None:
    at = long_prompts(mib, Workload(30000, 512))
    assert at.prices is not None
    plain = min(in_place(at), key=at.prices.seconds)
    found = add_caches(at, plain)
    bare = {item.layer for item, target in found.moved if "attn" in item.stem and target == HOST}
    assert found.first == first and bare == set(range(first, first + count))
    assert pack_bare(at.units, at.room.with_caches, first, count - 1) is None


def test_many_caches_gain_what_one_of_them_does_not() -> None:
    at = long_prompts(3000, Workload(6000, 512), n_layer=60)
    assert at.prices is not None
    plain = min(in_place(at), key=at.prices.seconds)
    assert at.prices.all.bare_gain(0) < 0.02 * at.prices.seconds(plain)
    assert add_caches(at, plain).first < plain.first


def test_room_without_caches_is_for_devices_that_have_none() -> None:
    at = situation(700, 500, model=CACHES, speeds=(CARD, SLOW_CARD))
    plain = in_place(at)[0]
    wide = replace(at, room=replace(at.room, without=(2000 * MIB, 1500 * MIB)))
    for each in (at, wide):
        found = swap_caches_for_weights(each, plain)
        used = zip(weights_on(each.units, found), caches_on(each.units, found), strict=True)
        assert all(w + c <= room for (w, c), room in zip(used, each.room.of(each.units, found), strict=True))


@named_cases(
    ("nothing-fits", situation(10, 10), Placement(9, (0, 0))),
    ("the-user-says-so", ANCHORS["none, says the user"][0], Placement(9, (0,))),
    ("against-the-user", ANCHORS["the user's layers do not fit"][0], None),
)
def test_everything_may_stay_on_the_host(at: Situation, expected: Placement | None) -> None:
    assert place_partial(at) == expected
