"""What users set by hand, in public reports that were replayed, is no faster than the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.llama.worker.remembered_loads import RememberingWorker
from tests.support.cases import cases
from tools.loopback import rpc_servers

QWEN = f"config://{Path(__file__).resolve().parents[1] / 'data' / 'configs' / 'qwen36-27b.json'}"
WITH_DRAFTS = {"type_k": "q8_0", "type_v": "q8_0", "spec_type": "draft-mtp", "program": "llama-server"}
SAME = 1.01

ROWS = {
    "all layers on two cards, no room for the pipeline": (
        f"{QWEN}:Q8_0",
        {"gpus": "2x rtx-3090", "n_ctx": 262144, "n_ubatch": 4096, "n_batch": 4096, "type_k": "q8_0", "type_v": "q8_0"},
        {"n_gpu_layers": 66, "tensor_split": (32, 34), "override_tensor": ["^blk.60.ffn_(down|gate|up).weight$=CUDA0"]},
    ),
    "the same with drafts of its own": (
        f"{QWEN}:Q8_0",
        {"gpus": "2x rtx-3090", "n_ctx": 262144, "n_ubatch": 1024, "n_seq_max": 1, **WITH_DRAFTS},
        {"n_gpu_layers": 66, "tensor_split": (35, 31), "override_tensor": ["^blk.64.ffn_down.weight$=CPU"]},
    ),
    "a window of contexts without room for the pipeline": (
        f"{QWEN}:Q5_K_M",
        {"gpus": "2x rtx-5070-ti", "n_ctx": 204800, "n_seq_max": 1, **WITH_DRAFTS},
        {"n_gpu_layers": 66, "tensor_split": (36, 30), "override_tensor": ["^blk.64.ffn_down.weight$=CPU"]},
    ),
    "shared experts of host layers": (
        "shape://llama-4-scout",
        # with caches on the host it is as fast without them
        {"gpus": "rtx-3060-12gb", "n_ctx": 262144, "prompt": 2048, "offload_kqv": True},
        {"n_gpu_layers": 13, "override_tensor": ["ffn_.*_shexp=CUDA0", "ffn_.*_exps=CPU"], "flash_attn": "auto"},
    ),
    "experts of 20 layers on the host": (
        "shape://gemma-4-26b-a4b",
        {"gpus": "rtx-4070", "n_ctx": 100096, "margin": 512 << 20, "n_seq_max": 2, "swa_full": True, "prompt": 2048},
        {"n_cpu_moe": 20},
    ),
    "an integrated GPU that llama.cpp leaves out by default": (
        "shape://qwen3-30b-a3b:Q5_K_M",
        # a micro batch that one device has chosen is 4 % slower on both with some builds
        {"gpus": ["vulkan:nvidia:12GiB", "strix-halo:128GiB"], "n_ctx": 16384, "n_seq_max": 1, "n_ubatch": 1024},
        {"devices": ["ROCm0", "Vulkan0"]},
    ),
    "one more card of 2 GiB": (
        "shape://llama-3.1-70b",
        {"gpus": ["tesla-p40", "rtx-4090", "2GiB"], "n_seq_max": 16, "n_ctx": 262144, "prompt": 4096},
        {"devices": ["CUDA1", "CUDA0"]},
    ),
    "the slower card first, without room for the pipeline": (
        "shape://llama-3.1-70b",
        {"gpus": ["tesla-p40", "rtx-4090"], "n_seq_max": 16, "n_ctx": 294912, "prompt": 4096},
        {"devices": ["CUDA1", "CUDA0"]},
    ),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with RememberingWorker() as worker:
        yield worker


@cases(ROWS)
def test_none_is_faster(model: str, asked: dict[str, Any], by_hand: dict[str, Any], worker: Worker) -> None:
    plan = fitter.fit(model, **asked, worker=worker)
    other = fitter.fit(model, **asked, **by_hand, worker=worker)
    assert plan.fits and plan.estimate is not None
    # what else a plan may choose is chosen in both
    assert other.fits and other.estimate is not None
    assert plan.estimate.seconds <= SAME * other.estimate.seconds


def test_a_tensor_where_it_is_ends_the_pipeline(worker: Worker) -> None:
    model, asked, _ = ROWS["all layers on two cards, no room for the pipeline"]
    plan = fitter.fit(model, **asked, worker=worker)
    (override,) = plan.params.tensor_buft_overrides
    assert override.buffer_type == "CUDA1" and plan.params.n_gpu_layers == plan.n_layer + 1
    assert any("pipeline" in note and override.pattern in note for note in plan.notes)
    assert not any("pipeline" in note for note in fitter.fit(model, **{**asked, "n_ctx": 8192}, worker=worker).notes)


def test_layers_on_none_of_the_users_slow_devices() -> None:
    # a server that computes with a processor, and its network: CUDA0 and CUDA1 have all layers
    asked: dict[str, Any] = {"gpus": "2x rtx-3090", "n_ctx": 32768, "n_seq_max": 1, "rpc_bandwidth": "20GB/s"}
    with rpc_servers.servers(1) as endpoints:
        asked |= {"rpc": endpoints, "devices": ["RPC0", "CUDA0", "CUDA1"]}
        plan = fitter.fit("shape://glm-4.5-air", **asked)
        by_hand = fitter.fit("shape://glm-4.5-air", **asked, tensor_split=[0, 17, 30])
    assert plan.fits and by_hand.fits and plan.estimate is not None and by_hand.estimate is not None
    assert plan.params.tensor_split is not None and plan.params.tensor_split[0] == 0
    assert plan.params.devices == ("RPC0", "CUDA0", "CUDA1")
    assert plan.estimate.seconds <= SAME * by_hand.estimate.seconds


IDLE = {
    "an integrated GPU as slow as the host": (
        "qwen3-30b-a3b:Q5_K_M",
        {"gpus": ["vulkan:nvidia:12GiB", "radeon-780m:64GiB"], "n_ctx": 16384},
        ("Vulkan0",),
        ["Vulkan1 stays idle: it shares the host's memory, and with a layer there the request would take about "],
    ),
    "the last of equal cards": (
        "gemma-3-27b",
        {"gpus": "4x 16GiB", "n_ctx": 8192},
        ("CUDA0", "CUDA1"),
        ["CUDA2, CUDA3 stay idle: a layer there saves no time ("],
    ),
    "a slow card, and one within its margin": (
        "llama-3.1-8b",
        {"gpus": ["rtx-4090", "rtx-3060-12gb", "1GiB"], "n_ctx": 8192},
        ("CUDA0",),
        ["CUDA1 stays idle: with a layer there the request would take about "],
    ),
    "a card that other programs fill": (
        "llama-3.1-8b",
        {"gpus": ["rtx-3090:free=0", "rtx-4090", "rtx-3060-12gb"], "n_ctx": 8192},
        ("CUDA1",),
        ["CUDA2 stays idle: with a layer there the request would take about "],
    ),
    "a card without room for a compute buffer that the user asked for": (
        "llama-3.1-8b",
        {"gpus": "8GiB", "embedding": True, "n_batch": 32768, "n_ctx": 32768},
        (),
        ["CUDA0 stays idle: no plan with it fits: a micro batch of 32768 tokens has large compute buffers (-ub, -b)"],
    ),
    "a card that has no layer, and is not idle": (
        "llama-3.1-70b",
        {"gpus": "2x rtx-4060:free=2GiB", "n_ctx": 131072, "n_seq_max": 8},
        ("CUDA0",),
        ["CUDA0 only computes prompts: a layer there saves ", "CUDA1 stays idle: a layer there saves "],
    ),
    "a card without room for a layer": (
        "llama-3.1-70b",
        {"gpus": ["2x rtx-3090", "cuda:8.6:1300MiB"], "n_ctx": 8192},
        ("CUDA0", "CUDA1"),
        ["CUDA2 stays idle: 276 MiB beyond the margin are less than a compute buffer and a layer, about "],
    ),
}


@cases(IDLE)
def test_idle_devices(
    shape: str, asked: dict[str, Any], devices: tuple[str, ...], notes: list[str], worker: Worker
) -> None:
    plan = fitter.fit(f"shape://{shape}", **{"n_seq_max": 1, **asked}, worker=worker)
    assert plan.params.devices == devices
    found = [note for note in plan.notes if " idle: " in note or " only compute" in note]
    # each device that has nothing is named once
    named = {name for note in found for name in re.split(r" stay| only", note)[0].split(", ")}
    left_out = {left.device for left in plan.left_out}
    assert not named & left_out and named | left_out | {*devices} >= {use.name for use in plan.devices}
    assert [note[: len(start)] for note, start in zip(found, notes, strict=True)] == notes


@cases(True, False)
def test_where_the_users_caches_are_stays(offload_kqv: bool, worker: Worker) -> None:
    # a plan without words has all caches on the host
    asked: dict[str, Any] = {"gpus": "rtx-3080", "n_seq_max": 256, "n_ctx": 1048576, "type_k": "q8_0", "type_v": "q8_0"}
    asked |= {"n_ubatch": 512, "prompt": 2048, "worker": worker}
    assert not fitter.fit("shape://llama-3.1-8b", **asked).params.offload_kqv
    plan = fitter.fit("shape://llama-3.1-8b", **asked, offload_kqv=offload_kqv)
    assert plan.params.offload_kqv is offload_kqv


def test_a_second_card_gives_more_context(worker: Worker) -> None:
    """One card has chosen a micro batch that two could not work on at once: with both, the search goes back."""
    asked = {"gpus": ["rtx-4090", "rtx-3080"], "prompt": 2048, "n_seq_max": 4}
    plan = fitter.fit("shape://qwen3-30b-a3b", **asked, worker=worker)
    by_hand = fitter.fit("shape://qwen3-30b-a3b", **asked, n_ctx=plan.params.n_ctx, worker=worker)
    assert plan.params.n_ctx >= 58368 and plan.search.dummy_loads <= 20
    assert plan.estimate and by_hand.estimate and plan.estimate.seconds <= by_hand.estimate.seconds * SAME
