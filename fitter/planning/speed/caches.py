"""Caches in the cost model: sizes of KV caches with other parameters than the recorded ones, and the cache of experts.

The cache of experts on devices (``moe_cache_size``) has the slots, bytes and hit rate of llama.cpp b11549
(``llama_moe_cache``). Its dummy load counts the same bytes; the rules tell them, and the speed, before a load. Bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fitter.llama.types import Layout, LayoutEntry, Params
from fitter.planning.placing.layer_sizes import HOST, cache_layer, is_state
from fitter.planning.speed.cost import ExpertCache, Layer, figures
from fitter.planning.speed.model_facts import ModelFacts, WeightFacts, in_layer

# bytes of an element of a KV cache: ggml's block size over its length
CACHE_BYTES = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "iq4_nl": 18 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
}


def cells_of(n_ctx: int, params: Params, window: int = 0, ratio: int = 0) -> int:
    """Compute the cells of a layer's KV cache.

    Args:
        n_ctx: The context.
        params: Parameters that decide the cache.
        window: Tokens of the layer's sliding window; 0 without.
        ratio: Tokens that share a row of the cache; 0 for a row of each.
    """
    streams = 1 if params.kv_unified else params.n_seq_max
    per_stream = _padded(-(-n_ctx // streams))
    if ratio:
        return _padded(-(-per_stream // ratio)) * streams
    if not window or params.swa_full:
        return per_stream * streams
    # llama_kv_cache_iswa: a sliding window's layers have cells for it and for one micro batch
    wanted = window * (params.n_seq_max if params.kv_unified else 1) + params.n_ubatch
    return _padded(min(per_stream, wanted)) * streams


def resized(
    layout: Layout,
    window: int,
    windowed: Collection[int],
    before: Params,
    after: Params,
    compressed: Sequence[int] = (),
) -> Layout:
    """Estimate a layout with other parameters: caches by their cells and types, states by the sequences.

    Args:
        layout: Recorded with ``before``, at its own context.
        window: Tokens of a sliding window.
        windowed: Indices of the layers that have it.
        before: The parameters of the record.
        after: Parameters with another context, type of cache or number of sequences.
        compressed: For each layer, how many tokens share a row of all but its first cache, which has the window.
    """

    @functools.cache
    def growth(window: int, ratio: int) -> float:
        return cells_of(after.n_ctx, after, window, ratio) / cells_of(layout.n_ctx, before, window, ratio)

    seen: set[str] = set()
    types = ((before.type_k, after.type_k), (before.type_v, after.type_v))
    entries = []
    for entry in layout.entries:
        if entry.kind == "context":
            if is_state(entry.name):
                size = entry.bytes * after.n_seq_max // before.n_seq_max
            else:
                layer = cache_layer(entry.name, -1)
                ratio = compressed[layer] if 0 <= layer < len(compressed) and entry.name in seen else 0
                is_windowed = layer in windowed or (bool(compressed) and not ratio)
                seen.add(entry.name)
                more = growth(window if is_windowed else 0, ratio)
                old, new = types[entry.name.startswith("cache_v")]
                size = round(entry.bytes * more * CACHE_BYTES.get(new, 2) / CACHE_BYTES.get(old, 2))
            entry = LayoutEntry(entry.buffer_type, entry.name, entry.kind, size)
        entries.append(entry)
    return replace(layout, entries=tuple(entries), n_ctx=after.n_ctx)


def _padded(cells: int) -> int:
    """Round the cells of a KV cache up, as llama.cpp does."""
    return -(-cells // 256) * 256


ALIGNMENT = 128
"""Alignment of CUDA's buffers. Another one changes some bytes of a cache, and no slot of a real size."""

_CACHED = frozenset(f"ffn_{part}_exps.weight" for part in ("gate_up", "gate", "up", "down"))


class Experts(NamedTuple):
    """The experts of a layer that is cached: its index, its device, and for each tensor the type and bytes."""

    layer: int
    device: int
    tensors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ExpertGroup:
    """Layers of one device whose experts have the same types and sizes: they share slots.

    Attributes:
        device: Index of the device.
        layers: Indices of the layers.
        n_slots: Experts that the slots hold; 0 where the budget is too small for one token.
        bytes: Bytes on the device.
        share: Slots by experts of all its layers.
    """

    device: int
    layers: tuple[int, ...]
    n_slots: int
    bytes: int
    share: float


def cached_tensors(tensors: Sequence[WeightFacts]) -> tuple[tuple[str, int], ...]:
    """Return type and bytes of a layer's tensors that the cache is for."""
    return tuple((each.type, each.bytes) for each in tensors if in_layer(each.name) in _CACHED)


