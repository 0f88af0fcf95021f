"""The levers of --allow on real headers and the real libllama: each where it helps, none without --allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter import Plan
from fitter.planning.request.request import LEVERS, Progress
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tests.support.llama_builds import NEWEST, where

pytestmark = pytest.mark.usefixtures("one_worker")

HOST = "60GB/s"
GPT_OSS = "shape://gpt-oss-120b"
MODELS = ("llama-3.1-8b", "gemma3-12b", "deepseek-v3.1")

CACHE = {"gpus": ["8GiB"], "host_memory": "2GiB", "n_ctx": 32768}
"""With an f16 cache Llama 3.1 8B lacks a GiB on the device, and on the host that it would be moved to."""
EXPERTS = {"gpus": ["5GiB"], "n_ctx": 8192, "cpu_moe": True, "n_gpu_layers": 99}
"""DeepSeek's cache leaves less than the buffer for streaming experts in, even without dense weights."""


def fit(path: Path, *allow: str, **options: Any) -> Plan:
    plan = fitter.fit(path, allow=allow, host_bandwidth=HOST, **options)
    if plan.fits:
        params = plan.params
        overrides = [f"{o.pattern}={o.buffer_type}" for o in params.tensor_buft_overrides]
        measured = fitter.measure(
            path,
            gpus=options["gpus"],
            devices=params.devices,
            n_ctx=params.n_ctx,
            n_gpu_layers=params.n_gpu_layers,
            tensor_split=params.tensor_split,
            override_tensor=overrides,
            n_batch=params.n_batch,
            n_ubatch=params.n_ubatch,
            flash_attn=params.flash_attn,
            type_k=params.type_k,
            type_v=params.type_v,
            op_offload=params.op_offload,
            offload_kqv=params.offload_kqv,
        )
        assert measured == plan.breakdown, "a plan is what its parameters take"
    return plan


@cases("kv-q8_0", "kv-q4_0")
def test_a_quantized_cache_makes_it_fit(lever: str, models: dict[str, Path]) -> None:
    name = lever.removeprefix("kv-")
    plan = fit(models["llama-3.1-8b"], lever, **CACHE)
    assert plan.fits and plan.params.n_ctx == 32768
    assert plan.levers == (f"KV cache {name}/{name} instead of f16/f16",)
    assert plan.breakdown.flash_attn is True
    arguments = " ".join(plan.arguments())
    assert f"-ctk {name} -ctv {name}" in arguments


def test_the_better_of_two_caches_where_it_does(models: dict[str, Path]) -> None:
    # a prompt takes as long with either, where generation would be faster with the smaller one
    usual = {**CACHE, "objective": "prompt"}
    assert fit(models["llama-3.1-8b"], "kv-q4_0", "kv-q8_0", **usual).params.type_k == "q8_0"
    smaller = {**usual, "gpus": ["6500MiB"]}
    assert not fit(models["llama-3.1-8b"], "kv-q8_0", **smaller).fits
    assert fit(models["llama-3.1-8b"], "kv-q4_0", "kv-q8_0", **smaller).params.type_k == "q4_0"


@named_cases(
    ("no flash attention", {"flash_attn": "off"}),
    ("the user's K", {"type_k": "f16"}),
    ("the user's cache", {"type_k": "f16", "type_v": "f16"}),
)
def test_the_users_cache_stays(options: dict[str, Any], models: dict[str, Path]) -> None:
    plan = fitter.fit(models["llama-3.1-8b"], allow=["kv-q8_0", "kv-q4_0"], **CACHE, **options)
    assert not plan.fits and plan.levers == () and (plan.params.type_k, plan.params.type_v) == ("f16", "f16")


def test_a_former_lever_changes_nothing(models: dict[str, Path]) -> None:
    """A fit chooses the micro batch by itself."""
    options: dict[str, Any] = {"gpus": ["8GiB"], "n_ctx": 8192}
    before, after = (fit(models["gemma3-12b"], *allow, **options) for allow in ((), ("ubatch",)))
    assert after.levers == () and after.params == before.params
    kept = fit(models["gemma3-12b"], "ubatch", n_ubatch=64, **options)
    assert kept.levers == () and kept.params.n_ubatch == 64


def test_without_op_offload_no_buffer_for_streaming(models: dict[str, Path]) -> None:
    one = {**EXPERTS, "n_ubatch": 512}
    before = fit(models["deepseek-v3.1"], **one)
    after = fit(models["deepseek-v3.1"], "no-op-offload", **one)
    assert not before.fits and after.fits
    assert after.levers == ("no op_offload",) and "--no-op-offload" in after.arguments()
    assert after.devices[0].compute < before.devices[0].compute / 4
    assert fitter.fit(models["deepseek-v3.1"], allow=["no-op-offload"], op_offload=True, **EXPERTS).levers == ()


