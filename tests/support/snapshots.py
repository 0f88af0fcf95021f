"""Snapshots of made-up cases, for the tests of what compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fitter.llama.types import Params, TensorBuftOverride
from fitter.regression.lockfile import LockedDevice, LockedHost, LockedModel, LockedSpeed, Memory, Snapshot

GIB = 2**30
MIB = 2**20

MODEL = LockedModel(
    file="a.gguf",
    name='A "model"',
    architecture="llama",
    bytes=4 * GIB,
    header="sha256:00",
    header_bytes=(1000, 200),
    file_bytes=(3 * GIB, GIB),
    tensors={"blk.*.ffn_up.weight": "q4_K 0-3", "output.weight": "q6_K"},
)

SNAPSHOT = Snapshot(
    fits=True,
    n_ctx=8192,
    fitter="0.1.0",
    llama_cpp="0.5.0 (ggml 0.25.3, commit 0c1e57098)",
    settings={"gpu": ("24GiB",), "n_ubatch": 512, "tensor_split": (3.0, 1.0), "kv_unified": True},
    model=MODEL,
    params=Params(
        n_ctx=8192,
        n_gpu_layers=33,
        tensor_split=(3.0, 1.0),
        tensor_buft_overrides=(TensorBuftOverride(r"blk\.1\.", "CPU"),),
        devices=("CUDA0",),
    ),
    devices={"CUDA0": LockedDevice("virtual", 24 * GIB, 23 * GIB, GIB, {"CUDA0": Memory(4 * GIB, GIB, 256 * MIB)})},
    host=LockedHost(GIB, None, {"CPU": Memory(100 * MIB, 0, 0), "CUDA_Host": Memory(0, 0, 16 * MIB)}),
    estimate=LockedSpeed(1000.0, 50.0),
)


def with_memory(snapshot: Snapshot, **more: int) -> Snapshot:
    """``snapshot`` with so much more of ``model``, ``context`` or ``compute`` on its device."""
    device = snapshot.devices["CUDA0"]
    old = device.memory["CUDA0"]
    new = Memory(*(getattr(old, kind) + more.get(kind, 0) for kind in ("model", "context", "compute")))
    return replace(snapshot, devices={"CUDA0": replace(device, memory={"CUDA0": new})})


def with_model(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """``snapshot`` of a model that differs in ``changes``."""
    return replace(snapshot, model=replace(snapshot.model, **changes))
