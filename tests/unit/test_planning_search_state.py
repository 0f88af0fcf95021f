"""What a search knows: which sizes it records, which trials it remembers, what it takes along to other devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from fitter.errors import TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params, Row, TensorBuftOverride
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.placing.placement import Placement
from fitter.planning.request.request import SHARED_ROW, DeviceLimit, Request
from fitter.planning.search import proposals
from fitter.planning.search.proposals import Situation
from fitter.planning.search.search_state import Callbacks, CutShort, SearchState
from tests.support.cases import named_cases
from tests.support.synthetic import CARD, MIB, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request

MODEL = SyntheticModel()
TWO = limits(3000, 1000)


def state_of(llama: SyntheticLlama, asked: Request | None = None) -> SearchState:
    """What a search with these answers knows on both devices."""
    return SearchState(asked or request(MODEL, TWO), TWO, Callbacks(llama.measure, llama.record))


def known(*fixed: str, params: Params | None = None, is_priced: bool = True) -> tuple[SearchState, SyntheticLlama]:
    llama = SyntheticLlama(MODEL, TWO)
    asked = request(MODEL, TWO, params=params, fixed=fixed)
    return state_of(llama, priced(asked, MODEL, CARD, SLOW_CARD) if is_priced else asked), llama


def cache(units: tuple[Unit, ...]) -> int:
    return sum(unit.cache for unit in units)


def test_one_record_tells_the_sizes_at_every_context() -> None:
    found, llama = known()
    for n_ctx in (8192, 4096, 32768, 8192):
        assert cache(found.units(n_ctx)) == cache(found.at(n_ctx).units(n_ctx)) == MODEL.n_layer * MODEL.cache * n_ctx
    assert llama.records == 1
    assert found.smallest_layout is not None and found.smallest_layout.n_ctx == 4096


def test_a_placement_is_measured_once_and_the_one_that_lacks_least_is_remembered() -> None:
    found, llama = known()
    worse, better = Placement(0, (0, 9)), Placement(0, (9, 0))
    # loads of the synthetic llama.cpp fail where the same is asked twice
    trials = [found.trial(placement, 32768) for placement in (worse, better, worse)]
    assert trials[0] is trials[2] and len(llama.asked) == 2
    assert not trials[0].fits and trials[1].fits and found.least is trials[1]


@named_cases(("priced", True), ("not-priced", False))
def test_there_is_no_price_before_anything_is_recorded(is_priced: bool) -> None:
    found, _ = known(is_priced=is_priced)
    assert found.trial(Placement(0, (9, 0)), 4096).seconds is None and not found.can_price
    found.units(4096)
    assert found.can_price is is_priced
    assert (found.trial(Placement(0, (8, 1)), 4096).seconds is not None) is is_priced


def test_prices_are_those_of_the_devices_in_use() -> None:
    found, _ = known()
    found.units(4096)
    alone = found.on(TWO[:1])
    assert found.seconds(Placement(0, (9, 0))) == alone.seconds(Placement(0, (9,)))
    assert found.seconds(Placement(0, (0, 9))) > found.seconds(Placement(0, (9, 0)))


def test_other_devices_know_the_sizes_and_not_the_buffers() -> None:
    found, llama = known()
    found.units(4096)
    found.trial(Placement(0, (8, 1)), 4096)
    other = found.on(TWO[1:])
    assert cache(other.units(4096)) and llama.records == 1
    assert found.buffers.knows_any and not other.buffers.knows_any
    assert other.with_buffers_of(found).buffers.knows_any


@named_cases(("the-same", TWO), ("another-one-is-first", TWO[::-1]), ("one-of-them", TWO[:1]), ("none", ()))
def test_what_the_first_device_has_goes_with_its_place(devices: tuple[DeviceLimit, ...]) -> None:
    found, _ = known()
    measured = found.trial(Placement(0, (5, 4)), 4096).breakdown
    taken = [measured.on(device.name).compute for device in TWO]
    assert taken[0] != taken[1]
    room = found.on(devices).with_buffers_of(found).room(4096, True)
    assert list(room.with_caches) == [device.target - taken[d] for d, device in enumerate(devices)]


def test_room_is_what_a_measured_buffer_leaves() -> None:
    found, _ = known()
    assert found.room(4096, True).with_caches == (3000 * MIB, 1000 * MIB)
    trial = found.trial(Placement(0, (9, 0)), 4096)
    taken = trial.breakdown.on("CUDA0").compute
    assert taken and found.room(4096, True).with_caches == (3000 * MIB - taken, 1000 * MIB)


def test_room_is_what_the_trial_that_was_gone_back_to_leaves() -> None:
    found, _ = known()
    first = found.trial(Placement(0, (9, 0)), 4096)
    found.trial(Placement(0, (5, 4)), 4096)
    room = found.room_left_by(first, True)
    assert room.with_layers[0] == 3000 * MIB - first.breakdown.on("CUDA0").compute


class Heavier(SyntheticLlama):
    """A llama.cpp that needs 7 MiB more on the first device where the second has nothing."""

    def measure(self, params: Params) -> Breakdown:
        found = super().measure(params)
        alone = not found.on("CUDA1").used
        rows = (
            replace(row, model=row.model + 7 * MIB) if alone and row.device == "CUDA0" else row for row in found.rows
        )
        return replace(found, rows=tuple(rows))


def test_what_the_trial_that_was_gone_back_to_was_off_by_is_left_out() -> None:
    found = state_of(Heavier(MODEL, TWO))
    first, second = (found.trial(Placement(0, counts), 4096) for counts in ((9, 0), (5, 4)))
    for trial, off in ((first, 7), (second, 0), (first, 7)):
        left = found.room_left_by(trial, True).with_layers[0]
        assert left == (3000 - off) * MIB - trial.breakdown.on("CUDA0").compute


def test_an_optimist_takes_buffers_of_the_whole_model_for_no_others() -> None:
    found, _ = known()
    taken = found.trial(Placement(0, (9, 0)), 4096).breakdown.on("CUDA0").compute
    for optimistic, left in ((False, 3000 * MIB - taken), (True, 3000 * MIB)):
        assert found.room(4096, False, optimistic).with_caches[0] == left


def test_buffers_beside_a_cache_are_learned_apart() -> None:
    found, _ = known()
    item = found.units(4096)[0].items[0]
    with_cache = found.trial(Placement(0, (5, 4), ((item, HOST),)), 4096).breakdown.on("CUDA1").compute
    without = found.trial(Placement(0, (9, 0), ((item, 1),)), 4096).breakdown.on("CUDA1").compute
    assert with_cache > without > 0
    room = found.room(4096, False)
    assert (room.with_caches[1], room.without[1]) == (1000 * MIB - with_cache, 1000 * MIB - without)


def test_what_stands_beside_the_model_goes_along_to_other_devices() -> None:
    found, _ = known()
    draft = Row(SHARED_ROW, "CUDA0", False, 0, 0, 8 * MIB)
    found.buffers.learn(Breakdown((draft,), ("CUDA0",), 4096), 4096, True, {})
    assert found.on(TWO[:1]).room(4096, True).with_caches == (2992 * MIB,)


def test_sizes_are_recorded_without_the_users_overrides() -> None:
    llama = SyntheticLlama(MODEL, TWO)
    asked: list[Params] = []

    def record(params: Params) -> Layout:
        asked.append(params)
        return llama.record(params)

    override = TensorBuftOverride("blk.0.ffn_up", "CPU")
    params = Params(n_ctx=4096, n_batch=1024, tensor_buft_overrides=(override,))
    SearchState(request(MODEL, TWO, params=params, fixed=("n_ctx",)), TWO, Callbacks(llama.measure, record)).units(4096)
    assert asked == [Params(n_ctx=4096, n_batch=1024)]


@named_cases(
    ("a-guess-gives-way", [Placement(8, (0, 1)), Placement(0, (0, 9))], 1),
    ("lacks-less", [Placement(0, (0, 9)), Placement(0, (1, 8))], 1),
    ("lacks-more", [Placement(0, (1, 8)), Placement(0, (0, 9))], 0),
)
def test_the_trial_that_lacks_least(placements: list[Placement], least: int) -> None:
    found, _ = known()
    trials = [found.trial(placement, 32768 * 4) for placement in placements]
    assert found.least is trials[least]


def test_a_context_is_within_what_the_devices_take() -> None:
    found, llama = known()
    limited = replace(found.original_request, context_limits={"CUDA1": 8192})
    assert SearchState(limited, TWO, found.callbacks).request.n_ctx_max == 8192
    assert SearchState(limited, TWO, found.callbacks).on(TWO[:1]).request.n_ctx_max == 32768
    assert not llama.asked


@dataclass
class Limited(SyntheticLlama):
    """A llama.cpp that answers so many questions in time."""

    in_time: int = 2

    def measure(self, params: Params) -> Breakdown:
        if len(self.asked) == self.in_time:
            raise TimeLimitError("too late")
        return super().measure(params)


@named_cases(("something-fits", (9, 0), CutShort), ("nothing-does", (0, 9), TimeLimitError))
def test_a_time_limit_ends_with_what_fits(first: tuple[int, int], expected: type[Exception]) -> None:
    found = state_of(Limited(MODEL, TWO, in_time=1))
    found.trial(Placement(0, first), 32768)
    with pytest.raises(expected):
        found.trial(Placement(0, (5, 4)), 32768)


@named_cases(("the-first", (32768, 8192)), ("the-second", (8192, 32768)))
def test_a_time_limit_ends_with_the_best_that_fits(contexts: tuple[int, int]) -> None:
    found = state_of(Limited(MODEL, TWO))
    for n_ctx in contexts:
        found.trial(Placement(0, (9, 0)), n_ctx)
    for late, counts in ((found, (8, 1)), (found.on(TWO[:1]), (9,))):
        with pytest.raises(CutShort) as ended:
            late.trial(Placement(0, counts), 4096)
        assert ended.value.best.params.n_ctx == 32768


def test_a_time_limit_ends_with_what_has_a_price() -> None:
    """What has none may have more context: nothing says what that costs."""
    found = state_of(Limited(MODEL, TWO), priced(request(MODEL, TWO), MODEL, CARD, SLOW_CARD))
    found.trial(Placement(0, (9, 0)), 32768)
    found.units(4096)
    found.trial(Placement(0, (9, 0)), 4096)
    with pytest.raises(CutShort) as ended:
        found.trial(Placement(0, (8, 1)), 4096)
    assert ended.value.best.params.n_ctx == 4096 and ended.value.best.seconds is not None


class Deciding(SyntheticLlama):
    """A llama.cpp that turns flash attention off by itself, or as it is told."""

    def measure(self, params: Params) -> Breakdown:
        return replace(super().measure(params), flash_attn=params.flash_attn == "on")


@named_cases(
    ("auto-and-it-does-not-fit", "auto", (0, 9), True),
    ("auto-and-it-fits", "auto", (9, 0), False),
    ("as-the-user-says", "off", (0, 9), False),
    ("it-is-on", "on", (0, 9), False),
)
def test_flash_attention_that_was_lost(word: str, counts: tuple[int, int], lost: bool) -> None:
    found = state_of(Deciding(MODEL, TWO), request(MODEL, TWO, params=Params(flash_attn=word)))
    found.trial(Placement(0, counts), 32768)
    assert found.has_lost_flash is lost
    found.trial(Placement(0, (9, 0)), 4096)
    assert found.has_lost_flash is lost, "it was lost once"


def test_a_trial_has_the_price_of_what_was_measured_and_of_what_was_expected() -> None:
    found, _ = known()
    found.units(4096)
    placement = Placement(0, (5, 4))
    measure = found.callbacks.measure
    splits = replace(found.callbacks, measure=lambda params: replace(measure(params), n_splits=(90, 90)))
    trial = SearchState(found.original_request, TWO, splits, found).trial(placement, 4096)
    assert trial.expected == found.seconds(placement)
    assert trial.seconds == found.seconds(placement, trial.breakdown) != trial.expected


def test_what_is_plain_stays_so_on_other_devices() -> None:
    found, _ = known()
    assert not found.on(TWO).is_plain
    found.be_plain()
    assert found.is_plain and found.on(TWO[:1]).is_plain


def test_a_plain_proposal_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = known()
    said: list[bool] = []

    def partial(at: Situation) -> Placement:
        said.append(at.is_plain)
        return Placement(9, (0, 0))

    monkeypatch.setattr(proposals, "place_partial", partial)
    at = found.situation(4096, is_whole=False)
    for _ in range(2):
        found.place_partial(at)
    found.be_plain()
    plain = found.situation(4096, is_whole=False)
    for each in (plain, at, plain):
        found.place_partial(each)
    assert said == [False, True], "each is proposed once"
    assert not at.is_plain and plain.is_plain


def test_what_was_recorded_goes_along() -> None:
    llama = SyntheticLlama(MODEL, TWO)
    found = state_of(llama)
    assert found.smallest_layout is None
    for n_ctx in (32768, 4096):
        found.units(n_ctx)
    found.trial(Placement(0, (9, 0)), 8192)
    other = found.on(TWO[:1])
    assert other.smallest_layout is not None and other.smallest_layout.n_ctx == 4096
    assert llama.records == 1


def test_a_cache_of_experts_is_split_like_the_layers() -> None:
    made = priced(request(MODEL, TWO, params=Params(moe_cache_size=400 * MIB)), MODEL, CARD)
    found = state_of(SyntheticLlama(MODEL, TWO), made)
    without = SearchState(replace(made, params=Params()), TWO, found.callbacks)
    for is_whole, each in ((True, 0), (False, 400 * MIB // len(found.units(4096)))):
        sizes = [[unit.fixed for unit in state.units(4096, is_whole)] for state in (found, without)]
        assert {a - b for a, b in zip(*sizes, strict=True)} == {each}


def test_what_a_device_leaves_of_a_cache_of_experts_is_no_room() -> None:
    found = state_of(SyntheticLlama(MODEL, TWO), request(MODEL, TWO, params=Params(moe_cache_size=400 * MIB)))
    # the synthetic one makes no cache, so that each device has less than its part of it
    moved = tuple((item, HOST) for unit in found.units(4096) for item in unit.items[:1])
    found.trial(Placement(0, (3, len(found.units(4096)) - 3), moved), 4096)
    room = found.room(4096, False).without
    assert all(size <= device.target for device, size in zip(TWO, room, strict=True))


def test_an_idle_first_device_teaches_nothing_of_a_whole_model() -> None:
    found, _ = known()
    used = found.trial(Placement(0, (9, 0)), 4096).breakdown.on("CUDA0").compute
    found.trial(Placement(0, (0, 9)), 4096)
    assert used and found.buffers.room(found.devices, 4096, True, [0, 0]).with_layers[0] == 3000 * MIB - used
    assert found.buffers.idle(found.devices[0].name, 4096) is None
    found.trial(Placement(9, (0, 0)), 4096)
    assert found.buffers.idle(found.devices[0].name, 4096) is not None
