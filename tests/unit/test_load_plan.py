from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import llama_cpp
import pytest

from fitter.api.real_runs.load_plan import load_once
from fitter.errors import PlanError, UsageError
from fitter.llama.load import backend_devices as devices
from fitter.llama.this_process import plan_load
from fitter.llama.types import DeviceInfo, Params, TensorBuftOverride
from fitter.output.keywords import llama_kwargs
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.plan import Problem
from tests.support.cases import cases
from tests.support.plans import make_plan

REAL = make_plan(Params(n_ctx=512, n_gpu_layers=3), virtual=False)
OVERRIDES = (TensorBuftOverride("exps", "CPU"),)
PROBLEM = Problem("host", 1, "1 MiB too little on the host")


def with_params(**params: Any) -> Any:
    return replace(REAL, params=replace(REAL.params, **params))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(
        devices.Device(DeviceInfo(name, "Card", "gpu", "CUDA", 1, 1), None, 0, name, 0) for name in ("CUDA0", "CUDA1")
    )
    for module in (devices, plan_load):
        monkeypatch.setattr(module, "registry", lambda: devices.Registry(cards, cards))


def test_the_arguments_of_llama() -> None:
    plan = with_params(
        tensor_split=(2.0, 1.0), n_batch=1024, n_ubatch=256, type_k="q8_0", type_v="q4_0", op_offload=False
    )
    assert llama_kwargs(plan) == {
        "n_ctx": 512,
        "n_gpu_layers": 3,
        "split_mode": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
        "main_gpu": 0,
        "tensor_split": [2.0, 1.0],
        "n_batch": 1024,
        "n_ubatch": 256,
        "type_k": llama_cpp.GGML_TYPE_Q8_0,
        "type_v": llama_cpp.GGML_TYPE_Q4_0,
        "flash_attn": True,
        "offload_kqv": True,
        "op_offload": False,
        "swa_full": False,
        "embedding": False,
        "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,
    }


def test_the_table_has_what_llama_takes() -> None:
    names = inspect.signature(llama_cpp.Llama.__init__).parameters
    of_llama = {name for name, each in PARAMETERS.items() if name in names}
    assert {name for name, each in PARAMETERS.items() if each.is_keyword_of_llama} == of_llama


@cases(
    ("auto", True, True),
    ("auto", False, False),
    ("on", True, True),
    ("off", False, False),
    ("auto", None, True),
    ("off", None, False),
)
def test_flash_attention_is_what_llama_cpp_made_of_it(asked: Any, resolved: bool | None, expected: bool) -> None:
    plan = make_plan(Params(n_ctx=512, flash_attn=asked), flash_attn=resolved)
    assert llama_kwargs(plan)["flash_attn"] is expected


@cases(
    ({"tensor_buft_overrides": OVERRIDES}, None, "tensor overrides"),
    ({"n_seq_max": 2}, None, "more than one sequence"),
    ({"devices": ("CUDA0",)}, None, "the list of devices"),
    ({"devices": ()}, None, "the list of devices"),
)
@pytest.mark.usefixtures("registry")
def test_what_llama_has_no_parameter_for(params: dict[str, Any], devices: Any, what: str) -> None:
    with pytest.raises(PlanError, match=rf"no parameter for {what}.*use plan\.load\(\)"):
        llama_kwargs(with_params(**params))


@pytest.mark.usefixtures("registry")
def test_the_list_of_all_devices_needs_no_parameter() -> None:
    assert llama_kwargs(with_params(devices=("CUDA0", "CUDA1"))) == llama_kwargs(REAL)


def test_a_plan_that_does_not_fit_is_not_handed_out() -> None:
    plan = replace(REAL, problems=(PROBLEM,))
    for ask in (llama_kwargs, lambda plan: load_once(plan, "model.gguf", {})):
        with pytest.raises(PlanError, match="does not fit: 1 MiB too little"):
            ask(plan)


def test_virtual_devices_run_nothing() -> None:
    with pytest.raises(PlanError, match="virtual devices"):
        load_once(make_plan(virtual=True), "model.gguf", {})


@cases(
    ({"n_ctx": 1024}, "n_ctx=1024 contradicts the plan, which has 512"),
    ({"flash_attn": False}, "flash_attn=False contradicts the plan"),
    ({"embedding": True}, "embedding=True contradicts the plan, which has False: fit again with it"),
    ({"lora_path": "a.gguf"}, "lora_path='a.gguf' takes memory"),
    ({"vocab_only": True}, "vocab_only=True takes memory"),
    ({"model_path": "b.gguf"}, "model_path is set by the plan"),
    ({"n_gpu_layer": 3}, "llama_cpp.Llama has no parameter 'n_gpu_layer'; did you mean 'n_gpu_layers'?"),
    ({"xyz": 3}, "llama_cpp.Llama has no parameter 'xyz'"),
)
def test_arguments_that_contradict_the_plan(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_once(REAL, "model.gguf", kwargs)


@pytest.mark.usefixtures("registry")
def test_devices_that_are_not_here() -> None:
    for plan in (with_params(devices=("CUDA7",)), make_plan(Params(n_ctx=512), devices=["CUDA0"], virtual=False)):
        with pytest.raises(PlanError, match=r"llama\.cpp has CUDA0, CUDA1 here: fit again"):
            load_once(plan, "model.gguf", {})
