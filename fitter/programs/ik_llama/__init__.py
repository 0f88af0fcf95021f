"""ik_llama.cpp, a fork of llama.cpp: what its server sets and lacks, and how it cuts layers over devices: by bytes.

Its count of a layer has all weights, wherever ``-ot`` puts them, and the layer's cache; each device has a compute
buffer beside them. Re-stated from src/llama.cpp at commit 8337e4c: ``get_layer_sizes`` and ``llm_load_tensors``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fitter.errors import UsageError
from fitter.llama.types import Params, TensorInfo
from fitter.model.header import Model
from fitter.model.tensors import Role, layer_of, role_of
from fitter.programs.facts import RULES, Facts
from fitter.programs.llama_server import LlamaServer
from fitter.programs.program import Asked, Attempt, Words
from fitter.storage import read_data
from fitter.text import MIB

_RULES = read_data(__file__, RULES)["rules"]

_AMB: int = _RULES["attn_max_batch"]
"""MiB of attention's work at a time (``-amb``)."""

_BLOCKS = {"f32": 4.0, "f16": 2.0, "bf16": 2.0}
"""Bytes of an element of types that are not quantized."""

_Q8_0 = 34 / 32
"""Bytes of an element of q8_0, to which it turns other types for the tensor that it computes of two."""


class IkLlama(LlamaServer):
    """ik_llama.cpp's server: its slots divide one cache, in which sliding windows keep every token."""

    name: ClassVar[str] = "ik_llama"
    title: ClassVar[str] = "ik_llama.cpp"
    lacks: ClassVar[Mapping[str, str]] = {
        "moe_cache_size": "leave it out",
        "split_mode": "plan with -sm layer; its own -sm graph splits tensors too, but no plan can be made for that",
        "kv_unified": "each slot has its part of the context; -np 1 gives it to one",
    }
    knows: ClassVar[frozenset[str]] = frozenset({"cache_ram", "checkpoint_min_step", "ctx_checkpoints", "spec_type"})

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        return 0

    def of_model(self, model: Model, words: Mapping[str, Any]) -> Words:
        if model.architecture not in _RULES["architectures"]:
            raise UsageError(f"ik_llama.cpp loads no {model.architecture} models: plan for llama-server")
        return {"swa_full": True}

    def attempts(self, model: Model, free: Mapping[str, int], words: Mapping[str, Any]) -> list[list[Attempt]]:
        """List plans with the output on a device only beside all layers, or where it is a tensor that ``-ot`` moves."""
        n_units = model.n_layer + 1
        is_apart = any(tensor.name == "output.weight" for tensor in model.tensors)
        layers = {0, n_units, *(range(2, n_units) if is_apart else ())}
        plans = [Attempt({}, layers)]
        if "n_gpu_layers" not in words and free:
            on_host = [{"n_gpu_layers": -1, "offload_kqv": False}] if "offload_kqv" not in words else []
            plans += map(Attempt, [{"n_gpu_layers": -1}, *on_host, {"n_gpu_layers": 0}])
        if not words.get("mmproj") or "mmproj_device" in words or not free:
            return [plans]
        # it computes images on the first device of all, or on the host
        places = next(iter(free)), "none"
        return [[Attempt({**each.words, "mmproj_device": place}, each.layers) for place in places for each in plans]]

    def split(
        self, model: Model, params: Params, caches: Callable[[], Sequence[int]], counts: Sequence[int]
    ) -> Sequence[float] | None:
        first, counts = model.n_layer + 1 - sum(counts), list(counts)
        if first > 0 and any(counts):
            # without all layers its -ts leaves the output out
            last = max(device for device, count in enumerate(counts) if count)
            counts[last] -= 1
        return shares(layer_sizes(model, params, caches()), first, counts)

    def more(self, model: Model) -> Mapping[int, int]:
        return computed_weights(model)


@dataclass(frozen=True)
class LayerSizes:
    """Its count of a model: each layer, the output as the last one, and a compute buffer of one device."""

    layers: tuple[float, ...]
    compute: float


