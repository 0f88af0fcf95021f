"""The search with split mode tensor, against devices that take their share in steps as llama.cpp's do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fitter.errors import LlamaCppError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Layout, Params, Row, TensorBuftOverride
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.trial import Trial
from fitter.planning.search.tensor_split_search import Seconds, search_split
from tests.support.cases import cases, named_cases
from tests.support.synthetic import MIB, SyntheticLlama, SyntheticModel, limits, request

N_LAYER = 32
PER_TOKEN, FIXED = MIB // 8, 300 * MIB
STEPS = 64
"""Parts into which llama.cpp can split every tensor."""

CACHE = PER_TOKEN // N_LAYER
MODEL = SyntheticModel(
    n_layer=N_LAYER, attention=300 * MIB, ffn=(100 * MIB, 100 * MIB, 120 * MIB), output=160 * MIB, cache=CACHE
)
MOE = replace(MODEL, attention=370 * MIB, experts=(80 * MIB, 80 * MIB, 90 * MIB), dense_lead=2)
WEIGHTS = sum(size for _, size in MODEL.tensors())
TENSOR = Params(split_mode="tensor")
THREE_TO_ONE = replace(TENSOR, tensor_split=(3.0, 1.0))


class Split:
    """What each device takes of a load: its whole steps, and what it needs whatever its share."""

    def __init__(
        self, refused: tuple[float, ...] | None = None, model: SyntheticModel = MODEL, caches_on_host: bool = False
    ) -> None:
        self.asked: list[Params] = []
        self.caches_on_host = caches_on_host
        self.refused = refused
        self.model = model

    def measure(self, params: Params) -> Breakdown:
        self.asked.append(params)
        names = params.devices or ()
        if params.tensor_split is not None and params.tensor_split == self.refused:
            raise LlamaCppError("cannot be split so")
        shares = params.tensor_split or (1.0,) * len(names)
        first = 0 if params.n_gpu_layers < 0 else N_LAYER + 1 - params.n_gpu_layers
        of_layer: dict[int, int] = {}
        for name, size in self.model.tensors():
            layer = int(name.split(".")[1]) if name.startswith("blk.") else N_LAYER
            if layer >= first and not any(re.search(each.pattern, name) for each in params.tensor_buft_overrides):
                of_layer[layer] = of_layer.get(layer, 0) + size
        weights = sum(of_layer.values())
        on_host = sum(size for _, size in self.model.tensors()) - weights
        caches = self.model.cache * params.n_ctx * max(0, N_LAYER - first)
        rows, before = [], 0
        for d, name in enumerate(names):
            end = int(STEPS * sum(shares[: d + 1]) / sum(shares)) if d + 1 < len(names) else STEPS
            part = end - before
            before = end
            rows.append(Row(name, name, False, weights * part // STEPS, caches * part // STEPS, FIXED))
        all_caches = self.model.cache * params.n_ctx * N_LAYER
        rows.append(Row("CPU", None, True, on_host, all_caches - caches if self.caches_on_host else 0, 0))
        return Breakdown(tuple(rows), tuple(names), params.n_ctx)

    def record(self, params: Params) -> Layout:
        return SyntheticLlama(self.model, ()).record(params)


def run(
    *mib: int,
    llama: Split | None = None,
    bandwidths: tuple[float, ...] = (),
    model: SyntheticModel = MODEL,
    seconds: Seconds = lambda params, measured, placement: None,
    objective: str = "request",
    pinned: Sequence[str] = (),
    **kwargs: Any,
) -> Trial:
    devices = limits(*mib, margin=1024)
    asked = request(model, devices, **{"params": TENSOR, **kwargs})
    asked = replace(asked, objective=objective, pinned=dict.fromkeys(pinned, HOST))
    speeds = {
        device.name: DeviceSpeed(bandwidth, 1e14, 3e10, "cuda", "8.6", "", True)
        for device, bandwidth in zip(devices, bandwidths or (1e12,) * len(devices), strict=True)
    }
    llama = llama or Split(model=model)
    return search_split(replace(asked, speeds=speeds), llama.measure, llama.record, seconds)


def left(trial: Trial) -> list[int]:
    return [device.target - trial.breakdown.on(device.name).used for device in trial.devices]


@named_cases(
    ("two alike", (12_500, 12_500)),
    ("four alike", (6_500, 6_500, 6_500, 6_500)),
    ("two unlike", (16_000, 9_000)),
    ("three unlike", (14_000, 8_000, 5_000)),
    ("one far larger", (24_000, 4_000)),
)
def test_margins_are_kept_and_little_is_left(mib: tuple[int, ...]) -> None:
    trial = run(*mib)
    assert trial.fits and min(left(trial)) >= 0
    assert trial.params.n_gpu_layers == N_LAYER + 1 and not trial.params.tensor_buft_overrides
    n_ctx = trial.params.n_ctx
    if n_ctx < MODEL.n_ctx_train:
        step = (WEIGHTS + PER_TOKEN * n_ctx) // STEPS
        assert sum(left(trial)) <= 2 * step * len(mib), "a step of the split for each device, and one of the context"


@named_cases(
    ("equal devices need none", 12_500, {}, None),
    ("a faster device has more", 40_000, {"bandwidths": (2e12, 1e12)}, (6667.0, 3333.0)),
    (
        "the user's",
        40_000,
        {"params": replace(TENSOR, tensor_split=(3.0, 1.0)), "fixed": ("tensor_split",)},
        (3.0, 1.0),
    ),
    ("refused ones", 40_000, {"bandwidths": (2e12, 1e12), "llama": Split(refused=(6667.0, 3333.0))}, None),
)
def test_shares(mib: int, words: dict[str, Any], shares: tuple[float, ...] | None) -> None:
    trial = run(mib, mib, **words)
    assert trial.fits and trial.params.tensor_split == shares


def test_shares_of_the_user_that_do_not_fit_are_said_to() -> None:
    trial = run(8_000, 30_000, params=THREE_TO_ONE, fixed=("tensor_split", "n_gpu_layers"))
    assert not trial.fits and [name for name, _ in trial.missing] == ["CUDA0"]


def on_host(trial: Trial) -> list[int]:
    """The layers of which something is on the host, where nothing is of a layer but all that may be."""
    assert all(target == HOST for _, target in trial.placement.moved)
    return sorted({item.layer for item, _ in trial.placement.moved})


@named_cases(
    ("a little", (11_600, 11_600)),
    ("much", (8_000, 8_000)),
    ("all experts", (7_950, 7_950)),
    ("two unlike", (14_000, 7_000)),
    ("four", (4_700, 4_700, 4_700, 4_700)),
)
def test_experts_of_as_few_layers_as_possible_leave(mib: tuple[int, ...]) -> None:
    trial = run(*mib, model=MOE)
    assert trial.fits and min(left(trial)) >= 0
    assert trial.params.n_gpu_layers == N_LAYER + 1 and trial.params.n_ctx == 4096
    (override,) = trial.params.tensor_buft_overrides
    assert override.buffer_type == "CPU"
    layers = on_host(trial)
    assert layers == list(range(MOE.dense_lead, MOE.dense_lead + len(layers))), "the first that have experts"
    caught = {name for name, _ in MOE.tensors() if re.search(override.pattern, name)}
    assert caught == {f"blk.{layer}.ffn_{kind}_exps.weight" for layer in layers for kind in ("gate", "up", "down")}
    freed = sum(MOE.experts)
    step = (WEIGHTS + PER_TOKEN * 4096) // STEPS
    assert sum(left(trial)) < freed + 2 * step * len(mib), "a layer less would not have fitted"


def test_layers_leave_where_all_experts_have() -> None:
    trial = run(4_500, 4_500, model=MOE)
    assert trial.fits and trial.params.n_gpu_layers < N_LAYER + 1
    first = N_LAYER + 1 - trial.params.n_gpu_layers
    assert on_host(trial) == list(range(max(first, MOE.dense_lead), N_LAYER)), "of those on devices, all experts are"


def test_what_the_host_has_room_for_is_found() -> None:
    """All experts would be too much for the host, those that have to leave the devices are not."""
    trial = run(11_000, 11_000, model=MOE, host_mib=3_000)
    assert trial.fits and on_host(trial)
    short = run(11_000, 11_000, model=MOE, host_mib=500)
    assert [name for name, _ in short.missing] == ["host"]


def test_what_the_host_has_no_room_for_is_not_taken_for_too_little() -> None:
    """With these shares the search begins with more layers than have to leave, and more than the host can have."""
    words: dict[str, Any] = {"model": MOE, "params": THREE_TO_ONE, "fixed": ("tensor_split",)}
    alone = run(12_000, 30_000, **words)
    trial = run(12_000, 30_000, **words, host_mib=-(-alone.breakdown.host.used // MIB))
    assert alone.fits and trial.fits and on_host(trial) == on_host(alone)


def test_layers_of_the_user_stay_on_devices() -> None:
    params = replace(TENSOR, n_gpu_layers=30)
    trial = run(9_000, 9_000, model=MOE, params=params, fixed=("n_gpu_layers",))
    assert trial.fits and trial.params.n_gpu_layers == 30
    assert on_host(trial)[0] == N_LAYER + 1 - 30, "what the host has anyway need not leave"


def test_overrides_of_the_user_come_first_and_are_not_repeated() -> None:
    own = TensorBuftOverride(r"blk\.2\.ffn_.*_exps", "CPU")
    pinned = [f"blk.2.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
    trial = run(10_000, 10_000, model=MOE, params=replace(TENSOR, tensor_buft_overrides=(own,)), pinned=pinned)
    assert trial.fits and on_host(trial)[0] == 3
    names = request(MOE, ()).facts.names
    assert trial.params.tensor_buft_overrides == (own, *host_overrides(False, 16, None, names))


@cases((1.0, 2.0, "ffn"), (2.0, 1.0, "layers"))
def test_a_model_without_experts_has_what_is_faster_on_the_host(moved: float, whole: float, expected: str) -> None:
    def seconds(params: Params, measured: Breakdown, placement: Placement) -> float:
        return moved if placement.moved else whole if placement.first else 3.0

    trial = run(9_000, 9_000, seconds=seconds)
    assert trial.fits
    assert bool(on_host(trial)) == (expected == "ffn")
    assert (trial.params.n_gpu_layers < N_LAYER + 1) == (expected == "layers")
    if expected == "layers":
        more = Split().measure(replace(trial.params, n_gpu_layers=trial.params.n_gpu_layers + 1))
        assert any(more.on(device.name).used > device.target for device in trial.devices), "one more would not fit"


@named_cases(("a large host", None, True), ("a small one", 7_000, False))
def test_the_most_context_has_as_much_on_the_host_as_it_takes(host_mib: int | None, is_all: bool) -> None:
    words: dict[str, Any] = {"llama": Split(caches_on_host=True), "host_mib": host_mib}
    widest, usual = (run(9_000, 9_000, objective=objective, **words) for objective in ("context", "request"))
    assert widest.fits and usual.fits and usual.params.n_ctx == 4096
    assert (widest.params.n_ctx == MODEL.n_ctx_train) == is_all
    assert widest.params.n_ctx > usual.params.n_ctx


def test_an_override_that_llama_cpp_cannot_split_with_is_left() -> None:
    class NoOverrides(Split):
        def measure(self, params: Params) -> Breakdown:
            if params.tensor_buft_overrides:
                raise LlamaCppError("cannot be split so")
            return super().measure(params)

    for model in (MODEL, MOE):
        trial = run(9_000, 9_000, llama=NoOverrides(model=model), model=model)
        assert trial.fits and not trial.params.tensor_buft_overrides, "whole layers are on the host"


def test_a_time_limit_leaves_what_was_found_on_the_host() -> None:
    class Slow(Split):
        def measure(self, params: Params) -> Breakdown:
            found = super().measure(params)
            if self.is_over:
                raise TimeLimitError("over")
            self.is_over = bool(params.tensor_buft_overrides) and not any(
                found.on(name).used > 8_976 * MIB for name in params.devices or ()
            )
            return found

        is_over = False

    trial = run(10_000, 10_000, llama=Slow(model=MOE), model=MOE)
    assert trial.fits and on_host(trial)


def test_a_device_without_room_takes_no_part() -> None:
    trial = run(14_000, 14_000, 1_200)
    assert trial.fits and trial.params.devices == ("CUDA0", "CUDA1")


def test_shares_that_llama_cpp_cannot_compute_with_are_left() -> None:
    plain = run(16_000, 9_000)
    again = run(16_000, 9_000, llama=Split(refused=plain.params.tensor_split))
    assert again.params.tensor_split != plain.params.tensor_split


@cases("request", "context")
def test_a_context_that_llama_cpp_cannot_have_is_not_chosen(objective: str) -> None:
    class Limited(Split):
        def measure(self, params: Params) -> Breakdown:
            if params.n_ctx > 9_000:
                raise LlamaCppError("cannot be split so")
            return super().measure(params)

    trial = run(40_000, 40_000, llama=Limited(), objective=objective)
    assert trial.fits and trial.params.n_ctx == 9_000 // 256 * 256


@named_cases(("after the smallest context", 1, True), ("at once", 0, False))
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
