"""Alternatives to a plan: which there are, that each holds what it says, and that the plan stays the same."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.llama.types import Layout, LayoutEntry, Params
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.pricing.pricing import MeasuredPlacement
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search import best_plan
from fitter.planning.search.alternatives import MOST, MOST_SLOWER, MUCH_LONGER, WORTH, Budget, alternatives
from fitter.planning.search.best_plan import fit
from fitter.planning.search.levers import Candidate
from fitter.planning.search.search_order import search
from fitter.planning.search.search_state import Callbacks
from fitter.planning.speed.caches import cells_of, resized
from fitter.planning.speed.explain import Alternative
from tests.support.cases import named_cases
from tests.support.synthetic import CARD, SyntheticLlama, SyntheticModel, limits, load_calls, priced, request

FAT = SyntheticModel(cache=16384)
"""Its caches are as large as its weights at the trained context."""
FOUR = Params(n_seq_max=4, kv_unified=False)
OPTIONS = {"-c": "n_ctx", "-ctk": "type_k", "-ctv": "type_v", "-np": "n_seq_max"}
ENOUGH = 10_000
"""More dummy loads than any of these need."""


def asked(
    *mib: int,
    model: SyntheticModel = FAT,
    params: Params | None = None,
    fixed: tuple[str, ...] = (),
    host: int = 100_000,
) -> Request:
    # without it a plan has other alternatives
    return priced(request(model, limits(*mib), host, params=params, fixed=(*fixed, "flash_attn")), model, CARD)


class Made:
    """A plan of a request, and its alternatives."""

    def __init__(self, made: Request, model: SyntheticModel = FAT) -> None:
        llama = SyntheticLlama(model, made.devices)
        self.request, self.measure, self.record = made, remembered(llama.measure), cache(llama.record)
        self.trial = search(made, self.measure, self.record)
        params = self.trial.params
        low = params.n_ctx if "n_ctx" in made.fixed else made.n_ctx_min
        self.layout = self.record(replace(made.params, n_ctx=low, tensor_buft_overrides=()))
        self.price = MeasuredPlacement(made, *self.trial.used, params, self.measure(params), self.layout).price()
        self.plan = Candidate(made, self.trial, self.price if self.trial.fits else None, layout=self.layout)

    def alternatives(self, loads: int = ENOUGH, one_slot: Params | None = None) -> tuple[Alternative, ...]:
        calls = Callbacks(self.measure, self.record)
        return alternatives(self.request, self.plan, calls, self.measure, one_slot, None, Budget(loads))

    def words(self, loads: int = ENOUGH, one_slot: Params | None = None) -> list[str]:
        return [" ".join(each.arguments) for each in self.alternatives(loads, one_slot)]


Q8 = "-ctk q8_0 -ctv q8_0"
LONG = Params(n_ctx=32768)


@named_cases(
    ("everything fits at the trained context", asked(20_000), []),
    ("caches that cost room for weights", asked(3000, params=LONG, fixed=("n_ctx",)), [Q8]),
    ("the user's types", asked(3000, params=LONG, fixed=("n_ctx", "type_k", "type_v")), []),
    ("one type", asked(3000, params=replace(LONG, type_v="q8_0"), fixed=("n_ctx", "type_v")), ["-ctk q8_0"]),
    ("without flash attention", asked(3000, params=replace(LONG, flash_attn="off"), fixed=("n_ctx",)), []),
    ("more context on the device", asked(2200), [f"-c 14336 {Q8}"]),
    ("all of it on the device", asked(4000), [f"-c 32768 {Q8}"]),
    ("not much more context", asked(5000), []),
    ("weights on the host", asked(1200), ["-c 8192", f"-c 5632 {Q8}", "-c 32768"]),
    ("a longer context takes too long", asked(1600), [f"-c 4096 {Q8}"]),
    ("a shorter context fits", asked(1200, host=2200, params=LONG, fixed=("n_ctx",)), ["-c 8192"]),
    ("a smaller cache fits", asked(1200, host=600), [f"-c 4096 {Q8}"]),
    ("nothing fits", asked(400, host=400), []),
    ("room for the set context", asked(5000, params=Params(n_ctx=8192), fixed=("n_ctx",)), []),
    ("texts that are only read", asked(1200, params=Params(embeddings=True)), []),
    ("without a device", asked(host=4000, params=LONG, fixed=("n_ctx",)), ["-c 16384", Q8]),
    ("the host has no room for more context", asked(1200, host=900), [f"-c 5632 {Q8}"]),
    ("nothing to win", asked(20_000, params=LONG, fixed=("n_ctx",)), []),
)
def test_which_alternatives_there_are(made: Request, expected: list[str]) -> None:
    assert Made(made).words() == expected


def again(made: Made, alternative: Alternative, one_slot: Params | None = None) -> Made:
    """Fit again with the words of the alternative."""
    pairs = zip(alternative.arguments[::2], alternative.arguments[1::2], strict=True)
    changed = {OPTIONS[word]: int(value) if value.isdigit() else value for word, value in pairs}
    before = made.request
    params = replace(one_slot if "n_seq_max" in changed and one_slot else before.params, **changed)
    return Made(replace(before, params=params, fixed=before.fixed | {"n_ctx", "type_k", "type_v"}))


@pytest.mark.parametrize("mib", [1200, 2200])
@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("host", [100_000, 2200])
def test_a_fit_with_the_words_is_as_said(mib: int, is_set: bool, host: int) -> None:
    made = Made(asked(mib, host=host, params=LONG if is_set else None, fixed=("n_ctx",) if is_set else ()))
    found = made.alternatives()
    assert len(found) <= MOST
    for alternative in found:
        other = again(made, alternative)
        assert alternative.is_measured and other.trial.fits and other.price is not None
        assert other.trial.params.n_ctx == alternative.n_ctx
        assert alternative.generation_tokens_per_second <= 1.02 * other.price.generation_tokens_per_second
        assert alternative.generation_tokens_per_second >= 0.85 * other.price.generation_tokens_per_second
        if made.trial.fits and made.price is not None:
            share = other.price.seconds / made.price.seconds
            is_longer = alternative.n_ctx >= MUCH_LONGER * made.trial.params.n_ctx
            assert share <= (MOST_SLOWER if is_longer else 1 - WORTH) * 1.02


def test_one_slot() -> None:
    # four caches of 8192 tokens become one
    made = Made(asked(1500, params=replace(FOUR, n_ctx=32768), fixed=("n_ctx", "type_k", "type_v")))
    assert made.words(one_slot=None) == []
    one_slot = Params(n_ctx=32768)
    (alternative,) = made.alternatives(one_slot=one_slot)
    assert alternative.arguments == ("-c", "8192", "-np", "1")
    other = again(made, alternative, one_slot)
    assert other.trial.fits and other.price is not None
    assert alternative.generation_tokens_per_second == pytest.approx(other.price.generation_tokens_per_second, rel=0.02)


def test_without_time_for_a_load_there_are_estimates() -> None:
    made = Made(asked(3000, params=LONG, fixed=("n_ctx",)))
    (measured,), (estimated,) = made.alternatives(), made.alternatives(0)
    assert measured.is_measured and not estimated.is_measured
    assert estimated.arguments == measured.arguments
    assert estimated.generation_tokens_per_second == pytest.approx(measured.generation_tokens_per_second, rel=0.1)


@named_cases(
    ("nothing fits", asked(1200, host=2200, params=LONG, fixed=("n_ctx",))),
    ("then all weights are on the device", asked(4000, params=LONG, fixed=("n_ctx",))),
    ("nothing fits at any context", asked(1200, host=600)),
)
def test_an_estimate_is_no_answer(made: Request) -> None:
    assert Made(made).alternatives(), "a measurement would be one"
    assert Made(made).words(0) == []


@named_cases(("does not fit", asked(1200, host=2200, params=LONG, fixed=("n_ctx",))), ("fits", asked(1200)))
def test_the_loads_may_end_at_any(made: Request) -> None:
    every = {" ".join(each.arguments): each for each in Made(made).alternatives()}
    most = 0
    for loads in (0, 1, 2, 3, 8):
        found = Made(made).alternatives(loads)
        measured = [each for each in found if each.is_measured]
        for each in measured:
            whole = every[" ".join(each.arguments)]
            assert each.generation_tokens_per_second <= whole.generation_tokens_per_second
        assert most <= len(measured) <= loads
        most = len(measured)
    assert most == len(every)


def test_after_the_time_limit_there_is_none() -> None:
    made = Made(asked(1200))
    over = Budget(ENOUGH, time.monotonic() - 1)
    assert (
        alternatives(made.request, made.plan, Callbacks(made.measure, made.record), made.measure, None, None, over)
        == ()
    )


@settings(max_examples=15)
@given(
    mib=st.lists(st.integers(100, 6000), min_size=1, max_size=3),
    host=st.sampled_from([500, 2000, 100_000]),
    n_ctx=st.sampled_from([0, 4096, 20_000, 32_768]),
)
def test_a_plan_is_the_same_with_alternatives(mib: list[int], host: int, n_ctx: int) -> None:
    def plan(devices: tuple[DeviceLimit, ...], with_alternatives: bool) -> Plan:
        llama = SyntheticLlama(FAT, devices)
        calls = load_calls(llama, dummy_loads=lambda: len(llama.asked))
        made = asked(*mib, host=host, params=Params(n_ctx=n_ctx), fixed=("n_ctx",) if n_ctx else ())
        summary = ModelSummary("model.gguf", "model", "llama", 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(best_plan, "SHARE", 1000)
            patch.setattr(best_plan, "SHARE_OF_FAILURE", 1000)
            found = fit(made, summary, calls, lambda progress: None, True, with_alternatives=with_alternatives)
        return replace(found, search=replace(found.search, seconds=0.0))

    devices = limits(*mib)
    without, having = plan(devices, False), plan(devices, True)
    assert without.alternatives == () and len(having.alternatives) <= MOST
    assert replace(having, alternatives=()) == without


@named_cases(
    ("all tokens", 4096, Params(), 0, 4096),
    ("padded", 4097, Params(), 0, 4352),
    ("four caches", 4096, FOUR, 0, 4096),
    ("each padded", 4100, FOUR, 0, 5120),
    ("a window and a micro batch", 4096, Params(), 1024, 1536),
    ("a window as long as the context", 1024, Params(), 1024, 1024),
    ("four windows", 8192, FOUR, 1024, 6144),
    ("four windows in one cache", 8192, replace(FOUR, kv_unified=True), 1024, 4608),
    ("without windows", 8192, Params(swa_full=True), 1024, 8192),
)
def test_cells_of_a_cache(n_ctx: int, params: Params, window: int, cells: int) -> None:
    assert cells_of(n_ctx, params, window) == cells


def test_a_row_for_several_tokens_grows_with_the_context() -> None:
    """DeepSeek V4: a window stays, rows for four tokens each grow, and those for 128 do not fill 256 cells yet."""
    names = ("cache_k_l0", "cache_k_l1", "cache_k_l0", "cache_k_l1")
    recorded = Layout(tuple(LayoutEntry("LAYOUT", name, "context", 1024) for name in names), 128, 4096)
    after = resized(recorded, 128, (), Params(), Params(n_ctx=32768), (4, 128))
    assert [entry.bytes for entry in after.entries] == [1024, 1024, 8 * 1024, 1024]


def test_a_layout_with_other_parameters() -> None:
    names = ("cache_k_l0", "cache_v_l0", "cache_k_l1", "cache_r_l2")
    entries = tuple(LayoutEntry("LAYOUT", name, "context", 4096 * 64) for name in names)
    weight = LayoutEntry("LAYOUT", "blk.0.attn_q.weight", "model", 1000)
    recorded = Layout((weight, *entries), 128, 4096)
    before = Params(n_seq_max=2, kv_unified=True)
    after = resized(recorded, 512, {1}, before, Params(n_ctx=16384, n_seq_max=1, type_k="q8_0"))
    assert after.n_ctx == 16384
    assert [entry.bytes for entry in after.entries] == [
        1000,
        # four times the context, 34 bytes for 64
        4096 * 64 * 4 * 34 // 64,
        4096 * 64 * 4,
        # two windows and a micro batch become one of each
        round(4096 * 64 * 1024 / 1536 * 34 / 64),
        4096 * 32,
    ]
