"""Variants: which ones a search asks for, micro batches above all, and that no other one is faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fitter.llama.types import Params
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.pricing import bound_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.constraints import workload_of
from fitter.planning.request.given import is_pipelined, keeps_pipeline, micro_batches, params_of
from fitter.planning.request.request import Request
from fitter.planning.request.shared import remembered
from fitter.planning.search.room import LearnedCompute
from fitter.planning.search.search_order import search
from fitter.planning.search.search_state import Callbacks, SearchState
from fitter.planning.search.variants import WORTH, Answer, Kind, Variant, Variants, is_little, likely_seconds
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.explain import Choice
from tests.support.cases import cases, named_cases
from tests.support.synthetic import CARD, DENSE, MIB, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request

MOE = SyntheticModel(experts=(90 * MIB, 90 * MIB, 90 * MIB))


def asked(*mib: int, model: SyntheticModel = DENSE, prompt: int = 2048, **more: object) -> Request:
    made = request(model, limits(*mib), params=Params(n_ctx=32768), fixed=("n_ctx",), chooses_micro_batch=True)
    return replace(priced(made, model, CARD, SLOW_CARD), workload=Workload(prompt, 512), **more)  # type: ignore[arg-type]


def found(made: Request, model: SyntheticModel = DENSE) -> Trial:
    llama = SyntheticLlama(model, made.devices)
    return search(made, remembered(llama.measure), llama.record)


def pinned(made: Request, n_ubatch: int) -> Request:
    params = replace(made.params, n_ubatch=n_ubatch, n_batch=max(made.params.n_batch, n_ubatch))
    return replace(made, params=params, fixed=made.fixed | {"n_ubatch"})


@named_cases(
    ("no more than the prompt", asked(1000), (64, 128, 256, 512, 1024, 2048)),
    ("a token more", asked(1000, prompt=2049), (64, 128, 256, 512, 1024, 2048, 4096)),
    ("at most 8192", asked(1000, prompt=1 << 20), tuple(1 << n for n in range(6, 14))),
    ("a short prompt", asked(1000, prompt=10), (64, 512)),
    ("a token of every slot", asked(1000, params=Params(n_seq_max=200)), (256, 512, 1024, 2048)),
    ("the program's", asked(1000, prompt=200, params=Params(n_ubatch=300)), (64, 128, 256, 300)),
    ("the user's", asked(1000, fixed=frozenset({"n_ubatch"})), (512,)),
    ("the batch's", asked(1000, fixed=frozenset({"n_batch"}), params=Params(n_batch=700)), (64, 128, 256, 512)),
    ("upstream's own way", asked(1000, strategy="llama.cpp"), (512,)),
    ("without prices", asked(1000, host_speed=None), (512,)),
    ("tensors on all devices", asked(1000, params=Params(split_mode="tensor")), (512,)),
)
def test_which_there_are(made: Request, expected: tuple[int, ...]) -> None:
    assert micro_batches(made) == expected


@named_cases(
    ("a pipeline has four at once", Placement(0, (5, 4)), 2048, 8192),
    ("as by default", Placement(0, (5, 4)), 512, 2048),
    ("one device", Placement(0, (9, 0)), 2048, 2048),
    ("layers on the host", Placement(1, (4, 4)), 4096, 4096),
)
def test_the_batch_holds_it(placement: Placement, n_ubatch: int, n_batch: int) -> None:
    made = asked(1000, 1000, params=Params(n_ctx=4096, n_ubatch=n_ubatch))
    assert params_of(made, made.devices, placement, 4096).n_batch == n_batch
    fixed = replace(made, fixed=frozenset({"n_batch"}))
    assert params_of(fixed, made.devices, placement, 4096).n_batch == 2048
    assert is_pipelined(made, made.devices, placement) is (n_batch == 4 * n_ubatch)


@cases((8191, 2048, False), (8192, 2048, True), (100, 512, True))
def test_a_pipeline_needs_four(prompt: int, n_ubatch: int, keeps: bool) -> None:
    assert keeps_pipeline(asked(1000, prompt=prompt), n_ubatch) is keeps


def test_experts_on_the_host_get_a_large_one() -> None:
    made = asked(700, model=MOE, prompt=8192)
    free, by_default = found(made, MOE), found(pinned(made, 512), MOE)
    assert free.fits and free.params.n_ubatch >= 1024
    assert free.seconds and by_default.seconds and free.seconds < 0.98 * by_default.seconds


def test_a_small_one_is_chosen_where_nothing_else_fits() -> None:
    model = replace(DENSE, compute=800 * MIB, compute_per_ctx=0, cache=64)
    made = asked(900, model=model, fixed=frozenset({"n_ctx", "n_gpu_layers"}))
    assert not found(pinned(made, 512), model).fits
    plan = found(made, model)
    assert plan.fits and plan.params.n_ubatch < 512


@pytest.mark.parametrize("prompt", [512, 8192])
@pytest.mark.parametrize(
    ("mib", "model"),
    [
        pytest.param((700,), DENSE, id="most of it on the host"),
        pytest.param((1100,), DENSE, id="a part on the host"),
        pytest.param((900, 500), DENSE, id="two cards"),
        pytest.param((3000,), DENSE, id="all of it on the card"),
        pytest.param((900,), MOE, id="experts"),
        pytest.param((1500, 800), MOE, id="experts on two cards"),
    ],
)
def test_no_set_one_is_faster(mib: tuple[int, ...], model: SyntheticModel, prompt: int) -> None:
    made = asked(*mib, model=model, prompt=prompt)
    plan = found(made, model)
    assert plan.fits and plan.seconds
    for n_ubatch in (256, 512, 1024, 2048, 4096):
        other = found(pinned(made, n_ubatch), model)
        assert not other.fits or not other.seconds or plan.seconds <= 1.02 * other.seconds, n_ubatch


def state_of(made: Request, model: SyntheticModel = DENSE) -> SearchState:
    llama = SyntheticLlama(model, made.devices)
    return SearchState(made, made.devices, Callbacks(remembered(llama.measure), llama.record))


def variants_of(made: Request, model: SyntheticModel = DENSE) -> Variants:
    state = state_of(made, model)

    def of_kind(kind: Kind) -> SearchState:
        params = replace(made.params, flash_attn=kind.flash_attn, offload_kqv=kind.offload_kqv)
        return state.on(state.devices, replace(made, params=params))

    return Variants(state, of_kind)


def sized(variants: Variants, n_ubatch: int) -> Variant:
    """The first variant with another micro batch."""
    return Variant(variants.first.kind, n_ubatch, variants.first.devices)


def asked_for(variants: Variants, trial: Trial | None = None, kind: str = "auto") -> SearchState | None:
    """The state of the variant that is asked for next; ``trial``: the best so far."""
    if trial is None:
        return variants.state(variants.begin())
    here = sized(variants, trial.params.n_ubatch)
    variants.take(Answer(replace(trial, devices=variants.devices), variants.state(here)))
    variant = variants.next([Kind(kind)])
    return None if variant is None else variants.state(variant)


def test_the_search_begins_with_the_one_that_promises_most() -> None:
    first = asked_for(variants_of(asked(700, model=MOE, prompt=8192), MOE))
    assert first is not None and first.request.params.n_ubatch > 512


def test_another_is_tried_where_a_plan_takes_longer_than_it_promised() -> None:
    variants = variants_of(asked(700))
    begun = asked_for(variants)
    assert begun is not None
    n_ubatch = begun.request.params.n_ubatch
    trial = found(pinned(asked(700), n_ubatch))
    as_promised, much_longer = (replace(trial, seconds=seconds, expected=seconds) for seconds in (1e-9, 1e9))
    assert asked_for(variants, as_promised) is None
    variants = variants_of(asked(700))
    asked_for(variants)
    tried = [asked_for(variants, much_longer) for _ in range(8)]
    sizes = [state.request.params.n_ubatch for state in tried if state is not None]
    assert sizes and len(set(sizes)) == len(sizes), "each once"
    assert n_ubatch not in sizes


@cases((97, None, True), (96, None, False), (96, 96, True), (96, 97, False))
def test_a_device_without_layers_has_room_for_its_buffer(mib: int, measured: int | None, is_expected: bool) -> None:
    """Of 97 MiB, as with the output alone, unless its own was measured."""
    model = replace(DENSE, compute=32 * MIB, compute_per_ctx=0)
    state = state_of(asked(mib, model=model), model)
    trial = state.trial(Placement(len(state.units(32768)) - 1, (1,)), 32768)
    if measured is not None:
        rows = (replace(trial.breakdown.on("CUDA0"), compute=measured * MIB),)
        state.buffers.learn(replace(trial.breakdown, rows=rows), 32768, False, {"CUDA0": "idle"}, None)
    assert (likely_seconds(state) < math.inf) is is_expected


def test_what_one_trial_did_not_measure_is_guessed_from_others() -> None:
    variants = variants_of(asked(700))
    whole, last_layer = Placement(0, (9,)), Placement(8, (1,))
    for n_ubatch, placement in ((512, whole), (2048, whole), (512, last_layer)):
        assert variants.measure(sized(variants, n_ubatch), placement) is not None
    buffers = variants.state(sized(variants, 4096)).buffers
    assert buffers.knows(False), "as the last layer alone with 512 tokens, in proportion"
    sizes = [variants.state(sized(variants, n)).buffers.room(limits(9000), 32768, True, [0]) for n in (512, 2048, 4096)]
    (a,), (b,), (c,) = (room.with_caches for room in sizes)
    assert a - b > 0 and 3 * (b - c) == 4 * (a - b), "by a line"


def test_buffers_without_flash_attention_are_measured_before_it_is_asked_for() -> None:
    variants = variants_of(asked(9000))
    begun = asked_for(variants)
    assert begun is not None
    trial = found(pinned(asked(9000), begun.request.params.n_ubatch))
    slow = replace(trial, seconds=1e9, expected=1e9)
    state = asked_for(variants, slow, "off")
    assert state is not None and state.request.params.flash_attn == "off" and state.buffers.knows_any
    assert variants.ask(Variant(Kind("off"), *variants.here[1:])).trial.breakdown.flash_attn is False


def test_the_choice_is_said() -> None:
    made = asked(700, model=MOE, prompt=8192)
    llama, said = SyntheticLlama(MOE, made.devices), list[Choice]()
    plan = search(made, remembered(llama.measure), llama.record, on_choice=said.append)
    (choice,) = [each for each in said if each.subject == "the micro batch"]
    assert choice.chosen == f"-ub {plan.params.n_ubatch}" and choice.runner_up == "-ub 512"
    assert choice.seconds == plan.seconds and (choice.runner_up_seconds or 0.0) > choice.seconds


@named_cases(
    ("little time", 1024, 1 - WORTH / 2, 4096, True),
    ("enough time", 1024, 1 - 2 * WORTH, 4096, False),
    ("more context", 1024, 1 - WORTH / 2, 8192, False),
    ("the same one", 512, 1 - WORTH / 2, 4096, False),
)
def test_little_time_is_no_reason_for_another(n_ubatch: int, share: float, n_ctx: int, is_so: bool) -> None:
    made = asked(3000)
    than = replace(found(pinned(made, 512)), seconds=10.0)
    than = replace(than, params=replace(than.params, n_ctx=4096))
    other = replace(than, params=replace(than.params, n_ctx=n_ctx, n_ubatch=n_ubatch), seconds=10.0 * share)
    assert is_little(other, than) is is_so


@named_cases(
    ("one at a time", asked(1000, 1000, params=Params(n_ubatch=2048)), Placement(0, (5, 4)), True),
    ("four", asked(1000, 1000, params=Params(n_ubatch=2048), prompt=8192), Placement(0, (5, 4)), False),
    ("one card", asked(1000, 1000, params=Params(n_ubatch=2048)), Placement(0, (9, 0)), False),
    ("on the host", asked(1000, 1000, params=Params(n_ubatch=2048)), Placement(1, (4, 4)), False),
    ("the user's", pinned(asked(1000, 1000), 2048), Placement(0, (5, 4)), False),
)
def test_cards_with_the_whole_model_keep_their_pipeline(made: Request, placement: Placement, is_lost: bool) -> None:
    assert state_of(made).loses_pipeline(placement, 32768) is is_lost


@cases((512, True), (2048, False))
def test_a_trial_that_ends_the_pipeline_is_no_answer(n_ubatch: int, is_answer: bool) -> None:
    made = asked(4000, 4000, params=Params(n_ctx=32768, n_ubatch=n_ubatch))
    state = state_of(made)
    assert state.trial(Placement(0, (5, 4)), 32768).fits
    assert (state.answer.best(made) is not None) is is_answer


def test_the_bound_of_a_plan_without_flash_attention_counts_the_host() -> None:
    made = asked(700)
    layout = SyntheticLlama(DENSE, made.devices).record(made.params)
    usual, without = (bound_of(made, layout, 1.0, is_without_flash=flag) for flag in (False, True))
    assert usual and without and without.seconds < usual.seconds


def test_the_bound_has_the_largest() -> None:
    made = asked(700, model=MOE, prompt=8192)
    layout = SyntheticLlama(MOE, made.devices).record(made.params)
    free, largest, default = (bound_of(each, layout, 1.0) for each in (made, pinned(made, 8192), pinned(made, 512)))
    assert free and largest and default
    assert free.seconds == largest.seconds < default.seconds


@named_cases(
    ("between", 768, {512: 300, 1024: 900}, 600),
    ("never below nothing", 128, {512: 300, 1024: 900}, 0),
    ("beyond", 2048, {512: 300, 1024: 900}, 2100),
    ("in proportion to the only one", 256, {512: 300}, 150),
    ("in proportion to the nearest", 1024, {512: 300, 2048: None}, 600),
    ("in proportion to the other one", 1024, {512: None, 2048: 900}, 450),
)
def test_buffers_of_others_lie_on_a_line(n_ubatch: int, measured: dict[int, int | None], expected: int) -> None:
    learned = {size: LearnedCompute() for size in measured}
    for size, compute in measured.items():
        if compute is not None:
            learned[size].learn("CUDA0", 4096, compute)
    known = [(size, each) for size, each in learned.items() if each.is_measured]
    guess = LearnedCompute.guessed(n_ubatch, known)
    assert guess.at("CUDA0", 4096) == expected and not guess.is_measured
    guess.learn("CUDA0", 4096, 1)
    assert guess.at("CUDA0", 4096) == 1 and guess.is_measured


@named_cases(
    ("the geometric mean", None, None, 32768, (8192, 512)),
    ("four times the context", None, None, 131072, (16384, 512)),
    ("just below, a quarter of the context", None, None, 32764, (8191, 512)),
    ("a quarter of a small context", None, None, 2048, (512, 409)),
    ("the least", None, None, 2, (1, 1)),
    ("nearly all of it", 1639, None, 2048, (1639, 409)),
    ("the user's prompt", 1000, None, 32768, (1000, 512)),
    ("the user's answer", None, 100, 32768, (8192, 100)),
)
def test_a_prompt_follows_it(prompt: int | None, generate: int | None, context: int, expected: tuple[int, int]) -> None:
    assert workload_of(prompt, generate, context, is_set=True, is_deep=True) == Workload(*expected)
