"""What placements are estimated to take before anything was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.llama.types import Breakdown, Params
from fitter.machine.speed import DeviceSpeed
from fitter.planning import cost
from fitter.planning.memory import HOST, Unit, units_of
from fitter.planning.placement import Placement
from fitter.planning.prices import PriceList
from tests.unit.synthetic import CARD, REMOTE_CARD, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request

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


@pytest.mark.parametrize(
    ("found", "faster", "slower"),
    [
        pytest.param(prices(CARD), FIRST, BOTH, id="one-rather-than-two"),
        pytest.param(prices(CARD), FIRST, ON_HOST, id="a-device-rather-than-the-host"),
        pytest.param(prices(SLOW_CARD, CARD), SECOND, FIRST, id="the-fast-one"),
        pytest.param(prices(CARD, REMOTE_CARD), FIRST, SECOND, id="no-network"),
        pytest.param(prices(CARD, objective="prompt"), FIRST, ON_HOST, id="for-a-prompt"),
        pytest.param(prices(CARD, objective="generation"), FIRST, ON_HOST, id="for-generation"),
    ],
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


def test_measured_splits_count() -> None:
    few, many = (Breakdown((), ("CUDA0",), 4096, True, (splits, splits)) for splits in (2, 40))
    assert prices(CARD).seconds(FIRST, few) < prices(CARD).seconds(FIRST, many)


def test_every_sequence_at_once_takes_longer() -> None:
    assert prices(CARD, n_seq_max=8).busy(FIRST) > prices(CARD, n_seq_max=8).seconds(FIRST)
    assert prices(CARD).busy(FIRST) == prices(CARD).seconds(FIRST)


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
    more = replace(cost.default(), bare_splits=cost.default().bare_splits + 5)
    monkeypatch.setattr(cost, "default", lambda: more)
    found = prices(CARD).all
    split = prices(CARD, objective="generation")
    assert found.bare_gain(0) < usual and split.all.bare_gain(0) < usual
    assert cost.default().bare_splits == 15


def test_prices_are_of_the_largest_context_known_when_first_asked_for() -> None:
    units = {4096: recorded()}
    asked = priced(request(MODEL, TWO), MODEL, CARD)
    found = PriceList(asked, TWO, units)
    before = found.all
    units[8192] = recorded(8192)
    assert found.all is before
    assert PriceList(asked, TWO, units).seconds(FIRST) == pytest.approx(found.seconds(FIRST))