def layer_sizes(model: Model, params: Params, caches: Sequence[int]) -> LayerSizes:
    """Count a model as it does, with ``caches`` as the bytes of each layer's cache."""
    number = model.n_layer
    loaded = number if params.load_mtp else number - model.n_layer_nextn
    by_layer: list[list[TensorInfo]] = [[] for _ in range(number)]
    for tensor in model.tensors:
        if (index := layer_of(tensor.name)) is not None and tensor.name.startswith("blk.") and index < loaded:
            by_layer[index].append(tensor)
    sizes = [float(sum(tensor.bytes for tensor in tensors)) for tensors in by_layer]
    used = model.number("expert_used_count")
    compute = max(_compute(tensors, params, model.number("embedding_length"), used) for tensors in by_layer)
    for index, tensors in enumerate(by_layer):
        named = {tensor.name.split(".", 2)[2]: tensor for tensor in tensors}
        if {"attn_k_b.weight", "attn_v_b.weight"} <= named.keys():
            key, value = named["attn_k_b.weight"], named["attn_v_b.weight"]
            compute = max(compute, _attention(value, params.n_ctx))
            if "attn_kv_b.weight" not in named:
                rows = (value.shape[1] + key.shape[1]) * value.shape[2]
                sizes[index] += _element(key.type) * value.shape[0] * rows * 2
    ends = {tensor.name: tensor.bytes for tensor in model.tensors}
    output = float(ends.get("output.weight") or ends.get("token_embd.weight", 0))
    if model.architecture == "gemma4":
        output += sum(ends.get(f"per_layer_{name}.weight", 0) for name in ("token_embd", "model_proj", "proj_norm"))
    output += max(0.0, model.n_vocab * params.n_ubatch * 4 - compute)
    return LayerSizes((*(size + cache for size, cache in zip(sizes, caches, strict=True)), output), compute)


def _compute(tensors: Iterable[TensorInfo], params: Params, n_embd: int, used: int) -> float:
    """Count the compute buffer of a layer: of all its feed-forward results, and its input."""
    sums: dict[Role, int] = {}
    has_norm = False
    for tensor in tensors:
        role = role_of(tensor.name)
        has_norm |= role is Role.NORM
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1:
            sums[role] = sums.get(role, 0) + tensor.shape[1]
    most = max(sums.get(Role.EXPERT, 0) * used, sums.get(Role.SHARED_EXPERT, 0), sums.get(Role.FFN, 0))
    return (most + n_embd * (1 + has_norm)) * params.n_ubatch * 4.0


def _attention(value: TensorInfo, n_ctx: int) -> float:
    """Count the keys and values that latent attention computes at once, for as many heads as ``-amb`` allows."""
    rows, n_head = value.shape[1], value.shape[2]
    whole = 2 * rows * n_head * n_ctx * 4 / MIB
    heads = n_head
    if whole > _AMB:
        parts = (n for n in range(2, n_head) if n_head % n == 0 and whole / n <= _AMB)
        heads = n_head // next(parts, n_head)
    return 2.0 * rows * heads * n_ctx * 4


def _element(name: str) -> float:
    return _BLOCKS.get(name, _Q8_0)


def computed_weights(model: Model) -> Mapping[int, int]:
    """Return, by layer, the bytes of the tensor that it computes of ``attn_k_b`` and ``attn_v_b`` where they are.

    It is made when the model is loaded, where ``attn_k_b`` is, and no other program has it (``llm_prepare_mla``).
    """
    shapes = {tensor.name: tensor for tensor in model.tensors}
    found = {}
    for index in range(model.n_layer):
        key, value = (shapes.get(f"blk.{index}.attn_{name}_b.weight") for name in ("k", "v"))
        if key is not None and value is not None and f"blk.{index}.attn_kv_b.weight" not in shapes:
            rows = (key.shape[0] + value.shape[1]) * value.shape[2]
            found[index] = int(_element(key.type) * value.shape[0] * rows)
    return found


def shares(sizes: LayerSizes, first: int, counts: Sequence[int]) -> tuple[float, ...] | None:
    """Return the ``-ts`` with which it cuts layers from ``first`` on into ``counts``; ``None`` where none does.

    A device's share is what it counts there, in MiB, or in bytes for a small model: then each boundary has half a layer
    on both sides as a tolerance.
    """
    taken, start = [], first
    for count in counts:
        taken.append(sizes.compute + sum(sizes.layers[start : start + count]))
        start += count
    for unit in (MIB, 1):
        split = tuple(float(round(size / unit)) for size in taken)
        if any(split) and cut(split, sizes, first, start) == list(counts):
            return split
    return None


def cut(split: Sequence[float], sizes: LayerSizes, first: int, stop: int) -> list[int]:
    """Return the layers of each device, from ``first`` to before ``stop``, with the ``-ts`` of ``split``."""
    reached, points = 0.0, []
    for share in split:
        points.append(reached := _single(reached + share))
    total = sizes.compute * len(split) + sum(sizes.layers[first:stop])
    loaded, index, counts = 0.0, first, []
    for point in points:
        loaded, start = _single(loaded + sizes.compute), index
        limit = _single(_single(point / reached) * total)
        while index < stop:
            after = loaded + sizes.layers[index]
            is_within = after <= limit
            if not is_within and after - limit >= limit - loaded:
                break
            loaded, index = _single(after), index + 1
            if not is_within:
                break
        counts.append(index - start)
    # a layer that is left is on the last device
    counts[-1] += stop - index
    return counts


def _single(number: float) -> float:
    """Round to the numbers of C++'s ``float``, in which it adds."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


PROGRAMS = (IkLlama(),)
