"""What could be placed: eight layers of 120 MiB with a cache, and an output of 100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.llama.types import Params
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.layer_sizes import HOST, units_of
from fitter.planning.placing.packing import pack
from fitter.planning.placing.placement import Placement, caches_on, weights_on
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.prices import PriceList
from fitter.planning.request.request import Request
from fitter.planning.search.proposals import (
    Situation,
    add_caches,
    avoid_remote_tensors,
    place_fastest,
    place_partial,
    place_whole,
    swap_caches_for_weights,
)
from fitter.planning.search.room import Room
from fitter.planning.speed.cost import Workload
from tests.support.synthetic import (
    CARD,
    MIB,
    REMOTE_CARD,
    SLOW_CARD,
    SyntheticLlama,
    SyntheticModel,
    limits,
    priced,
    request,
)

DENSE = SyntheticModel()
MOE = SyntheticModel(experts=(200 * MIB, 200 * MIB, 250 * MIB))
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
    return Situation(asked, devices, N_CTX, units, Room(budgets, budgets, budgets), prices)


def is_within(at: Situation, placement: Placement) -> bool:
    used = zip(weights_on(at.units, placement), caches_on(at.units, placement), strict=True)
    return all(w + c <= budget for (w, c), budget in zip(used, at.room.with_caches, strict=True))


@pytest.mark.parametrize(
    ("at", "counts"),
    [
        pytest.param(situation(3000), (9,), id="one"),
        pytest.param(situation(1000), None, id="no-room"),
        pytest.param(situation(800, 800), (4, 5), id="left-even"),
        pytest.param(situation(800, 800, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), (3, 6), id="split"),
        pytest.param(situation(800, 300, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), None, id="too-much"),
        # the first has 3 layers of 136 MiB with their caches, the second 5 and the output
        pytest.param(situation(408, 780, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), (3, 6), id="just-fits"),
        pytest.param(situation(407, 780, fixed=SPLIT, params=Params(tensor_split=(1.0, 2.0))), None, id="by-a-cache"),
        pytest.param(
            situation(500, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=3)), (3,), id="as-many-as-the-user-says"
        ),
    ],
)
def test_whole(at: Situation, counts: tuple[int, ...] | None) -> None:
    found = place_whole(at)
    assert (found and found.counts) == counts


@pytest.mark.parametrize(
    ("speeds", "mib", "counts"),
    [
        pytest.param((SLOW_CARD, CARD), (3000, 3000), (0, 9), id="nothing-on-the-slow-one"),
        pytest.param((CARD, REMOTE_CARD), (3000, 3000), (9, 0), id="nothing-over-a-network"),
        pytest.param((SLOW_CARD, ON_A_FAST_NETWORK), (3000, 3000), (0, 9), id="over-a-network-that-takes-no-time"),
        pytest.param((SLOW_CARD, ON_A_SLOW_NETWORK), (3000, 3000), (9, 0), id="over-a-network-that-takes-long"),
        pytest.param((SLOW_CARD, CARD), (3000, 500), (6, 3), id="what-the-fast-one-holds"),
        pytest.param((SLOW_CARD, CARD), (300, 500), None, id="no-room"),
    ],
)
def test_fastest(speeds: tuple[DeviceSpeed, ...], mib: tuple[int, ...], counts: tuple[int, ...] | None) -> None:
    found = place_fastest(situation(*mib, speeds=speeds))
    assert (found and found.counts) == counts


NGL = Params(n_gpu_layers=4)


@pytest.mark.parametrize(
    ("at", "spread", "first", "layers_apart"),
    [
        pytest.param(situation(500, is_priced=False), False, 5, 1, id="whole-layers-and-a-part"),
        pytest.param(situation(500, is_priced=False), True, 0, 8, id="tensors-of-any-layer"),
        pytest.param(situation(10, is_priced=False), False, 9, 0, id="nothing-fits"),
        pytest.param(
            situation(500, fixed=("n_gpu_layers",), params=NGL, is_priced=False), False, 5, 1, id="the-users-layers"
        ),
        pytest.param(situation(2500, model=MOE, is_priced=False), True, 0, 7, id="experts"),
    ],
)
def test_partial(at: Situation, spread: bool, first: int, layers_apart: int) -> None:
    found = place_partial(at, spread)
    assert found is not None and is_within(at, found)
    assert (found.first, len({item.layer for item, _ in found.moved})) == (first, layers_apart)


@pytest.mark.parametrize("spread", [True, False], ids=["experts", "dense"])
@pytest.mark.parametrize(("speeds", "counts"), [((CARD, SLOW_CARD), (7, 2)), ((SLOW_CARD, CARD), (2, 7))])
def test_the_faster_device_has_what_it_holds(
    speeds: tuple[DeviceSpeed, ...], counts: tuple[int, ...], spread: bool
) -> None:
    found = place_partial(situation(1000, 1000, speeds=speeds), spread, is_plain=True)
    assert found is not None and (found.first, found.counts, found.is_spilled) == (0, counts, False)


@pytest.mark.parametrize(
    ("n_gpu_layers", "mib", "counts"),
    [
        pytest.param(None, 300, (2, 2), id="as-many-as-fit-by-the-split"),
        pytest.param(6, 400, (3, 3), id="as-many-as-the-user-says"),
        pytest.param(6, 10, None, id="which-do-not-fit"),
    ],
)
def test_partial_by_the_users_split(n_gpu_layers: int | None, mib: int, counts: tuple[int, ...] | None) -> None:
    fixed = SPLIT if n_gpu_layers is None else (*SPLIT, "n_gpu_layers")
    params = Params(tensor_split=(1.0, 1.0), n_gpu_layers=n_gpu_layers or -1)
    found = place_partial(situation(mib, mib, fixed=fixed, params=params), False, is_plain=True)
    assert (found and found.counts) == counts


def test_the_users_layers_are_tried_without_items_before_none_fit() -> None:
    params = Params(tensor_split=(1.0, 1.0), n_gpu_layers=6)
    at = situation(400, 400, fixed=(*SPLIT, "n_gpu_layers"), params=params)
    found = place_partial(replace(at, room=Room(*[(10 * MIB, 10 * MIB)] * 3)), False, is_plain=True)
    assert found is not None and (found.first, found.counts) == (3, (3, 3))
    assert {item for item, _ in found.moved} == {item for unit in at.units[3:] for item in unit.items}


def test_a_priced_proposal_is_none_the_slower_for_each_step() -> None:
    at = situation(700, 500, model=CACHES, speeds=(CARD, SLOW_CARD))
    assert at.prices is not None
    plain, full = place_partial(at, True, is_plain=True), place_partial(at, True)
    assert plain is not None and full is not None and is_within(at, full)
    assert at.prices.seconds(full) < at.prices.seconds(plain), "large caches should give way to weights"


def test_without_prices_no_step_changes_anything() -> None:
    at, found = situation(500, is_priced=False), Placement(4, (5,))
    assert [step(at, found) for step in (avoid_remote_tensors, swap_caches_for_weights, add_caches)] == [found] * 3


def test_small_caches_stay_with_their_layers() -> None:
    at = situation(500, model=replace(DENSE, cache=512))
    found = place_partial(at, False, is_plain=True)
    assert found is not None and swap_caches_for_weights(at, found) is found


@pytest.mark.parametrize(
    ("round_trip", "host_mib", "target"),
    [
        pytest.param(5e-2, None, HOST, id="a-slow-network"),
        pytest.param(0.0, None, 1, id="a-network-that-takes-no-time"),
        pytest.param(5e-2, 10, 1, id="no-room-on-the-host"),
    ],
)
def test_tensors_come_nearer_than_a_slow_remote_device(round_trip: float, host_mib: int | None, target: int) -> None:
    remote = replace(REMOTE_CARD, round_trip=round_trip, pcie=1e12)
    at = situation(600, 8000, model=MOE, speeds=(CARD, remote))
    host = replace(at.request.host, free=None if host_mib is None else host_mib * MIB)
    at = replace(at, request=replace(at.request, host=host))
    far = pack(at.units, at.room.with_caches, spread=True, counts=(4, 5))
    assert far is not None and {place for _, place in far.moved} == {1}
    assert {place for _, place in avoid_remote_tensors(at, far).moved} == {target}


def test_what_the_host_has_of_layers_and_tensors_is_all_counted() -> None:
    at = situation(600, 8000, model=replace(MOE, cache=CACHES.cache), speeds=(CARD, ON_A_SLOW_NETWORK))
    far = pack(at.units, at.room.with_caches, spread=True, counts=(2, 5))
    assert far is not None and far.first == 2 and {place for _, place in far.moved} == {1}
    on_host = sum(unit.weights + unit.cache for unit in at.units[:2]) + sum(item.bytes for item, _ in far.moved)
    for free, target in ((on_host, HOST), (on_host - 1, 1)):
        host = replace(at.request.host, free=at.request.host.margin + free)
        found = avoid_remote_tensors(replace(at, request=replace(at.request, host=host)), far)
        assert {place for _, place in found.moved} == {target}


@pytest.mark.parametrize("fixed", [(), SPLIT], ids=["layers", "layers-and-split"])
def test_the_users_layers_leave_room_for_weights_of_others(fixed: tuple[str, ...]) -> None:
    params = Params(tensor_split=(1.0, 1.0), n_gpu_layers=3)
    at = situation(400, 400, fixed=(*fixed, "n_gpu_layers"), params=params)
    plain, found = (place_partial(at, False, is_plain=is_plain) for is_plain in (True, False))
    assert plain is not None and found is not None and at.prices is not None
    assert found.n_gpu_layers == plain.n_gpu_layers == 3 and is_within(at, found)
    assert at.prices.seconds(found) < 0.9 * at.prices.seconds(plain)


def test_a_split_of_the_users_may_leave_a_single_layer() -> None:
    at = situation(250, 10, fixed=SPLIT, params=Params(tensor_split=(1.0, 0.0)))
    found = place_partial(at, False, is_plain=True)
    assert found is not None and found.counts == (2, 0)
    found = place_partial(replace(at, room=Room((100 * MIB, 0), (100 * MIB, 0), (100 * MIB, 0))), False)
    assert found is not None and found.counts == (1, 0), "the output alone"


UNEQUAL = replace(DENSE, n_layer=4, ffn=(30 * MIB, 30 * MIB + 65536, 128))
"""A device with room for two layers' larger tensors can have those, or all tensors of one layer, 64 KiB less."""

