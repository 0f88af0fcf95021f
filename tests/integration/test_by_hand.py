"""What users set by hand, in public reports that were replayed, is no faster than the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.machine import bandwidth
from fitter.machine.speed import DeviceSpeed
from fitter.storage import parse_toml
from tests.support.cases import cases, named_cases
from tools.loopback import rpc_servers

DATA = Path(__file__).resolve().parents[1] / "data"
QWEN = f"config://{DATA / 'configs' / 'qwen36-27b.json'}"
REPORTS: dict[str, dict[str, Any]] = parse_toml((DATA / "by_hand.toml").read_text("utf-8"))
SAME = 1.01


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with RememberingWorker() as worker:
        yield worker


@named_cases(*((name, *row) for name, row in REPORTS["by_hand"].items()))
def test_none_is_faster(model: str, asked: dict[str, Any], by_hand: dict[str, Any], worker: Worker) -> None:
    model = model.replace("QWEN", QWEN)
    plan = fitter.fit(model, **asked, worker=worker)
    other = fitter.fit(model, **asked, **by_hand, worker=worker)
    assert plan.fits and plan.estimate is not None
    # what else a plan may choose is chosen in both
    assert other.fits and other.estimate is not None
    assert plan.estimate.seconds <= SAME * other.estimate.seconds


def test_a_tensor_where_it_is_ends_the_pipeline(worker: Worker) -> None:
    model, asked, _ = REPORTS["by_hand"]["all layers on two cards, no room for the pipeline"]
    model = model.replace("QWEN", QWEN)
    plan = fitter.fit(model, **asked, worker=worker)
    (override,) = plan.params.tensor_buft_overrides
    assert override.buffer_type == "CUDA1" and plan.params.n_gpu_layers == plan.n_layer + 1
    assert any("pipeline" in note and override.pattern in note for note in plan.notes)
    assert not any("pipeline" in note for note in fitter.fit(model, **{**asked, "n_ctx": 8192}, worker=worker).notes)


@named_cases(
    ("30 GFLOP/s", 3e10), ("50 GFLOP/s, where flash attention is lost on the way", 5e10), ("100 GFLOP/s", 1e11)
)
def test_layers_on_none_of_the_users_slow_devices(compute: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # a server that computes with a processor, and its network: CUDA0 and CUDA1 have all layers
    measured = bandwidth.remote_speeds

    def speeds(*words: Any, **more: Any) -> dict[str, DeviceSpeed]:
        found = measured(*words, **more)
        return {name: replace(each, bandwidth=20e9, compute=compute, pcie=4e8) for name, each in found.items()}

    monkeypatch.setattr(bandwidth, "remote_speeds", speeds)
    asked: dict[str, Any] = {"gpus": "2x rtx-3090", "n_ctx": 32768, "n_seq_max": 1, "rpc_bandwidth": "20GB/s"}
    with rpc_servers.servers(1) as endpoints:
        asked |= {"rpc": endpoints, "devices": ["RPC0", "CUDA0", "CUDA1"]}
        plan = fitter.fit("shape://glm-4.5-air", **asked)
        by_hand = fitter.fit("shape://glm-4.5-air", **asked, tensor_split=[0, 17, 30])
    assert plan.fits and by_hand.fits and plan.estimate is not None and by_hand.estimate is not None
    assert plan.params.tensor_split is not None and plan.params.tensor_split[0] == 0
    assert plan.params.devices == ("RPC0", "CUDA0", "CUDA1")
    assert plan.estimate.seconds <= SAME * by_hand.estimate.seconds


@named_cases(*((name, *row) for name, row in REPORTS["idle"].items()))
def test_idle_devices(shape: str, asked: dict[str, Any], devices: list[str], notes: list[str], worker: Worker) -> None:
    plan = fitter.fit(f"shape://{shape}", **{"n_seq_max": 1, **asked}, worker=worker)
    assert plan.params.devices == tuple(devices)
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
