"""The search against a synthetic llama.cpp: named cases, and properties over random models and machines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.errors import TimeLimitError
from fitter.llama.types import Breakdown, Params, TensorBuftOverride
from fitter.machine.speed import DeviceSpeed
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.search_order import search
from tests.support.cases import cases, named_cases
from tests.support.synthetic import CARD, DENSE, MIB, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request
from tests.support.synthetic import MOE_AFTER_DENSE as MOE


def run(model: SyntheticModel, devices: tuple[DeviceLimit, ...], **kwargs: object) -> tuple[Trial, SyntheticLlama]:
    llama = SyntheticLlama(model, devices)
    asked = request(model, devices, **kwargs)  # type: ignore[arg-type]
    return search(asked, llama.measure, llama.record), llama


def total(model: SyntheticModel) -> int:
    return sum(size for _, size in model.tensors())


def test_everything_fits_with_one_load() -> None:
    trial, llama = run(DENSE, limits(8000))
    assert trial.fits and trial.params.n_ctx == DENSE.n_ctx_train
    assert trial.params.n_gpu_layers == DENSE.n_layer + 1
    assert len(llama.asked) == 1 and llama.records == 0


@cases(1400, 1500, 1800, 2000)
def test_context_shrinks_before_layers_leave(mib: int) -> None:
    trial, llama = run(DENSE, limits(mib))
    assert trial.fits and trial.weights == total(DENSE)
    n_ctx = trial.params.n_ctx
    assert 4096 <= n_ctx < DENSE.n_ctx_train and n_ctx % 256 == 0
    one_more = replace(trial.params, n_ctx=n_ctx + 256)
    fresh = SyntheticLlama(DENSE, llama.limits).measure(one_more)
    assert fresh.on("CUDA0").used > mib * MIB, "a larger context would have fitted"


def test_smallest_context_is_kept_and_layers_leave() -> None:
    trial, _ = run(DENSE, limits(900))
    assert trial.fits and trial.params.n_ctx == 4096
    assert 0 < trial.weights < total(DENSE)
    assert trial.params.n_gpu_layers < DENSE.n_layer + 1


def test_experts_leave_first_and_dense_weights_stay() -> None:
    trial, _ = run(MOE, limits(2500))
    assert trial.fits and trial.params.n_gpu_layers == MOE.n_layer + 1
    assert {(o.buffer_type, "exps" in o.pattern) for o in trial.params.tensor_buft_overrides} == {("CPU", True)}
    left = 2500 * MIB - trial.breakdown.on("CUDA0").used
    assert left < 200 * MIB, "another expert tensor would have fitted"


def test_bias_follows_its_weight() -> None:
    model = replace(MOE, bias=True)
    trial, _ = run(model, limits(2500))
    # one of llama.cpp's own flags says the others
    part, _ = trial.params.tensor_buft_overrides
    assert "(bias|weight)$" in part.pattern


def test_one_pattern_per_target() -> None:
    trial, _ = run(MOE, limits(1500, 1000, 1200))
    targets = [override.buffer_type for override in trial.params.tensor_buft_overrides]
    assert trial.fits and len(targets) == len(set(targets))


@named_cases(
    ("none is large enough", (10,), (), ()),
    ("one is too small for a layer", (60, 3000), (), ("CUDA1",)),
    ("the user's stay", (60, 3000), ("devices",), ("CUDA0", "CUDA1")),
)
def test_devices_of_the_plan(mib: tuple[int, ...], fixed: tuple[str, ...], names: tuple[str, ...]) -> None:
    trial, _ = run(DENSE, limits(*mib), fixed=fixed)
    assert trial.params.devices == names and (trial.fits or fixed)
    assert (trial.weights == 0) is (names == ()) and (trial.params.tensor_split is None) is (len(names) < 2)


@named_cases(("weights-too-large", 1250, False), ("smaller-context", 1400, True), ("everything", 3000, True))
def test_without_devices_the_host_is_the_limit(host_mib: int, fits: bool) -> None:
    trial, _ = run(DENSE, (), host_mib=host_mib)
    assert trial.fits is fits
    if not fits:
        assert dict(trial.missing)["host"] > 0


def test_host_is_a_limit_beside_devices() -> None:
    need = run(MOE, limits(2500))[0].breakdown.host.used
    assert run(MOE, limits(2500), host_mib=-(-need // MIB))[0].fits
    tight, _ = run(MOE, limits(2500), host_mib=need // MIB - 300)
    assert not tight.fits and dict(tight.missing)["host"] > 0


def test_paging_lets_weights_exceed_the_host() -> None:
    assert not run(MOE, limits(2500), host_mib=500)[0].fits
    assert run(MOE, limits(2500), host_mib=500, paging=True)[0].fits


@named_cases(
    ("ngl", Params(n_gpu_layers=3), ("n_gpu_layers",), DENSE),
    ("ngl-more-than-layers", Params(n_gpu_layers=99), ("n_gpu_layers",), DENSE),
    ("ngl-0", Params(n_gpu_layers=0), ("n_gpu_layers",), DENSE),
    ("ngl-moe", Params(n_gpu_layers=99), ("n_gpu_layers",), MOE),
    ("ts", Params(tensor_split=(3.0, 1.0)), ("tensor_split",), DENSE),
    ("ts-moe", Params(tensor_split=(1.0, 1.0)), ("tensor_split",), MOE),
    ("ctx", Params(n_ctx=20000), ("n_ctx",), MOE),
    (
        "all-three",
        Params(n_gpu_layers=99, tensor_split=(1.0, 2.0), n_ctx=5000),
        ("n_gpu_layers", "tensor_split", "n_ctx"),
        MOE,
    ),
)
def test_what_the_user_set_is_kept(params: Params, fixed: tuple[str, ...], model: SyntheticModel) -> None:
    trial, _ = run(model, limits(1500, 1400), params=params, fixed=fixed)
    assert trial.fits
    for name in fixed:
        assert getattr(trial.params, name) == getattr(params, name)


def test_overrides_of_the_user_come_first() -> None:
    mine = TensorBuftOverride("blk.2.ffn_up_exps", "CUDA0")
    trial, _ = run(MOE, limits(1500), params=Params(tensor_buft_overrides=(mine,)))
    assert trial.fits and trial.params.tensor_buft_overrides[0] == mine
    assert trial.params.tensor_buft_overrides[1].buffer_type == "CPU"


def test_overrides_with_one_target_become_one_pattern_beside_a_flag() -> None:
    mine = (TensorBuftOverride("attn_q", "CPU"), TensorBuftOverride("blk.1.ffn", "CPU"))
    trial, _ = run(MOE, limits(1500), params=Params(tensor_buft_overrides=mine))
    joined, flag = trial.params.tensor_buft_overrides
    assert trial.fits and joined.pattern == "attn_q|blk.1.ffn" and "_(ch|)exps" in flag.pattern


sizes = st.integers(1, 60).map(lambda n: n * 5 * MIB)
models = st.builds(
    SyntheticModel,
    n_layer=st.integers(1, 24),
    attention=sizes,
    ffn=st.tuples(sizes, sizes, sizes),
    experts=st.one_of(st.just(()), st.tuples(sizes, sizes, sizes)),
    output=sizes,
    embedding=sizes,
    cache=st.sampled_from([0, 512, 4096, 65536]),
    n_ctx_train=st.sampled_from([512, 4096, 32768, 131072, 40960 + 13]),
    compute=sizes,
    compute_per_ctx=st.sampled_from([0, 512, 8192]),
    dense_lead=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(model=models, machine=st.lists(st.integers(64, 6000), min_size=0, max_size=6), host=st.integers(0, 20000))
def test_never_over_a_margin_nor_worse_than_the_simple_plan(
    model: SyntheticModel, machine: list[int], host: int
) -> None:
    devices = limits(*machine, margin=32)
    trial, llama = run(model, devices, host_mib=host)
    if trial.fits:
        again = SyntheticLlama(model, devices).measure(trial.params)
        assert all(again.on(limit.name).used <= limit.target for limit in devices if limit.name in again.devices)
        assert again.host.used <= host * MIB
    # the simple plan: whole layers from the back, all on the one device that is largest, at the smallest context
    if not machine:
        return
    largest = max(devices, key=lambda limit: limit.free)
    n_ctx = min(4096, model.n_ctx_train)
    for n_gpu_layers in range(model.n_layer + 1, -1, -1):
        simple = Params(n_ctx=n_ctx, n_gpu_layers=n_gpu_layers, devices=(largest.name,))
        measured = SyntheticLlama(model, devices).measure(simple)
        if measured.on(largest.name).used <= largest.target and measured.host.used <= host * MIB:
            assert trial.fits
            assert trial.params.n_ctx >= n_ctx
            if not model.experts and trial.params.n_ctx == n_ctx:
                weights = sum(row.model for row in measured.rows if not row.is_host)
                # where compute buffers differ from device to device a tensor may be lost to a proposal, not a layer
                assert trial.weights >= weights - max(model.ffn)
            break
    assert len(llama.asked) < 120


def test_more_devices_than_a_model_can_be_on() -> None:
    trial, _ = run(DENSE, limits(*([200] * 7), 100, *([200] * 8)))
    assert trial.fits and trial.params.devices is not None
    assert len(trial.params.devices) <= 15 and "CUDA7" not in trial.params.devices


def test_many_devices_that_hold_nothing_are_given_up_quickly() -> None:
    trial, llama = run(DENSE, limits(*([60] * 16)))
    assert trial.fits and trial.params.devices == ()
    assert len(llama.asked) < 25


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nearly_full_device_changes_nothing(model: SyntheticModel, place: int) -> None:
    # its margin is more than it has left
    without = limits(900, 1100, margin=64)
    full = DeviceLimit("FULL", "virtual", 900 * MIB, 50 * MIB, 64 * MIB, "FULL")
    trial, _ = run(model, without)
    other, _ = run(model, (*without[:place], full, *without[place:]))
    assert trial.fits and trial.weights > 0
    assert (other.params, other.weights) == (trial.params, trial.weights)


@settings(max_examples=60, deadline=None)
@given(model=models, machine=st.lists(st.integers(64, 6000), min_size=1, max_size=4), place=st.integers(0, 4))
def test_a_device_without_room_never_makes_a_plan_worse(model: SyntheticModel, machine: list[int], place: int) -> None:
    devices = limits(*machine, margin=32)
    full = DeviceLimit("FULL", "virtual", 900 * MIB, 32 * MIB, 32 * MIB, "FULL")
    trial, _ = run(model, devices)
    other, _ = run(model, (*devices[:place], full, *devices[place:]))
    assert (other.fits, other.params) == (trial.fits, trial.params)


def test_a_device_that_an_override_needs_takes_part() -> None:
    mine = TensorBuftOverride("blk.2.ffn_up_exps", "CUDA1")
    devices = limits(6000, 60)
    llama = SyntheticLlama(MOE, devices)
    asked = replace(
        request(MOE, devices, params=Params(tensor_buft_overrides=(mine,))), pinned={"blk.2.ffn_up_exps.weight": 1}
    )
    trial = search(asked, llama.measure, llama.record)
    assert "CUDA1" in (trial.params.devices or ())


@named_cases(("none", {}, 32768), ("one-that-another-has-not", {"CUDA0": 8192}, 32768))
def test_a_device_that_takes_little_context_is_left_out_for_more(limits_: dict[str, int], n_ctx: int) -> None:
    devices = limits(4000, 4000)
    llama = SyntheticLlama(DENSE, devices)
    asked = replace(request(DENSE, devices), context_limits=limits_)
    assert search(asked, llama.measure, llama.record).params.n_ctx == n_ctx


def is_dominated(trial: Trial, by: Trial) -> bool:
    """Whether a plan has no more context and takes more time, or less context and takes no less."""
    (n_ctx, seconds), (other, quicker) = ((each.params.n_ctx, each.seconds or math.inf) for each in (trial, by))
    return (n_ctx <= other and seconds > quicker) or (n_ctx < other and seconds >= quicker)


class Late(SyntheticLlama):
    """A llama.cpp that answers only so many times before the time limit."""

    answers = 0

    def measure(self, params: Params) -> Breakdown:
        if len(self.asked) == self.answers:
            raise TimeLimitError("too late")
        return super().measure(params)


@named_cases(
    ("less-context-on-fewer-cards", DENSE, (300, 500, 1500), (CARD, CARD, SLOW_CARD)),
    ("slower-on-fewer-cards", MOE, (200, 1500, 700, 1500), (CARD, SLOW_CARD, CARD, CARD)),
    ("layers-on-the-host", DENSE, (500, 300, 500), (CARD, SLOW_CARD, SLOW_CARD)),
)
def test_a_later_time_limit_never_gives_a_worse_plan(
    model: SyntheticModel, mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...]
) -> None:
    devices = limits(*mib)
    asked = priced(request(model, devices, host_mib=16000), model, *speeds)
    before: Trial | None = None
    for answers in range(1, 80):
        llama = Late(model, devices)
        llama.answers = answers
        try:
            trial = search(asked, llama.measure, llama.record)
        except TimeLimitError:
            assert before is None
            continue
        assert before is None or not is_dominated(trial, before), answers
        before = trial
        if len(llama.asked) < answers:
            break
    assert before is not None and before.fits and answers > 4
