"""What is made of the user's words before a model is known well: batches, margins, overrides, the request to price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, Params, TensorBuftOverride
from fitter.machine.gpu import parse_gpus
from fitter.model.header import Model
from fitter.planning.request import constraints
from fitter.planning.request.request import DeviceLimit
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.request.summary import Problem
from fitter.planning.speed.cost import Workload
from fitter.text import MIB
from tests.support.cases import named_cases

CARD = DeviceInfo("CUDA0", "a card", "gpu", "CUDA", 8192 * MIB, 8000 * MIB, buffer_type="CUDA0", largest_tensor=MIB)


@named_cases(
    ("nothing", {}, Params()),
    ("a larger micro batch alone", {"n_ubatch": 4096}, replace(Params(), n_ubatch=4096, n_batch=4096)),
    ("a smaller micro batch", {"n_ubatch": 64}, replace(Params(), n_ubatch=64)),
    ("as they are given", {"n_ubatch": 4096, "n_batch": 128}, replace(Params(), n_ubatch=4096, n_batch=128)),
)
def test_params(words: dict[str, int], expected: Params) -> None:
    assert constraints.params_of(None, **words) == expected  # type: ignore[arg-type]
    assert constraints.params_of(["a", "b"], **words).devices == ("a", "b")  # type: ignore[arg-type]


def test_a_context_for_each_slot() -> None:
    found = constraints.params_of(None, kv_unified_per_slot=1000, n_seq_max=3)
    assert (found.n_ctx, constraints.params_of(None, kv_unified_per_slot=1000).n_ctx) == (3000, 1000)
    assert constraints.params_of(None, kv_unified_per_slot=1000, n_seq_max=3, n_ctx=512).n_ctx == 512


@named_cases(
    ("divided", {"n_ctx": 4096, "n_seq_max": 4}, 1024),
    ("unified", {"n_ctx": 4096, "n_seq_max": 4, "kv_unified": True}, 4096),
    ("unified, and one", {"n_ctx": 4096, "kv_unified": True}, 4096),
    ("the model's own", {"n_seq_max": 4}, 777),
    ("no more than a slot has", {"n_ctx": 4096, "n_seq_max": 4, "kv_unified": True, "kv_unified_per_slot": 512}, 512),
)
def test_the_context_of_a_sequence(words: dict[str, int], expected: int) -> None:
    params = constraints.params_of(None, **words)  # type: ignore[arg-type]
    assert constraints.context_of_a_sequence(params, 777) == expected


def test_a_model_that_does_not_say_is_causal() -> None:
    path = Path("model.gguf")
    model = Model(path, (path,), "model", "llama", 2, 1, 0, 4096, 8, (), {})
    params = constraints.params_of(None, n_ctx=3, n_seq_max=4)
    with pytest.raises(UsageError, match=r"n_ctx .-c. is 3, and 4 sequences"):
        constraints.for_model(params, model, False, None)


EXPERTS = ".ffn_(up|down|gate|gate_up)_(ch|)exps"
NAMES = ("blk.0.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight", "blk.10.ffn_up_exps.weight")


@named_cases(
    ("nothing", False, None, ()),
    ("of no layer", False, 0, ()),
    ("all", True, None, (TensorBuftOverride(EXPERTS, "CPU"),)),
    ("all, whatever is said of layers", True, 1, (TensorBuftOverride(EXPERTS, "CPU"),)),
    ("the first layer", False, 1, (TensorBuftOverride(f"^blk.(0){EXPERTS}", "CPU"),)),
    ("the first ten", False, 10, (TensorBuftOverride(f"^blk.(0|1){EXPERTS}", "CPU"),)),
)
def test_experts_on_the_host(cpu_moe: bool, n_cpu_moe: int | None, expected: tuple[TensorBuftOverride, ...]) -> None:
    assert constraints.host_overrides(cpu_moe, n_cpu_moe, None, NAMES) == expected


def test_what_a_device_is_in_a_fit() -> None:
    devices = [CARD, replace(CARD, name="CUDA1", buffer_type=None, largest_tensor=None)]
    assert constraints.device_limits(devices, [0, 5]) == (
        DeviceLimit("CUDA0", "a card", 8192 * MIB, 8000 * MIB, 0, "CUDA0", MIB),
        DeviceLimit("CUDA1", "a card", 8192 * MIB, 8000 * MIB, 5, "CUDA1", None),
    )


LACKING = Problem("CUDA0", MIB + 1, "it does not fit")
ON_HOST = replace(LACKING, device=HOST_NAME)


def card(margin: int) -> DeviceLimit:
    return DeviceLimit("CUDA0", "a card", 8 * MIB, 7 * MIB, margin, "CUDA0")


@named_cases(
    ("nothing is wrong", [card(9 * MIB)], [], ""),
    ("no device", [], [ON_HOST], ""),
    ("as much as there is", [card(8 * MIB)], [ON_HOST], ""),
    ("one of two is large enough", [card(9 * MIB), card(1)], [ON_HOST], ""),
    (
        "the host lacks memory",
        [card(9 * MIB)],
        [LACKING, ON_HOST],
        r"(9 MiB of CUDA0 with 8 MiB), so nothing can be placed there, but without a device the host lacks 2 MiB: "
        "use a smaller --fit-target",
    ),
    (
        "nothing but a device will do",
        [card(9 * MIB), card(10 * MIB)],
        [LACKING],
        "(9 MiB of CUDA0 with 8 MiB, 10 MiB of CUDA0 with 8 MiB), so nothing can be placed there, but -ngl, -ts or -ot "
        "needs a device: use a smaller --fit-target",
    ),
)
def test_margins_larger_than_every_device(devices: list[DeviceLimit], problems: list[Problem], said: str) -> None:
    if not said:
        constraints.check_margins(devices, problems)
        return
    with pytest.raises(UsageError) as caught:
        constraints.check_margins(devices, problems)
    assert str(caught.value) == f"the margin is larger than the device {said}"


@named_cases(
    ("both", 100, 200, 300, Workload(100, 200)),
    ("a prompt that leaves a token", 299, None, 300, Workload(299, 1)),
    ("an answer that leaves a token", None, 299, 300, Workload(1, 299)),
    ("no room for more than a token", None, None, 1, Workload(0, 1)),
    ("two tokens", None, None, 2, Workload(1, 1)),
)
def test_a_request_as_large_as_that(prompt: int | None, generate: int | None, context: int, expected: Workload) -> None:
    assert constraints.workload_of(prompt, generate, context, is_set=True) == expected


@named_cases(
    ("none", None, ["metal:64GiB"], ""),
    ("cards", "library", ["rtx-4090", "rtx-3090"], ""),
    ("no cards", "library", [], "describe them, such as --gpu rtx-4090"),
    ("another profile", "library:/x", ["rtx-4090", "metal:64GiB"], "is for NVIDIA cards, but MTL0 is '"),
)
def test_what_a_library_is_for(profile: str | None, gpus: list[str], said: str) -> None:
    if not said:
        constraints.check_profile(profile, parse_gpus(gpus))
        return
    with pytest.raises(UsageError, match=said):
        constraints.check_profile(profile, parse_gpus(gpus))
