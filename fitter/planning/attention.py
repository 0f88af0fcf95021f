"""What attending to cached tokens takes in each layer, from the caches that llama.cpp asked for and the header."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fitter.llama.types import Array, Layout, MetadataValue
from fitter.planning.cost import Attention

_CACHE = re.compile(r"cache_([kv])_l(\d+)")

_BITS = {"f32": 32.0, "bf16": 16.0, "f16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0}
_SMALLEST = 4.5
"""Bits of ``q4_0`` and ``iq4_nl``; with the others all types that llama.cpp takes for a cache (ggml-common.h)."""

_PLAIN = ("f32", "bf16", "f16")


def attentions(
    layout: Layout,
    metadata: Mapping[str, MetadataValue],
    n_layer: int,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attn: bool = True,
) -> tuple[Attention | None, ...]:
    """One for each of ``n_layer`` layers; ``None`` for a layer without a KV cache, as recurrent ones are.

    ``layout`` was recorded with those cache types. A layer whose cache has fewer cells than the context sees as far
    back as the model's sliding window.
    """
    caches: dict[tuple[str, int], int] = {}
    for entry in layout.entries:
        if entry.kind == "context" and (match := _CACHE.match(entry.name)):
            cache = (match[1], int(match[2]))
            caches[cache] = caches.get(cache, 0) + entry.bytes
    quantized = type_k not in _PLAIN or type_v not in _PLAIN
    prefix = str(metadata.get("general.architecture", ""))
    n_embd = _number(metadata.get(f"{prefix}.embedding_length"), 0)
    found: list[Attention | None] = []
    for layer in range(n_layer):
        k, v = caches.get(("k", layer), 0), caches.get(("v", layer), 0)
        heads = _number(metadata.get(f"{prefix}.attention.head_count"), layer)
        if not k or not heads:
            found.append(None)
            continue
        kv_heads = _number(metadata.get(f"{prefix}.attention.head_count_kv"), layer) or heads
        key = _number(metadata.get(f"{prefix}.attention.key_length"), layer) or n_embd // heads
        value = _number(metadata.get(f"{prefix}.attention.value_length"), layer) or n_embd // heads
        cells = k * 8 / (kv_heads * key * _BITS.get(type_k, _SMALLEST)) if key else layout.n_ctx
        window = _number(metadata.get(f"{prefix}.attention.sliding_window"), layer)
        short = bool(window) and cells < layout.n_ctx
        found.append(
            Attention(
                kv_bytes=(k + v) / cells,
                flops=2.0 * heads * (key + value),
                # without V the heads share one latent vector
                sharing=heads / kv_heads if v else 1.0,
                window=window if short else 0,
                quantized=quantized,
                flash=flash_attn,
            )
        )
    return tuple(found)


def _number(value: MetadataValue | None, layer: int) -> int:
    """The number of a key that has one for all layers, or one for each; 0 where it is missing."""
    if isinstance(value, Array):
        value = value.values[layer] if layer < len(value.values) else 0
    return int(value) if isinstance(value, (int, float)) else 0
