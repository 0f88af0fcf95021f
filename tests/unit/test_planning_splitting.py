"""The search with split mode tensor, against devices that take their share in steps as llama.cpp's do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.choosing import either
from fitter.errors import LlamaCppError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Params, Row
from fitter.machine.speed import DeviceSpeed
from fitter.parameters import SplitMode
from fitter.planning.cost import Estimate, Workload
from fitter.planning.plan import Plan, Problem
from fitter.planning.pricing import Price
from fitter.planning.splitting import search_split
from fitter.planning.trial import Trial
from tests.unit.plans import make_plan
from tests.unit.synthetic import MIB, SyntheticModel, limits, request

N_LAYER = 32
WEIGHTS, EXPERTS, PER_TOKEN, FIXED = 20_000 * MIB, 8_000 * MIB, MIB // 8, 300 * MIB
STEPS = 64
"""Parts into which llama.cpp can split every tensor."""

MODEL = SyntheticModel(n_layer=N_LAYER)
MOE = SyntheticModel(n_layer=N_LAYER, ffn=(30 * MIB, 30 * MIB, 40 * MIB), experts=(80 * MIB, 80 * MIB, 90 * MIB))
TENSOR = Params(split_mode="tensor")


class Split:
    """What each device takes of a load: its whole steps, and what it needs whatever its share."""

    def __init__(self, refused: tuple[float, ...] | None = None) -> None:
        self.asked: list[Params] = []
        self.refused = refused

    def measure(self, params: Params) -> Breakdown:
        self.asked.append(params)
        names = params.devices or ()
        if params.tensor_split is not None and params.tensor_split == self.refused:
            raise LlamaCppError("cannot be split so")
        shares = params.tensor_split or (1.0,) * len(names)
        n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else N_LAYER + 1
        weights = WEIGHTS * n_gpu_layers // (N_LAYER + 1)
        for override in params.tensor_buft_overrides:
            weights -= EXPERTS * (override.pattern.count("|") - 4) // N_LAYER
        rows, before = [], 0
        for d, name in enumerate(names):
            end = int(STEPS * sum(shares[: d + 1]) / sum(shares)) if d + 1 < len(names) else STEPS
            part = end - before
            before = end
            cache = PER_TOKEN * params.n_ctx
            rows.append(Row(name, name, False, weights * part // STEPS, cache * part // STEPS, FIXED))
        return Breakdown(tuple(rows), tuple(names), params.n_ctx)


def run(*mib: int, llama: Split | None = None, bandwidths: tuple[float, ...] = (), **kwargs: object) -> Trial:
    devices = limits(*mib, margin=1024)
    asked = request(kwargs.pop("model", MODEL), devices, **{"params": TENSOR, **kwargs})  # type: ignore[arg-type]
    speeds = {
        device.name: DeviceSpeed(bandwidth, 1e14, 3e10, "cuda", "8.6", "", True)
        for device, bandwidth in zip(devices, bandwidths or (1e12,) * len(devices), strict=True)
    }
    return search_split(replace(asked, speeds=speeds), (llama or Split()).measure, lambda params, measured: None)


def left(trial: Trial) -> list[int]:
    return [device.target - trial.breakdown.on(device.name).used for device in trial.devices]


MACHINES = {
    "two alike": (12_500, 12_500),
    "four alike": (6_500, 6_500, 6_500, 6_500),
    "two unlike": (16_000, 9_000),
    "three unlike": (14_000, 8_000, 5_000),
    "one far larger": (24_000, 4_000),
}


@pytest.mark.parametrize("mib", MACHINES.values(), ids=MACHINES)
def test_margins_are_kept_and_little_is_left(mib: tuple[int, ...]) -> None:
    trial = run(*mib)
    assert trial.fits and min(left(trial)) >= 0
    assert trial.params.n_gpu_layers == N_LAYER + 1 and not trial.params.tensor_buft_overrides
    n_ctx = trial.params.n_ctx
    if n_ctx < MODEL.n_ctx_train:
        step = (WEIGHTS + PER_TOKEN * n_ctx) // STEPS
        assert sum(left(trial)) <= 2 * step * len(mib), "a step of the split for each device, and one of the context"


def test_equal_devices_need_no_shares() -> None:
    assert run(12_500, 12_500).params.tensor_split is None


def test_a_faster_device_has_more_where_memory_allows() -> None:
    trial = run(40_000, 40_000, bandwidths=(2e12, 1e12))
    assert trial.params.tensor_split == (6667.0, 3333.0)


def test_shares_of_the_user_stay() -> None:
    trial = run(40_000, 40_000, params=replace(TENSOR, tensor_split=(3.0, 1.0)), fixed=("tensor_split",))
    assert trial.fits and trial.params.tensor_split == (3.0, 1.0)


def test_shares_of_the_user_that_do_not_fit_are_said_to() -> None:
    trial = run(8_000, 30_000, params=replace(TENSOR, tensor_split=(3.0, 1.0)), fixed=("tensor_split", "n_gpu_layers"))
    assert not trial.fits and [name for name, _ in trial.missing] == ["CUDA0"]


def test_layers_leave_where_nothing_else_fits() -> None:
    trial = run(8_000, 8_000)
    assert trial.fits and trial.params.n_ctx == 4096
    more = replace(trial.params, n_gpu_layers=trial.params.n_gpu_layers + 1)
    used = Split().measure(more)
    assert any(used.on(device.name).used > device.target for device in trial.devices), "one more would not have fitted"


def test_experts_leave_before_layers() -> None:
    trial = run(9_500, 9_500, model=MOE)
    assert trial.fits and trial.params.n_gpu_layers == N_LAYER + 1
    (override,) = trial.params.tensor_buft_overrides
    assert override.pattern.startswith("^blk.(0|1|") and override.buffer_type == "CPU"


def test_a_device_without_room_takes_no_part() -> None:
    trial = run(14_000, 14_000, 1_200)
    assert trial.fits and trial.params.devices == ("CUDA0", "CUDA1")


def test_shares_that_llama_cpp_cannot_compute_with_are_left() -> None:
    plain = run(16_000, 9_000)
    again = run(16_000, 9_000, llama=Split(refused=plain.params.tensor_split))
    assert again.params.tensor_split != plain.params.tensor_split


@pytest.mark.parametrize(("loads", "fits"), [(1, True), (0, False)], ids=["after the smallest context", "at once"])
def test_a_time_limit_leaves_what_was_found(loads: int, fits: bool) -> None:
    class Slow(Split):
        def measure(self, params: Params) -> Breakdown:
            if len(self.asked) >= loads:
                raise TimeLimitError("over")
            return super().measure(params)

    if not fits:
        with pytest.raises(TimeLimitError, match="over"):
            run(12_500, 12_500, llama=Slow())
        return
    trial = run(12_500, 12_500, llama=Slow())
    assert trial.fits and trial.params.n_ctx == 4096


def test_equal_shares_where_llama_cpp_cannot_compute_with_others() -> None:
    llama = Split(refused=(6667.0, 3333.0))
    assert run(40_000, 40_000, bandwidths=(2e12, 1e12), llama=llama).params.tensor_split is None


@pytest.mark.parametrize(
    ("mib", "says"),
    [
        ((24_000,), "split mode 'tensor' needs two devices or more, and there is only CUDA0: use --split-mode layer"),
        (
            (24_000, 500),
            "split mode 'tensor' needs two devices or more with room beyond their margin, and only CUDA0 has any: use "
            "--split-mode layer, or a smaller --fit-target",
        ),
    ],
    ids=["one", "one with room"],
)
def test_one_device_is_too_few(mib: tuple[int, ...], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        run(*mib)
    assert str(raised.value) == says


CHOICES = {
    "tensor is clearly faster": (("tensor", 10.0, 4096, True), ("layer", 12.0, 4096, True), "tensor"),
    "tensor is hardly faster": (("tensor", 10.0, 4096, True), ("layer", 10.1, 4096, True), "layer"),
    "tensor has far less context": (("tensor", 10.0, 4096, True), ("layer", 12.0, 16384, True), "layer"),
    "only tensor fits": (("tensor", 10.0, 4096, True), ("layer", 1.0, 4096, False), "tensor"),
    "only layer fits": (("tensor", 1.0, 4096, False), ("layer", 10.0, 4096, True), "layer"),
}


@pytest.mark.parametrize(("tensor", "layer", "expected"), CHOICES.values(), ids=CHOICES)
def test_which_split_mode_is_chosen(
    tensor: tuple[SplitMode, float, int, bool], layer: tuple[SplitMode, float, int, bool], expected: str
) -> None:
    plans = {mode: _plan(mode, seconds, n_ctx, fits) for mode, seconds, n_ctx, fits in (tensor, layer)}
    chosen = either(lambda model, split_mode, **_: plans[split_mode], "model.gguf", {"split_mode": "auto"})
    assert chosen.params.split_mode == expected
    assert bool(chosen.choices) == (tensor[3] and layer[3]), "what was compared is said"


def test_a_mode_that_llama_cpp_refuses_is_not_chosen() -> None:
    def fit(model: str, split_mode: str, **_: object) -> Plan:
        if split_mode == "tensor":
            raise LlamaCppError("this llama.cpp cannot split")
        return _plan("layer", 10.0, 4096, True)

    assert either(fit, "model.gguf", {"split_mode": "auto"}).params.split_mode == "layer"


def _plan(mode: SplitMode, seconds: float, n_ctx: int, fits: bool) -> Plan:
    estimate = Estimate(0.0, seconds / 512, seconds)
    price = Price(estimate, Workload(0, 512), 0.0, (), Breakdown((), (), n_ctx))
    problems = () if fits else (Problem("CUDA0", 1, "lacks"),)
    return make_plan(Params(n_ctx=n_ctx, split_mode=mode), problems=problems, estimate=price)
