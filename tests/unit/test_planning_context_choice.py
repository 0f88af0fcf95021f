"""Which context: the order of its questions, on the synthetic llama.cpp; and what is expected, and held in total."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fitter.errors import LlamaCppCrashError
from fitter.llama.types import Breakdown, Params, Row
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import longest_seconds
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import SHARED_ROW, DeviceLimit, HostLimit, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search.context_choice import best_at
from fitter.planning.search.corrections import settle, settle_partial, settle_whole
from fitter.planning.search.expectations import (
    context_in_total,
    expected_seconds,
    expected_whole,
    is_tight,
    is_too_large,
    last_true,
    likely_fits_host,
    total_target,
)
from fitter.planning.search.search_order import search
from fitter.planning.search.search_state import Callbacks, SearchState
from fitter.text import MIB
from tests.support.cases import cases, named_cases
from tests.support.synthetic import CARD, DENSE, MOE, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request


def known_of(asked: Request, model: SyntheticModel, llama: SyntheticLlama | None = None) -> SearchState:
    llama = llama or SyntheticLlama(model, asked.devices)
    return SearchState(asked, asked.devices, Callbacks(remembered(llama.measure), llama.record))


def known(
    *mib: int,
    model: SyntheticModel = DENSE,
    n_ctx: int | None = None,
    host_mib: int | None = None,
    speeds: tuple[DeviceSpeed, ...] = (CARD,),
    **more: object,
) -> SearchState:
    devices: tuple[DeviceLimit, ...] = limits(*mib)
    fixed = () if n_ctx is None else ("n_ctx",)
    made = request(model, devices, host_mib=host_mib, params=Params(n_ctx=n_ctx or 0), fixed=fixed)
    return known_of(replace(priced(made, model, *speeds), **more), model)  # type: ignore[arg-type]


def chosen(state: SearchState) -> Trial:
    return search(state.original_request, state.callbacks.measure, state.callbacks.record)


@named_cases(
    ("everything", known(8000), 32768, True),
    ("as much as the whole model leaves room for", known(1500), 11264, True),
    ("more of it for a tensor on the host", known(3500, 3000, model=MOE), 26624, False),
    ("a tenth of the time is for more context", known(900), 5632, False),
    ("the quickest, and as much as takes as long", known(900, context_cost=0.0), 4608, False),
    ("no limit", known(900, context_cost=math.inf), 32768, False),
    ("context is the objective", known(900, objective="context"), 32768, False),
    ("as upstream", known(900, strategy="llama.cpp"), 4096, False),
    ("as upstream, the whole model", known(1500, strategy="llama.cpp"), 11264, True),
    # for 4352 tokens another tensor is on the host: a fifth more time
    ("next to no room beside it", known(1215, host_mib=600), 4096, False),
    ("what the host holds", known(640, 1019, host_mib=600, objective="context"), 27392, False),
    ("the user's", known(900, n_ctx=5120), 5120, False),
    ("the most", known(1500, objective="context"), 32768, False),
    # at 32768 tokens even the output alone is 27 MiB too much for its buffer
    ("the most with nothing on the device", known(220, objective="context"), 32768, False),
    ("nothing on either", known(150, 150, objective="context"), 32768, False),
    ("on the host", known(host_mib=1400), 7168, False),
)
def test_chosen_context(found: SearchState, n_ctx: int, is_whole: bool) -> None:
    trial = chosen(found)
    assert trial.fits and trial.params.n_ctx == n_ctx
    assert (trial.placement.first == 0 and not trial.placement.moved) is is_whole


def test_what_llama_cpp_does_by_itself_is_enough_where_nothing_can_be_priced() -> None:
    devices = limits(8000, 4000)
    found = known_of(request(DENSE, devices, params=Params(n_ctx=4096), fixed=("n_ctx",)), DENSE)
    assert chosen(found).placement == found.default == Placement(0, (6, 3))


def test_no_plan_has_more_context_than_the_largest() -> None:
    assert not chosen(known(640, 1019, host_mib=600, n_ctx=27392 + 256)).fits


def test_what_lacks_least_is_looked_for_at_the_smallest_context() -> None:
    trial = chosen(known(3332, model=MOE, host_mib=300, objective="context"))
    assert not trial.fits and trial.params.n_ctx == 4096


@cases((750, 10240), (800, 12288), (850, 13312))
def test_contexts_for_which_the_host_has_no_room_are_not_asked(host_mib: int, n_ctx: int) -> None:
    made = known(900, host_mib=host_mib, context_cost=2.0).original_request
    llama = SyntheticLlama(DENSE, made.devices)
    assert search(made, remembered(llama.measure), llama.record).params.n_ctx == n_ctx
    assert len({params.n_ctx for params in llama.asked if params.n_ctx > n_ctx}) <= 1


@pytest.mark.parametrize("mib", range(1300, 2100, 90))
def test_the_next_larger_context_leaves_no_room_for_the_whole_model(mib: int) -> None:
    n_ctx = chosen(known(mib, context_cost=0.0)).params.n_ctx
    assert settle_whole(known(mib), n_ctx) is not None and settle_whole(known(mib), n_ctx + 256) is None


def test_a_byte_more_is_never_less_context() -> None:
    before = 0
    for mib in range(700, 1100, 25):
        n_ctx = chosen(known(mib)).params.n_ctx
        is_round = n_ctx // 256 < 16 or n_ctx // 256 % 2 == 0
        assert is_round, "weights leave the device for round contexts alone"
        assert n_ctx >= before or chosen(known(mib)).seconds < chosen(known(mib - 25)).seconds  # type: ignore[operator]
        before = n_ctx


@named_cases(
    ("one card", known(900)),
    ("one card, nearly the whole model", known(1200)),
    ("one card, experts", known(2500, model=MOE)),
    ("two cards", known(500, 600)),
    ("a slow card", known(900, 600, speeds=(CARD, SLOW_CARD))),
    ("a slow card holds the rest", known(1300, 3000, speeds=(CARD, SLOW_CARD))),
    ("three cards, experts", known(1500, 1000, 1200, model=MOE, speeds=(CARD, SLOW_CARD, CARD))),
    ("for prompts", known(900, objective="prompt")),
    ("half as long again", known(900, context_cost=0.5)),
    ("little host memory", known(900, host_mib=700)),
)
def test_the_chosen_context_is_the_scans(found: SearchState) -> None:
    """No context by steps of an eighth is larger by a step, and takes no longer than the rule allows."""
    asked = found.original_request
    # searches at many contexts ask less often for plans without it
    found = found.on(found.devices, replace(asked, fixed=asked.fixed | {"flash_attn"}))
    trial = chosen(found)
    n_ctx, seconds = 4096, {}
    while n_ctx <= asked.n_ctx_max:
        at = chosen(found.at(n_ctx))
        if at.fits and at.seconds:
            seconds[n_ctx] = at.seconds
        n_ctx = max(n_ctx + 256, n_ctx * 9 // 8 // 256 * 256)
    longest = longest_seconds(asked, min(seconds.values()))
    largest = max(n_ctx for n_ctx in seconds if seconds[n_ctx] <= longest)
    assert trial.fits and trial.seconds and trial.seconds <= longest * 1.001
    assert largest * 8 / 9 < trial.params.n_ctx < largest * 9 / 8 + 256


def test_where_nothing_fits_it_is_what_lacks_least() -> None:
    trial = chosen(known(900, host_mib=100))
    assert not trial.fits and trial.deficit > 0


class Crashing(SyntheticLlama):
    """A llama.cpp that aborts beyond 20000 tokens."""

    def measure(self, params: Params) -> Breakdown:
        if params.n_ctx > 20000:
            raise LlamaCppCrashError("SIGABRT")
        return super().measure(params)


@cases("request", "context", "without prices")
def test_a_crash_is_a_context_too_large(objective: str) -> None:
    devices = limits(8000)
    asked = request(DENSE, devices)
    if objective != "without prices":
        asked = replace(priced(asked, DENSE, CARD), objective=objective)
    trial = chosen(known_of(asked, DENSE, Crashing(DENSE, devices)))
    assert trial.fits and 19000 < trial.params.n_ctx <= 20000
    own = replace(asked, params=Params(n_ctx=30000), fixed=frozenset({"n_ctx"}))
    with pytest.raises(LlamaCppCrashError, match="SIGABRT"):
        chosen(known_of(own, DENSE, Crashing(DENSE, devices)))


@named_cases(
    ("much-room", 3000, False, False),
    ("room-for-a-buffer", 1220, False, False),
    ("next-to-none", 1140, False, True),
    ("less-than-weights-and-caches", 1120, True, True),
)
def test_what_is_too_large_by_itself(mib: int, too_large: bool, tight: bool) -> None:
    # weights on devices take 1060 MiB, the caches of 4096 tokens 128 less what is rounded
    model = replace(DENSE, cache=2048)
    found = known(mib, model=model)
    assert total_target(found) == mib * MIB
    assert (is_too_large(found, 4096), is_tight(found, 4096)) == (too_large, tight)


@named_cases(
    ("one-device", DENSE, (1400,), 4096),
    ("all-of-it", DENSE, (4000, 4000), 32768),
    ("none-of-it", DENSE, (700, 700), 4096),
    # 1429 MiB at 4096 tokens, 2437 at 32768, and 3 times 66 of 1800 are wasted
    ("a-part-of-it", DENSE, (900, 900), 8960),
    ("a-device-that-adds-nothing", DENSE, (30, 900, 900), 8960),
    # 5829 MiB, 6837, and 3 times 114 of 6400
    ("experts-waste-less", MOE, (3200, 3200), 10496),
)
def test_context_in_total(model: SyntheticModel, mib: tuple[int, ...], expected: int) -> None:
    found = known(*mib, model=model)
    top, bottom = (found.trial(found.default, n_ctx) for n_ctx in (32768, 4096))
    assert context_in_total(found, top, bottom) == expected


@named_cases(("between", 0, 10, 5, 5), ("all", 0, 10, 99, 9), ("none", 3, 10, 0, 3), ("nothing-to-ask", 3, 4, 0, 3))
def test_last_true(low: int, high: int, until: int, expected: int) -> None:
    assert last_true(low, high, lambda n: n <= until) == expected
    assert {last_true(low, high, lambda n: n <= until, near) for near in range(-1, 12)} == {expected}


@cases(1, 2, 7, 80)
def test_no_number_is_asked_for_twice_wherever_the_search_begins(most: int) -> None:
    for until in range(most + 1):
        for near in range(1, most + 1):
            asked: list[int] = []

            def holds(number: int, asked: list[int] = asked, until: int = until) -> bool:
                asked.append(number)
                return number <= until

            assert last_true(0, most + 1, holds, near) == until
            assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 1
            assert all(1 <= number <= most for number in asked)


def test_a_number_close_to_the_answer_takes_few_questions() -> None:
    asked: list[int] = []

    def holds(n: int) -> bool:
        asked.append(n)
        return n <= 500

    assert last_true(0, 1000, holds, 501) == 500 and asked == [501, 500]


def test_contexts_that_are_known_to_be_too_slow_are_not_measured() -> None:
    devices = limits(900)
    llama = SyntheticLlama(DENSE, devices)
    trial = chosen(known_of(priced(request(DENSE, devices), DENSE, CARD), DENSE, llama))
    # the second is the largest with flash attention, which is slower here
    assert {params.n_ctx for params in llama.asked} == {4096, 5632, trial.params.n_ctx}


def test_what_is_promised_is_what_then_fits() -> None:
    found = known(1500)
    found.trial(found.default, 4096)
    found.trial(found.default, 32768)
    largest = last_true(16, 129, lambda n: expected_whole(found, 256 * n) < math.inf) * 256
    assert settle_whole(found, largest) is not None and settle_whole(found, largest + 256) is None


@cases((None, True), (500, True), (120, False))
def test_promises_of_the_host(host_mib: int | None, expected: bool) -> None:
    found = known(8000, host_mib=host_mib)
    assert likely_fits_host(found, 32768), "nothing is known yet"
    found.trial(found.default, 4096)
    found.trial(found.default, 32768)
    assert likely_fits_host(found, 32768 * 60) is expected


@named_cases(("just enough", 0, False, True), ("a byte less", -1, False, False), ("weights are paged", -1, True, True))
def test_a_host_holds_what_was_measured_there(more: int, paging: bool, expected: bool) -> None:
    # the token embedding, 10 MiB and 8 bytes for each token
    used = 110 * MIB + 32768 * 8
    found = known(8000, host=HostLimit(used + more, used + more, 0, paging))
    found.trial(found.default, 4096)
    found.trial(found.default, 32768)
    assert likely_fits_host(found, 32768) is expected


@cases((8 * MIB, True), (8 * MIB - 1, False))
def test_a_device_beside_the_models_holds_what_shares_the_memory(free: int, expected: bool) -> None:
    beside = replace(limits(1, 1)[1], free=free)
    found = known(8000, beside=(beside,))
    assert likely_fits_host(found, 4096), "nothing is known yet"
    draft = Row(SHARED_ROW, "CUDA1", False, 0, 0, 8 * MIB)
    found.buffers.learn(Breakdown((draft,), ("CUDA0",), 4096), 4096, True, {})
    assert likely_fits_host(found, 4096) is expected


@named_cases(
    ("all-of-it-on-a-slow-one", DENSE, (900, 8000), (CARD, SLOW_CARD), 1),
    ("a-part-of-it-on-the-first", DENSE, (900, 700), (CARD,), 0),
    ("a-part-of-it-on-the-second", DENSE, (900, 700), (CARD,), 1),
    ("experts-on-the-first", MOE, (2500, 3000), (CARD,), 0),
    ("experts-on-the-second", MOE, (2500, 3000), (CARD, SLOW_CARD), 1),
)
def test_a_plan_is_expected_as_it_then_is(
    model: SyntheticModel, mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...], kept: int
) -> None:
    devices = limits(*mib)
    both = known_of(priced(request(model, devices), model, *speeds), model).at(4096)
    assert math.isinf(expected_seconds(both, 4096)), "nothing is known"
    best_at(both)
    alone = both.on(devices[kept : kept + 1]).with_buffers_of(both)
    likely, hoped = (expected_seconds(alone, 4096, optimistic=optimistic) for optimistic in (False, True))
    trial = best_at(alone)
    # a tensor may be on the host that was not expected there
    assert likely == pytest.approx(trial.expected, rel=0.1)
    assert hoped <= likely


def test_settling_corrects_until_it_fits() -> None:
    found = known(900)
    trial = settle_partial(found, 4096)
    assert trial is not None and trial.fits
    # what is left is less than the smallest tensor
    assert 900 * MIB - trial.breakdown.on("CUDA0").used < 30 * MIB
    assert settle(found, 4096, False, lambda at: None) is None
