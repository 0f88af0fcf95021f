"""Contexts that a device refuses or no memory can hold: never asked about, and the largest of the rest is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from fitter.errors import LlamaCppCrashError, LlamaCppError
from fitter.llama.types import Breakdown, Layout, LayoutEntry, Params, TensorBuftOverride
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.request import context_limit
from fitter.planning.request.context_limit import Excess, limited, usable, within
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.search.best_plan import fit
from tests.support.cases import cases, named_cases
from tests.support.synthetic import MIB, SyntheticLlama, SyntheticModel, limits, load_calls, request

MODEL = SyntheticModel(n_ctx_train=1 << 20)
SUMMARY = ModelSummary("model.gguf", "model", "llama", 0)


@dataclass
class Strict(SyntheticLlama):
    """A llama.cpp that ends where a device gets a cache of more than it takes in one tensor."""

    crashes: int = 0
    widest: int = 0

    def measure(self, params: Params) -> Breakdown:
        self.widest = max(self.widest, params.n_ctx)
        most = {device.name: device.largest_tensor for device in self.limits}
        for name in params.devices or ():
            if params.offload_kqv and (largest := most[name]) and self.cache(params, params.n_ctx) > largest:
                self.crashes += 1
                raise LlamaCppCrashError("llama.cpp was ended by SIGABRT during 'measure'")
        return super().measure(params)

    def record(self, params: Params) -> Layout:
        self.widest = max(self.widest, params.n_ctx)
        return super().record(params)


def taking(devices: tuple[DeviceLimit, ...], *mib: int | None) -> tuple[DeviceLimit, ...]:
    sizes = [None if size is None else size * MIB for size in mib]
    return tuple(replace(device, largest_tensor=size) for device, size in zip(devices, sizes, strict=True))


def fitted(asked: Request, llama: SyntheticLlama) -> Plan:
    ways = load_calls(llama)
    return fit(asked, SUMMARY, ways, lambda progress: None, True)


@cases(1, 3, 16)
def test_the_largest_context_that_the_device_takes_in_steps_of_all_sequences(n_seq_max: int) -> None:
    devices = taking(limits(400_000), 1000)
    llama = Strict(MODEL, devices)
    plan = fitted(request(MODEL, devices, params=Params(n_seq_max=n_seq_max)), llama)
    # 4096 bytes a token and layer
    step = 256 * n_seq_max
    assert plan.params.n_ctx == 1000 * MIB // 4096 // step * step
    assert plan.fits and llama.crashes == 0


def test_a_fixed_context_that_is_too_large_does_not_fit_and_says_what_would() -> None:
    devices = taking(limits(100_000), 1024)
    llama = Strict(MODEL, devices)
    asked = request(MODEL, devices, params=Params(n_ctx=300_032, n_seq_max=2), fixed=("n_ctx",))
    plan = fitted(asked, llama)
    assert not plan.fits and llama.crashes == 0
    assert [(problem.device, problem.missing) for problem in plan.problems] == [("CUDA0", 300_032 * 4096 - 1024 * MIB)]
    assert plan.problems[0].message == (
        "CUDA0 cannot use a tensor of more than 1024 MiB, but at a context of 300032 the KV cache of a layer "
        "(cache_k_l0) has 1172 MiB: use -c 262144 or less, or fewer sequences (-np), or a smaller cache type "
        "(-ctk, -ctv), or -nkvo, which keeps it in host memory"
    )
    # the nearest that there is, and nobody has given it up
    assert plan.params.n_ctx == 262144 and plan.levers == ()


@cases(({"context"}, 262144, "f16"), ({"kv-q8_0"}, 400_128, "q8_0"), ({"kv-q8_0", "context"}, 400_128, "q8_0"))
def test_what_may_be_given_up_makes_it_fit(allow: set[str], context: int, cache: str) -> None:
    devices = taking(limits(100_000), 1024)
    llama = Strict(MODEL, devices)
    asked = request(MODEL, devices, params=Params(n_ctx=400_128), fixed=("n_ctx",))
    plan = fitted(replace(asked, allow=frozenset(allow)), llama)
    assert plan.fits and llama.crashes == 0
    assert (plan.params.n_ctx, plan.params.type_k) == (context, cache)


def test_a_smaller_type_that_is_still_too_large_is_no_answer() -> None:
    devices = taking(limits(100_000), 1024)
    asked = request(MODEL, devices, params=Params(n_ctx=1_000_192), fixed=("n_ctx",))
    plan = fitted(replace(asked, allow=frozenset({"kv-q8_0"})), Strict(MODEL, devices))
    assert not plan.fits and "1000192" in plan.problems[0].message


def test_the_smallest_context_that_is_too_large_is_named_too() -> None:
    devices = taking(limits(100_000), 4)
    plan = fitted(request(MODEL, devices), Strict(MODEL, devices))
    assert not plan.fits and plan.params.n_ctx == 1024
    assert "at a context of 4096" in plan.problems[0].message and "-c 1024 or less" in plan.problems[0].message


def test_no_context_at_all_is_an_error_of_one_line() -> None:
    devices = taking(limits(100_000), 4)
    asked = request(MODEL, devices, params=Params(n_seq_max=256))
    with pytest.raises(LlamaCppError, match=r"^CUDA0 cannot use a tensor of more than 4 MiB, .*: use fewer sequences"):
        fitted(asked, Strict(MODEL, devices))


@named_cases(("-nkvo", Params(offload_kqv=False)), ("-ngl 0", Params(n_gpu_layers=0)))
def test_a_cache_in_host_memory_has_no_limit(params: Params) -> None:
    asked = request(MODEL, taking(limits(100_000), 4), params=params, fixed=("n_gpu_layers",))

    def record(params: Params) -> Layout:
        raise AssertionError("nothing is to be asked")

    assert limited(asked, record) == (asked, None)


def test_a_model_without_caches_has_no_limit() -> None:
    asked = request(MODEL, taking(limits(100_000), 4))
    assert limited(asked, lambda params: Layout((), 128, params.n_ctx)) == (asked, None)


def test_of_a_context_that_is_given_no_other_is_asked_about() -> None:
    devices = taking(limits(100_000), 100)
    llama, asked = SyntheticLlama(MODEL, devices), []

    def record(params: Params) -> Layout:
        asked.append(params.n_ctx)
        return llama.record(params)

    fixed = request(MODEL, devices, params=Params(n_ctx=16384), fixed=("n_ctx",))
    assert limited(fixed, record) == (fixed, None) and asked == [16384]


def test_a_device_without_the_limit_takes_what_another_one_refuses() -> None:
    devices = taking(limits(20_000, 40_000), 512, None)
    llama = Strict(MODEL, devices)
    plan = fitted(request(MODEL, devices), llama)
    assert plan.fits and plan.params.devices == ("CUDA1",) and plan.params.n_ctx == 1 << 20
    fixed = fitted(request(MODEL, devices, params=Params(n_ctx=1 << 20), fixed=("n_ctx",)), Strict(MODEL, devices))
    assert fixed.fits and fixed.params.devices == ("CUDA1",)
    assert llama.crashes == 0


def test_devices_that_the_user_has_chosen_stay() -> None:
    devices = taking(limits(20_000, 20_000), 512, None)
    asked = request(MODEL, devices, params=Params(n_ctx=1 << 20), fixed=("n_ctx", "devices"))
    plan = fitted(asked, Strict(MODEL, devices))
    assert not plan.fits and plan.problems[0].device == "CUDA0"
    free = fitted(request(MODEL, devices, fixed=("devices",)), Strict(MODEL, devices))
    assert free.fits and free.params.devices == ("CUDA0", "CUDA1") and free.params.n_ctx == 131072


PINNED = TensorBuftOverride("blk.2.ffn_up", "CUDA0")


@named_cases(
    ("no-wider-than-the-device-with-the-tensors-takes", (16, None), 0, 4096),
    ("another-device-may-be-left-out", (None, 16), 0, 32768),
    ("the-device-with-the-tensors-is-in-the-way", (8, 16), 8192, 2048),
    ("one-that-takes-less-is-not", (16, 8), 8192, 4096),
)
def test_a_device_with_tensors_of_the_user_stays(mib: tuple[int | None, ...], n_ctx: int, largest: int) -> None:
    devices = taking(limits(20_000, 20_000), *mib)
    fixed = ("n_ctx",) if n_ctx else ()
    asked = request(SyntheticModel(), devices, params=Params(n_ctx=n_ctx, tensor_buft_overrides=(PINNED,)), fixed=fixed)
    llama = Strict(SyntheticModel(), devices)
    plan = fitted(replace(asked, pinned={"blk.2.ffn_up.weight": 0}), llama)
    assert "CUDA0" in (plan.params.devices or ()) and llama.crashes == 0
    assert plan.params.n_ctx == largest and plan.fits is (not n_ctx)
    assert [problem.device for problem in plan.problems] == (["CUDA0"] if n_ctx else [])


def test_of_the_devices_that_the_user_has_chosen_the_one_that_takes_least_is_named() -> None:
    devices = taking(limits(20_000, 20_000), 8, 16)
    asked = request(MODEL, devices, params=Params(n_ctx=8192), fixed=("n_ctx", "devices"))
    plan = fitted(asked, Strict(MODEL, devices))
    assert plan.problems[0].device == "CUDA0" and "-c 2048 or less" in plan.problems[0].message


LARGE = {"cache_k_l6": 900 * MIB, "cache_k_l7": 10 * MIB}


@named_cases(
    ("the large one is on the host", 2, LARGE, None),
    ("it is on a device", 3, LARGE, "cache_k_l6"),
    ("all are, with the first", 99, {"cache_k_l0": 900 * MIB}, "cache_k_l0"),
)
def test_only_layers_on_devices_count(n_gpu_layers: int, caches: dict[str, int], refused: str | None) -> None:
    def record(params: Params) -> Layout:
        entries = [LayoutEntry("Recorder", name, "context", size) for name, size in caches.items()]
        return Layout(tuple(entries), 128, params.n_ctx)

    params, fixed = Params(n_ctx=4096, n_gpu_layers=n_gpu_layers), ("n_ctx", "n_gpu_layers")
    asked = request(MODEL, taking(limits(100_000), 100), params=params, fixed=fixed)
    if refused is None:
        assert limited(asked, record) == (asked, None)
        return
    with pytest.raises(LlamaCppError, match=refused):
        limited(asked, record)


GROWTH: dict[str, Callable[[int], int]] = {
    "in proportion": lambda n: 4096 * n,
    "with a part that stays": lambda n: 500 * MIB + 1024 * n,
    "a window's": lambda n: min(4096 * n, 30 * MIB + 64 * n),
    "padded": lambda n: -(-n // 4096) * 4096 * 4096,
}


@pytest.mark.parametrize("size", GROWTH.values(), ids=GROWTH)
@pytest.mark.parametrize("step", [256, 4096])
@pytest.mark.parametrize("most", [1, 600 * MIB, 1111 * MIB])
def test_the_widest_context_is_exact_however_caches_grow(size: Callable[[int], int], step: int, most: int) -> None:
    top = 1 << 20
    found = context_limit.widest(size, step, top, size(top) if size(top) > most else most + 1, most)
    right = max((n for n in range(step, top, step) if size(n) <= most), default=0)
    assert found == right


def test_what_cannot_fit_is_not_asked_about() -> None:
    model = SyntheticModel(n_ctx_train=1 << 26)
    devices = limits(3000, 3000)
    llama = Strict(model, devices)
    plan = fitted(request(model, devices), llama)
    # 8 layers of 4096 bytes a token: 6000 MiB are less than 200,000 tokens, and contexts to EXPENSIVE load quickly
    assert plan.fits and llama.widest <= context_limit.EXPENSIVE + 256
    capped, _ = limited(request(model, devices), llama.record)
    assert context_limit.EXPENSIVE <= capped.n_ctx_max <= context_limit.EXPENSIVE + 256


@pytest.mark.parametrize("machine", [(900,), (1500, 700), (3000, 3000), (400, 300, 500)], ids=str)
def test_the_plan_is_the_one_that_all_contexts_give(machine: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, devices = SyntheticModel(n_ctx_train=1 << 22), limits(*machine)
    plan = fitted(request(model, devices), SyntheticLlama(model, devices))
    monkeypatch.setattr(context_limit, "EXPENSIVE", 1 << 40)
    other = fitted(request(model, devices), SyntheticLlama(model, devices))
    assert (plan.params.n_ctx, plan.fits) == (other.params.n_ctx, other.fits)


def test_the_rules_on_devices() -> None:
    devices = limits(1000, 1000, 1000)
    asked = replace(request(MODEL, devices), context_limits={"CUDA0": 8192, "CUDA2": 2048})
    assert usable(asked, devices) == devices[:2]
    assert within(asked, devices[:2]).n_ctx_max == 8192
    assert within(asked, devices[1:2]).n_ctx_max == MODEL.n_ctx_train
    capped = replace(asked, n_ctx_cap=4096)
    assert within(capped, devices[1:2]).n_ctx_max == 4096
    assert within(capped, ()).n_ctx_max == MODEL.n_ctx_train, "what devices hold is no limit where there are none"
    pinned = {device.name: replace(asked, pinned={"blk.0.attn_q.weight": d}) for d, device in enumerate(devices)}
    assert usable(pinned["CUDA1"], devices) == devices[:2] and usable(pinned["CUDA2"], devices) == ()


@named_cases(
    ("one-takes-too-little", (), 4095, ["CUDA0"]),
    ("one-takes-the-smallest", (), 4096, ["CUDA0", "CUDA1"]),
    ("the-user-wants-it", ("devices",), 4095, []),
    ("the-users-split-has-it", ("tensor_split",), 4095, []),
    ("the-users-context", ("n_ctx",), 8191, ["CUDA0"]),
    ("the-users-context-is-taken", ("n_ctx",), 8192, ["CUDA0", "CUDA1"]),
)
def test_devices_that_take_the_context(fixed: tuple[str, ...], limit: int, names: list[str]) -> None:
    devices = limits(3000, 1000)
    asked = replace(request(MODEL, devices, params=Params(n_ctx=8192), fixed=fixed), context_limits={"CUDA1": limit})
    assert [device.name for device in usable(asked, devices)] == names


def test_a_state_is_called_one() -> None:
    excess = Excess("V", 0, 4096, "cache_s_l3", 8192 * MIB, 4096 * MIB, 256)
    assert "the recurrent state of a layer (cache_s_l3) has 8192 MiB" in excess.message
    assert excess.message.endswith("use fewer sequences (-np), or -nkvo, which keeps it in host memory")