def experts_on_host(facts: ModelFacts, layers: Sequence[Layer]) -> list[Experts]:
    """List the layers on devices that have all of their experts on the host."""
    found = []
    for index, (layer, known) in enumerate(zip(layers, facts.layers, strict=False)):
        places = {weights.place for weights in layer.weights if weights.experts}
        if layer.home != HOST and places == {HOST} and (tensors := cached_tensors(known.tensors)):
            found.append(Experts(index, layer.home, tensors))
    return found


def groups_of(
    layers: Sequence[Experts], size: int, shares: Sequence[float], n_expert: int, n_expert_used: int, alignment: int
) -> list[ExpertGroup]:
    """Compute the groups of layers and their slots.

    Args:
        layers: The layers that are cached.
        size: ``moe_cache_size``.
        shares: Each device's share of it, which only devices with such layers take (``tensor_split``).
        n_expert: Experts of a layer.
        n_expert_used: Experts that a token uses.
        alignment: Alignment of the devices' buffers.
    """
    members: dict[tuple[int, tuple[tuple[str, int], ...]], list[int]] = {}
    for each in layers:
        members.setdefault((each.device, each.tensors), []).append(each.layer)
    host_bytes: dict[int, int] = {}
    for (device, tensors), indices in members.items():
        host_bytes[device] = host_bytes.get(device, 0) + len(indices) * sum(each for _, each in tensors)
    total = sum(shares[device] for device in host_bytes)
    groups = []
    for (device, tensors), indices in members.items():
        of_group = len(indices) * sum(each for _, each in tensors)
        split = shares[device] / total if total else 1 / len(host_bytes)
        budget = int(size * split * of_group / host_bytes[device])
        n_slots = _most_slots([each // n_expert for _, each in tensors], budget, len(indices) * n_expert, alignment)
        if n_slots < n_expert_used:
            n_slots = 0
        used = _bytes([each // n_expert for _, each in tensors], n_slots, alignment) if n_slots else 0
        groups.append(ExpertGroup(device, tuple(indices), n_slots, used, n_slots / (len(indices) * n_expert)))
    return groups


def _bytes(experts: Sequence[int], n_slots: int, alignment: int) -> int:
    # kernels may read beyond the last slot, so there is one more
    return sum(-(-each * (n_slots + 1) // alignment) * alignment for each in experts)


def _most_slots(experts: Sequence[int], budget: int, most: int, alignment: int) -> int:
    n_slots = min(most, max(0, budget // max(1, sum(experts)) - 1))
    while n_slots and _bytes(experts, n_slots, alignment) > budget:
        n_slots -= 1
    return n_slots


def least_size(facts: ModelFacts, alignment: int = ALIGNMENT) -> int:
    """Compute the least ``moe_cache_size`` that has slots for the experts of one token, if a layer has it alone.

    0 for a model without experts.
    """
    if not facts.n_expert:
        return 0
    sizes = [
        _bytes([size // facts.n_expert for _, size in tensors], facts.n_expert_used, alignment)
        for layer in facts.layers
        if (tensors := cached_tensors(layer.tensors))
    ]
    return min(sizes, default=0)


def hit_rate(share: float) -> float:
    """Estimate how often a token finds an expert in the cache.

    Args:
        share: Slots by experts. Uniform routing finds as large a share; real routing comes back to the same experts
            (``experts.half`` of ``cost.toml``).
    """
    half: float = figures()["experts"]["half"]
    share = min(1.0, share)
    return share * (1 + half) / (share + half)


def pays_on(kinds: Collection[str]) -> bool:
    """Whether published speeds show that a cache of experts can pay on devices of these ``kinds``."""
    return set(kinds) <= set(figures()["experts"]["kinds"])


def with_cache(
    facts: ModelFacts, layers: tuple[Layer, ...], size: int, of_devices: Sequence[float]
) -> tuple[Layer, ...]:
    """Return ``layers`` with the experts that are cached on a device marked as such.

    ``of_devices``: each device's share of the cache, as for ``groups_of``.
    """
    groups = groups_of(experts_on_host(facts, layers), size, of_devices, facts.n_expert, facts.n_expert_used, ALIGNMENT)
    shares: Mapping[int, float] = {index: group.share for group in groups for index in group.layers}
    made: dict[tuple[int, float], Layer] = {}
    found = list(layers)
    for index, share in shares.items():
        layer = layers[index]
        # equal layers stay one object, which is priced once
        if (key := (id(layer), share)) not in made:
            cache = ExpertCache(layer.home, hit_rate(share), figures()["experts"]["spared"] * share)
            weights = (replace(each, cache=cache) if each.experts and share else each for each in layer.weights)
            made[key] = replace(layer, weights=tuple(weights))
        found[index] = made[key]
    return tuple(found)