FOR_TWO_LARGER = 2 * (20 + 16) * MIB + 2 * UNEQUAL.ffn[1] + 2 * UNEQUAL.ffn[2]


def test_fewer_layers_lose_tensors() -> None:
    at = situation(1000, model=replace(UNEQUAL, n_layer=2))
    at = replace(at, room=Room((100 * MIB + FOR_TWO_LARGER,), (0,), (0,)))
    found = place_partial(at, True, is_plain=True)
    assert found is not None and found.first == 0 and {item.layer for item, _ in found.moved} == {1}


def test_fewer_layers_lose_tensors_where_the_user_splits() -> None:
    params = Params(tensor_split=(1.0,), n_gpu_layers=3)
    at = situation(1000, model=UNEQUAL, fixed=(*SPLIT, "n_gpu_layers"), params=params)
    at = replace(at, room=Room((100 * MIB + FOR_TWO_LARGER,), (0,), (0,)))
    for each, layers in ((at, {3}), (replace(at, prices=None), {2, 3})):
        found = place_partial(each, True)
        assert found is not None and {item.layer for item, _ in found.moved} == layers


def test_fewer_layers_lose_tensors_to_the_host_than_to_a_slow_remote_device() -> None:
    at = situation(1000, 8000, model=UNEQUAL, speeds=(CARD, ON_A_SLOW_NETWORK))
    at = replace(at, room=Room((FOR_TWO_LARGER, 8000 * MIB), (0, 0), (0, 0)))
    far = pack(at.units, at.room.with_caches, spread=True, counts=(2, 3), apart=0)
    assert far is not None and {item.layer for item, _ in far.moved} == {0, 1}
    assert {(item.layer, target) for item, target in avoid_remote_tensors(at, far).moved} == {(1, HOST)}


