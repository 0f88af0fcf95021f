"""What placements are estimated to take before anything was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from fitter.llama.types import Breakdown, Params, Row
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.prices import PriceList
from fitter.planning.request.request import HostLimit
from fitter.planning.speed import cost
from tests.support.cases import cases, named_cases
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

MODEL = SyntheticModel()
TWO = limits(3000, 3000)


def recorded(n_ctx: int = 4096) -> tuple[Unit, ...]:
    asked = request(MODEL, TWO)
    return units_of(SyntheticLlama(MODEL, TWO).record(Params(n_ctx=n_ctx)), MODEL.n_layer, asked.is_movable)


def prices(*speeds: DeviceSpeed, objective: str = "request", n_seq_max: int = 1) -> PriceList:
    asked = request(MODEL, TWO, params=Params(n_seq_max=n_seq_max))
    asked = replace(priced(asked, MODEL, *speeds), objective=objective)
    return PriceList(asked, TWO, {4096: recorded()})


FIRST, SECOND, BOTH, ON_HOST = Placement(0, (9, 0)), Placement(0, (0, 9)), Placement(0, (5, 4)), Placement(9, (0, 0))


@named_cases(
    ("one-rather-than-two", prices(CARD), FIRST, BOTH),
    ("a-device-rather-than-the-host", prices(CARD), FIRST, ON_HOST),
    ("the-fast-one", prices(SLOW_CARD, CARD), SECOND, FIRST),
    ("no-network", prices(CARD, REMOTE_CARD), FIRST, SECOND),
    ("for-a-prompt", prices(CARD, objective="prompt"), FIRST, ON_HOST),
    ("for-generation", prices(CARD, objective="generation"), FIRST, ON_HOST),
)
def test_faster(found: PriceList, faster: Placement, slower: Placement) -> None:
    assert found.seconds(faster) < found.seconds(slower)


def test_the_parts_of_the_objective_add_up() -> None:
    whole, *parts = (prices(CARD, objective=of).seconds(BOTH) for of in ("request", "prompt", "generation"))
    assert whole == pytest.approx(sum(parts))


def test_what_is_alike_has_one_price() -> None:
    found = prices(CARD, CARD)
    assert found.seconds(FIRST) == found.seconds(SECOND)
    assert found.all.times(recorded()) is None and prices(CARD, SLOW_CARD).all.times(recorded()) is not None


def test_units_add_up_to_a_placement() -> None:
    found = prices(CARD)
    fixed = found.seconds(FIRST) - sum(found.all.unit_seconds(0))
    # a first split of the graph is all that is not a unit's
    assert 0 <= fixed < 0.05 * found.seconds(FIRST)
    assert sum(found.all.unit_seconds(HOST)) > sum(found.all.unit_seconds(0))


UNITS = recorded()


def away(*layers: int) -> Placement:
    """All on the first device but for what can leave these layers."""
    return Placement(0, (9, 0), tuple((item, HOST) for layer in layers for item in UNITS[layer].items))


OBJECTIVES = ["generation", "prompt", "request"]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("layers", [(3,), (0, 5), (2, 3, 7)], ids=str)
def test_what_leaves_a_layer_costs_its_bytes_and_its_going_apart(layers: tuple[int, ...], objective: str) -> None:
    found = prices(CARD, SLOW_CARD, objective=objective)

    def apart(*layers: int) -> float:
        """Seconds beside those of the bytes."""
        of_bytes = sum(UNITS[layer].movable * found.all.saved_by_byte(UNITS[layer].items) for layer in layers)
        assert of_bytes > 0
        return found.seconds(away(*layers)) - found.seconds(FIRST) - of_bytes

    assert apart(*layers) == pytest.approx(len(layers) * apart(1)) and apart(1) > 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_order_of_layers_does_not_decide_between_equal_placements(objective: str) -> None:
    def parted(one: int, all_of_it: int, elsewhere: int) -> Placement:
        """One item of a layer and all items of another on the host, one of a third on the second device."""
        moved = [(UNITS[one].items[0], HOST), *((item, HOST) for item in UNITS[all_of_it].items)]
        return Placement(0, (9, 0), tuple(sorted([*moved, (UNITS[elsewhere].items[0], 1)])))

    found = prices(CARD, CARD, objective=objective)
    assert len({found.seconds(parted(*layers)) for layers in permutations(range(8), 3)}) == 1


def test_on_the_slow_card_a_byte_saves_less() -> None:
    found = prices(CARD, SLOW_CARD, objective="generation").all
    # from 60 to 200 instead of to 1000 GB/s, a ninth of what a token takes
    assert 0 < found.saved_by_byte(UNITS[0].items, 1) < 0.9 * found.saved_by_byte(UNITS[0].items, 0)
    times = found.times(UNITS)
    assert times is not None and times.by_byte == (
        found.saved_by_byte(UNITS[0].items, 0),
        found.saved_by_byte(UNITS[0].items, 1),
    )
    assert times.units == (tuple(found.unit_seconds(0)), tuple(found.unit_seconds(1)))


def test_what_cannot_leave_saves_nothing() -> None:
    assert prices(CARD).all.saved_by_byte(UNITS[-1].items) == 0


def test_passing_on_costs_a_hop() -> None:
    found = prices(CARD, CARD, objective="generation")
    assert found.seconds(BOTH) - found.seconds(FIRST) == pytest.approx(found.all.hop)
    assert found.all.hop > 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_network_is_paid_for_each_visit(objective: str) -> None:
    found = prices(CARD, REMOTE_CARD, objective=objective)
    split = prices(CARD, objective=objective).all.hop - cost.default().hop * HOPS[objective]
    whole = found.seconds(SECOND)
    assert whole == pytest.approx(sum(found.all.unit_seconds(1)) + found.all.visits[1] + split)


# micro batches of 512 in a prompt of 2048, and generated tokens
HOPS = {"generation": 512, "prompt": 4, "request": 516}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_units_are_priced_one_by_one(objective: str) -> None:
    found = prices(CARD, objective=objective)
    each = found.all.unit_seconds(0)
    assert len(each) == len(UNITS) and len(set(each[:-1])) == 1
    # the output is 100 MiB without a cache, a layer 120 with one
    assert 0 < each[-1] < each[0]
    host = found.all.unit_seconds(HOST)
    assert len(set(host[:-1])) == 1 and all(there > here for there, here in zip(host, each, strict=True))


def test_layers_that_are_not_computed_take_no_time() -> None:
    # those for multi-token prediction are before the output, and have units too
    asked = priced(request(MODEL, TWO), MODEL, CARD)
    assert asked.facts is not None
    fewer = replace(asked, facts=replace(asked.facts, layers=asked.facts.layers[:6]))
    every, six = (PriceList(each, TWO, {4096: UNITS}).all.unit_seconds(0) for each in (asked, fewer))
    assert six == [*every[:6], 0.0, 0.0, every[8]]


@cases(0, 5, 7)
def test_a_bare_cache_saves_what_it_says(layer: int) -> None:
    # all weights of the layer stay on the host, and its cache is on the device or is not
    names = [f"blk.{layer}.{stem}.weight" for stem in ("attn_q", "ffn_gate", "ffn_up", "ffn_down")]
    asked = priced(request(MODEL, TWO), MODEL, CARD, SLOW_CARD)
    asked = replace(asked, pinned=dict.fromkeys(names, HOST), objective="generation")
    found = PriceList(asked, TWO, {4096: UNITS})
    bare, on_host = (found.seconds(Placement(first, (9 - first, 0))) for first in (layer, layer + 1))
    assert on_host - bare == pytest.approx(prices(CARD, objective="generation").all.bare_gain(layer))
    assert found.all.bare_gain(8) == 0, "the output has no cache"


def test_what_is_streamed_takes_the_link_and_is_read_by_the_host() -> None:
    # 100 MiB of feed-forward and 20 of attention, for four micro batches over the link and 512 tokens on the host
    size = 120 * 2**20
    for objective, seconds in (
        ("prompt", 4 * size / (cost.default().pcie * 32e9)),
        ("generation", 512 * size / (cost.default().host.bandwidth * 60e9)),
    ):
        found = prices(CARD, replace(CARD, compute=1e30), objective=objective).all
        assert found.streaming(1) == pytest.approx(seconds, rel=1e-6)


def test_measured_splits_count() -> None:
    few, many = (Breakdown((), ("CUDA0",), 4096, True, (splits, splits)) for splits in (2, 40))
    assert prices(CARD).seconds(FIRST, few) < prices(CARD).seconds(FIRST, many)


@cases(True, False, None)
def test_attention_is_priced_as_it_was_measured(flash: bool | None) -> None:
    # a CPU attends to a cache faster without flash attention, a device does not read it otherwise
    found = prices(CARD, objective="generation")
    measured = Breakdown((), ("CUDA0",), 4096, flash, (1, 1))
    with_it = replace(measured, flash_attn=True)
    assert (found.seconds(ON_HOST, measured) < found.seconds(ON_HOST, with_it)) is (flash is False)
    assert found.seconds(FIRST, measured) == found.seconds(FIRST, with_it)


def test_a_slower_link_streams_longer() -> None:
    found = prices(CARD, replace(CARD, pcie=8e9)).all
    assert found.streaming(1) > found.streaming(0) > 0


def test_what_the_user_has_put_on_a_device_is_not_streamed() -> None:
    pinned = {f"blk.{layer}.ffn_{kind}.weight": 1 for layer in range(MODEL.n_layer) for kind in ("up", "down")}
    asked = replace(priced(request(MODEL, TWO), MODEL, CARD), pinned=pinned)
    found = PriceList(asked, TWO, {4096: recorded()}).all
    assert 0 < found.streaming(0) < prices(CARD).all.streaming(0)
    assert found.streaming(0) == found.streaming(1)


def test_the_largest_layer_is_what_is_streamed() -> None:
    names = [f"blk.{layer}.ffn_{kind}.weight" for layer in range(MODEL.n_layer) for kind in ("up", "down")]
    for kept in (0, 3, MODEL.n_layer - 1):
        pinned = {name: 1 for name in names if not name.startswith(f"blk.{kept}.")}
        asked = replace(priced(request(MODEL, TWO), MODEL, CARD), pinned=pinned)
        found = PriceList(asked, TWO, {4096: recorded()}).all
        assert found.streaming(0) == prices(CARD).all.streaming(0)


def test_only_a_network_has_visits() -> None:
    found = prices(CARD, REMOTE_CARD).all
    assert found.visits[0] == 0 < found.visits[1]
    assert (found.is_remote(0), found.is_remote(1)) == (False, True)


def test_a_bare_cache_costs_the_splits_that_the_data_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = prices(CARD).all.bare_gain(0)
    more = replace(cost.default(), splits=replace(cost.default().splits, bare=cost.default().splits.bare + 5))
    monkeypatch.setattr(cost, "default", lambda: more)
    found = prices(CARD).all
    split = prices(CARD, objective="generation")
    assert found.bare_gain(0) < usual and split.all.bare_gain(0) < usual
    assert cost.default().splits.bare == 15


def test_prices_are_of_the_largest_context_known_when_first_asked_for() -> None:
    units = {4096: recorded()}
    asked = priced(request(MODEL, TWO), MODEL, CARD)
    found = PriceList(asked, TWO, units)
    before = found.all
    units[8192] = recorded(8192)
    assert found.all is before
    assert PriceList(asked, TWO, units).seconds(FIRST) == pytest.approx(found.seconds(FIRST))


@cases((9000, True), (9000, False), (None, True))
def test_a_host_with_room_reads_nothing_from_its_disk(host_mib: int | None, paging: bool) -> None:
    plain, other = (
        PriceList(priced(request(MODEL, TWO, mib, paging=allowed), MODEL, CARD), TWO, {4096: recorded()})
        for mib, allowed in ((None, False), (host_mib, paging))
    )
    assert other.seconds(ON_HOST) == plain.seconds(ON_HOST)


def test_what_else_the_host_holds_leaves_less_room_for_weights() -> None:
    asked = priced(request(MODEL, TWO, 1000, paging=True), MODEL, CARD)
    found = PriceList(asked, TWO, {4096: recorded()})
    rows = [Row("CPU", None, True, 3000 * MIB, 0, others * MIB) for others in (0, 400)]
    few, many = (found.seconds(ON_HOST, Breakdown((row,), (), 4096, n_splits=(1, 1))) for row in rows)
    assert (
        many > few > PriceList(replace(asked, host=HostLimit(None, None, 0)), TWO, {4096: recorded()}).seconds(ON_HOST)
    )
