"""``Params`` in llama.cpp's parameter structs."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from fitter.errors import UsageError
from fitter.llama import library as native
from fitter.llama.ahead import TensorBuftOverride, identity
from fitter.llama.devices import Device, Registry, registry, select
from fitter.llama.types import MAX_DEVICES, MAX_USED_DEVICES, Params, Skeleton

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
"""ggml's numbers of the types that llama.cpp's tools accept for a KV cache."""

FLASH_ATTN: dict[str, int] = {"auto": -1, "off": 0, "on": 1}
"""llama.cpp's numbers of its choices about flash attention."""

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_CONTEXT_TYPES = {"default": 0, "mtp": 1}
_UINT32_MAX = 2**32 - 1


MODEL_FIELDS = (
    *("devices", "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "tensor_buft_overrides", "load_mtp"),
)
CONTEXT_FIELDS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "type_k", "type_v", "flash_attn_type", "offload_kqv"),
    *("op_offload", "swa_full", "embeddings", "ctx_type", "n_rs_seq", "n_outputs_max"),
)
"""What ``apply`` writes."""


def apply(params: Params, model_params: Any, context_params: Any, devices: Registry | None = None) -> list[object]:
    """Write ``params`` into llama-cpp-python's two parameter structs.

    Names of devices and buffer types are looked up in ``devices``, by default the real ones of this process; only then
    does ``params.devices`` of ``None`` leave the choice to llama.cpp. Fields that ``Params`` lacks are left alone.

    Returns what the structs point to: keep it as long as the model lives. Raises ``UsageError`` for an unknown name or
    a number out of range.
    """
    known = devices or registry()
    keep: list[object] = []
    _apply_model(params, model_params, known, leave_default=devices is None, keep=keep)
    apply_context(params, context_params)
    return keep


def _apply_model(params: Params, out: Any, known: Registry, leave_default: bool, keep: list[object]) -> None:
    llama_cpp = native.load().llama_cpp
    selected = known.default if params.devices is None else select(params.devices, known)
    _check_count(params, selected)
    if params.devices is not None or not leave_default:
        pointers = (ctypes.c_void_p * (len(selected) + 1))(*(d.address for d in selected), None)
        out.devices = ctypes.cast(pointers, ctypes.c_void_p)
        keep.append(pointers)

    out.n_gpu_layers = _in_range("n_gpu_layers", params.n_gpu_layers, -(2**31), 2**31 - 1)
    out.split_mode = _named("split_mode", params.split_mode, SPLIT_MODES)
    out.main_gpu = _in_range("main_gpu", params.main_gpu, -1, MAX_DEVICES)
    out.load_mtp = params.load_mtp

    if params.tensor_split is not None:
        limit = int(llama_cpp.llama_max_devices())
        if len(params.tensor_split) > limit:
            raise UsageError(f"tensor_split has {len(params.tensor_split)} values; llama.cpp takes at most {limit}")
        split = (ctypes.c_float * limit)(*params.tensor_split)
        out.tensor_split = split
        keep.append(split)

    if params.tensor_buft_overrides:
        overrides = (TensorBuftOverride * (len(params.tensor_buft_overrides) + 1))()
        for entry, (pattern, buffer_type) in zip(overrides, overrides_of(params, known), strict=False):
            entry.pattern, entry.buft = pattern, buffer_type
            keep.append(pattern)
        out.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        keep.append(overrides)


def overrides_of(params: Params, known: Registry) -> list[tuple[bytes, int]]:
    """Pattern and buffer type of every override."""
    buffer_types = {d.buffer_type: d.buffer_type_address for d in known.devices if d.buffer_type is not None}
    found = []
    for override in params.tensor_buft_overrides:
        if override.buffer_type not in buffer_types:
            raise UsageError(
                f"unknown buffer type '{override.buffer_type}'; there are: {', '.join(buffer_types) or 'none'}"
            )
        found.append((override.pattern.encode("utf-8", "surrogateescape"), buffer_types[override.buffer_type]))
    return found


def apply_context(params: Params, out: Any) -> None:
    out.n_ctx = _in_range("n_ctx", params.n_ctx, 0, _UINT32_MAX)
    out.n_batch = _in_range("n_batch", params.n_batch, 1, _UINT32_MAX)
    out.n_ubatch = _in_range("n_ubatch", params.n_ubatch, 1, _UINT32_MAX)
    out.n_seq_max = _in_range("n_seq_max", params.n_seq_max, 1, _UINT32_MAX)
    out.kv_unified = params.kv_unified
    out.type_k = _named("type_k", params.type_k, CACHE_TYPES)
    out.type_v = _named("type_v", params.type_v, CACHE_TYPES)
    out.flash_attn_type = _named("flash_attn", params.flash_attn, FLASH_ATTN)
    out.offload_kqv = params.offload_kqv
    out.op_offload = params.op_offload
    out.swa_full = params.swa_full
    out.ctx_type = _named("ctx_type", params.ctx_type, _CONTEXT_TYPES)
    out.n_rs_seq = _in_range("n_rs_seq", params.n_rs_seq, 0, _UINT32_MAX)
    out.n_outputs_max = _in_range("n_outputs_max", params.n_outputs_max, 0, _UINT32_MAX)
    out.embeddings = params.embeddings


def _check_count(params: Params, selected: tuple[Device, ...]) -> None:
    # GGML_SCHED_MAX_BACKENDS: one more, and llama.cpp aborts.
    if len(selected) > MAX_USED_DEVICES and params.split_mode != "none":
        raise UsageError(
            f"llama.cpp runs a model on {MAX_USED_DEVICES} devices at most beside the CPU; name those to use of the "
            f"{len(selected)} with --device"
        )


def _named(field: str, name: str, numbers: dict[str, int]) -> int:
    if name not in numbers:
        raise UsageError(f"{field} '{name}' is none of {', '.join(numbers)}")
    return numbers[name]


def _in_range(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UsageError(f"{field} {value} is not between {low} and {high}")
    return value


def model_key(path: str | Skeleton, params: Params) -> tuple[object, ...]:
    files = (path,) if isinstance(path, str) else path.files
    return (
        isinstance(path, str),
        *((os.path.abspath(file), identity(file)) for file in files),
        params.devices,
        params.tensor_split,
        params.tensor_buft_overrides,
        params.split_mode,
        params.main_gpu,
        params.load_mtp,
    )
