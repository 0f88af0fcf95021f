"""Placements of a model with experts on three cards: for loads that answer for several of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fitter.llama.types import Params, TensorBuftOverride

GPUS = ["4GiB", "cuda:8.6:6GiB", "3GiB"]
ALL = ("CUDA0", "CUDA1", "CUDA2")
HOST = (TensorBuftOverride("^blk.(1|7|30).ffn_(up|down)_exps.weight$", "CPU"),)
BOTH = (*HOST, TensorBuftOverride("^blk.9.ffn_gate_exps.weight$", "CUDA2"))


def params(
    devices: tuple[str, ...] = ALL,
    split: tuple[float, ...] | None = (20.0, 20.0, 9.0),
    overrides: tuple[TensorBuftOverride, ...] = HOST,
    **more: Any,
) -> Params:
    """Return the parameters of a load of qwen3-30b-a3b, all of whose layers are on these devices."""
    whole = Params(n_ctx=4096, n_gpu_layers=49)
    return replace(whole, devices=devices, tensor_split=split, tensor_buft_overrides=overrides, **more)


PLACED = {
    "layers shared out": params(),
    "another split": params(split=(3.0, 40.0, 6.0)),
    "a device without a layer": params(split=(20.0, 0.0, 29.0)),
    "an override to a device": params(overrides=BOTH),
    "devices in another order": params(("CUDA1", "CUDA2", "CUDA0"), (8.0, 30.0, 11.0), BOTH),
    "fewer devices": params(("CUDA0", "CUDA2"), (30.0, 19.0)),
    "one device": params(("CUDA1",), (1.0,)),
    "all layers, in llama.cpp's words": params(n_gpu_layers=-1),
    "another context": params(n_ctx=16384, type_k="q8_0", n_ubatch=256),
}
"""Placements that one load can take on after the other."""

OTHERS = {
    "no override": params(overrides=()),
    "fewer layers": params(n_gpu_layers=30, split=(10.0, 10.0, 10.0)),
    "shares that are no numbers of layers": params(split=(0.5, 0.25, 0.25)),
    "shares by free memory": params(split=None),
    "no device": params((), None, ()),
}
"""Placements that need a load of their own."""