TWO_LAYERS = replace(CACHES, n_layer=2)
"""Each with 20 MiB of attention, 100 of tensors and 256 of cache, and an output of 100 MiB."""


@pytest.mark.parametrize(
    ("mib", "tensors_on_host", "first"),
    [
        pytest.param(500, False, 2, id="a layer is on the host"),
        pytest.param(652, True, 1, id="tensors are on the host"),
    ],
)
def test_large_caches_give_way_to_what_is_on_the_host(mib: int, tensors_on_host: bool, first: int) -> None:
    at = situation(mib, model=TWO_LAYERS)
    items = [item for unit in at.units for item in unit.items]
    found = Placement(0, (3,), tuple((item, HOST) for item in items)) if tensors_on_host else Placement(1, (2,))
    assert at.prices is not None and is_within(at, found)
    better = swap_caches_for_weights(at, found)
    assert better.first == first and is_within(at, better)
    assert at.prices.seconds(better) < at.prices.seconds(found)


@pytest.mark.parametrize("near", [None, 0, 5, 11, 15])
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
    at = replace(at, room=Room((90 * MIB,), (90 * MIB,), (700 * MIB,)))
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


@pytest.mark.parametrize(
    ("mib", "gives", "first"),
    [
        pytest.param(400, Workload(30000, 512), 0, id="all-caches"),
        pytest.param(300, Workload(30000, 512), 2, id="as-many-as-fit"),
        pytest.param(400, Workload(2048, 512), 3, id="short-prompts-need-none"),
        pytest.param(600, Workload(30000, 512), 0, id="all-layers-are-there-anyway"),
    ],
)
def test_caches_come_to_the_device_for_long_prompts(mib: int, gives: Workload, first: int) -> None:
    at = long_prompts(mib, gives)
    plain = place_partial(at, True, is_plain=True)
    assert plain is not None and at.prices is not None
    found = add_caches(at, plain)
    assert is_within(at, found) and found.first == first
    assert (found is plain) or at.prices.seconds(found) < at.prices.seconds(plain)
    assert (found is plain) is (plain.first == first)
    # nothing of a state can be there without its weights
    states = replace(at, units=tuple(replace(unit, state=unit.cache) for unit in at.units))
    assert add_caches(states, plain) is plain