def test_a_shorter_context_keeps_the_model_on_the_device(models: dict[str, Path]) -> None:
    one = {**CACHE, "n_ubatch": 512}
    plan = fit(models["llama-3.1-8b"], "context", **one)
    assert plan.fits and 4096 <= plan.params.n_ctx < 32768
    assert plan.levers == (f"context {plan.params.n_ctx} instead of 32768",)
    free = fit(models["llama-3.1-8b"], **{**one, "n_ctx": None})
    assert plan.params == free.params, "it is the context that would have been fitted"
    kept = fit(models["llama-3.1-8b"], "context", fit_ctx=32768, **one)
    assert not kept.fits and kept.levers == ()


@cases(("llama-3.1-8b", CACHE), ("deepseek-v3.1", EXPERTS))
def test_nothing_is_given_up_unless_it_is_allowed(model: str, options: dict[str, Any], models: dict[str, Path]) -> None:
    steps: list[Progress] = []
    plan = fitter.fit(models[model], on_progress=steps.append, **options)
    paging = fitter.fit(models[model], allow=["paging"], **options)
    assert not plan.fits and plan.levers == ()
    assert (plan.params.type_k, plan.params.type_v, plan.params.op_offload) == ("f16", "f16", True)
    assert plan.params.n_ctx == paging.params.n_ctx == options["n_ctx"]
    assert not any("instead of" in step.text or "no op_offload" in step.text for step in steps)
    steps.clear()
    fitter.fit(
        models[model], allow=[lever for lever in LEVERS if lever != "paging"], on_progress=steps.append, **options
    )
    assert any("instead of" in step.text for step in steps)


def test_the_command_line(models: dict[str, Path]) -> None:
    words = ["--gpu", "8GiB", "--host-memory", "2GiB", "-c", "32768", "--json"]
    done = run_fitter(models["llama-3.1-8b"], *words, "--allow", "ubatch,kv-q8_0")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["levers"] == ["KV cache q8_0/q8_0 instead of f16/f16"]
    assert "-ctk" in document["arguments"]
    assert "given up, as --allow permits: KV cache q8_0/q8_0 instead of f16/f16" in done.stderr
    done = run_fitter(models["llama-3.1-8b"], *words)
    assert done.returncode == 1 and json.loads(done.stdout)["levers"] == []
    assert "given up" not in done.stderr


def test_a_lever_that_this_llama_cpp_lacks_has_no_effect(models: dict[str, Path]) -> None:
    """The pinned llama.cpp has no cache of experts."""
    before, after = (fit(models["deepseek-v3.1"], *allow, **EXPERTS) for allow in ((), ("moe-cache",)))
    assert after.params == before.params and after.levers == ()
    assert [note for note in after.notes if "moe_cache_size is not a parameter of llama.cpp" in note] == [
        note for note in after.notes if note not in before.notes
    ]
    with pytest.raises(fitter.UsageError, match="moe_cache_size is not a parameter"):
        fit(models["deepseek-v3.1"], moe_cache_size="2GiB", **EXPERTS)


@cases(1, 2)
def test_a_cache_of_experts_that_no_buffer_holds(n_cards: int) -> None:
    """llama.cpp would end its process: a card on Mesa's RADV has no buffer above 4 GiB."""
    asked: dict[str, Any] = {"gpus": ["vulkan:30GiB"] * n_cards, "n_ctx": 4096, "llama_cpp": where(NEWEST)}
    asked |= {"cpu_moe": True, "n_gpu_layers": 99, "tensor_split": [1] * n_cards}
    refused = "a cache of {} MiB for experts needs a larger buffer than a device has: give --moe-cache-mib {} or less"
    # three tensors with as many slots on each card
    with pytest.raises(fitter.UsageError) as error:
        fitter.measure(GPT_OSS, moe_cache_size="28GiB", **asked)
    most = int(str(error.value).split()[-3])
    assert str(error.value) == refused.format(28672, most)
    assert most == pytest.approx(n_cards * 3 * 4096, rel=0.01)
    loaded = fitter.measure(GPT_OSS, moe_cache_size=f"{most}MiB", **asked)
    assert sum(loaded.on(f"Vulkan{i}").context for i in range(n_cards)) > n_cards * 11.9 * 2**30
    assert fitter.fit(GPT_OSS, moe_cache_size=f"{most}MiB", **asked).fits
    for ask in (fitter.fit, fitter.measure):
        with pytest.raises(fitter.UsageError, match=refused.format(most + 1, most)):
            ask(GPT_OSS, moe_cache_size=f"{most + 1}MiB", **asked)


def test_a_fit_goes_on_where_one_card_has_no_buffer_for_a_cache_of_experts() -> None:
    asked: dict[str, Any] = {"gpus": ["vulkan:30GiB"] * 2, "n_ctx": 4096, "llama_cpp": where(NEWEST), "cpu_moe": True}
    plan = fitter.fit(GPT_OSS, moe_cache_size="20000MiB", **asked)
    assert plan.fits and plan.params.tensor_split == pytest.approx((19, 18))