@pytest.mark.parametrize(
    ("mib", "first", "count"),
    [pytest.param(360, 0, 8, id="eight"), pytest.param(280, 3, 4, id="four"), pytest.param(300, 2, 6, id="six")],
)
def test_no_more_layers_are_bare_than_there_is_no_room_for(mib: int, first: int, count: int) -> None:
    at = long_prompts(mib, Workload(30000, 512))
    plain = place_partial(at, True, is_plain=True)
    assert plain is not None
    found = add_caches(at, plain)
    bare = {item.layer for item, target in found.moved if "attn" in item.stem and target == HOST}
    assert found.first == first and bare == set(range(first, first + count))
    assert pack(at.units, at.room.with_caches, spread=True, first=first, bare=count - 1) is None


def test_many_caches_gain_what_one_of_them_does_not() -> None:
    at = long_prompts(3000, Workload(6000, 512), n_layer=60)
    plain = place_partial(at, True, is_plain=True)
    assert plain is not None and at.prices is not None
    assert at.prices.all.bare_gain(0) < 0.02 * at.prices.seconds(plain)
    assert add_caches(at, plain).first < plain.first


def test_room_without_caches_is_for_devices_that_have_none() -> None:
    at = situation(700, 500, model=CACHES, speeds=(CARD, SLOW_CARD))
    plain = place_partial(at, True, is_plain=True)
    assert plain is not None
    wide = replace(at, room=replace(at.room, without=(2000 * MIB, 1500 * MIB)))
    for each in (at, wide):
        found = swap_caches_for_weights(each, plain)
        used = zip(weights_on(each.units, found), caches_on(each.units, found), strict=True)
        assert all(w + c <= room for (w, c), room in zip(used, each.room.of(each.units, found), strict=True))


def test_everything_may_stay_on_the_host() -> None:
    assert place_partial(situation(10, 10), False) == Placement(9, (0, 0))
    assert place_partial(situation(10, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=0)), False) == Placement(
        9, (0,)
    )
    assert place_partial(situation(10, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=2)), False) is None
