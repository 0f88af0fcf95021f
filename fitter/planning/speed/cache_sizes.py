"""Sizes of KV caches: cells, bytes of an element, and estimated sizes with other parameters than the recorded ones."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from fitter.llama.types import Layout, LayoutEntry, Params
from fitter.planning.placing.layer_sizes import cache_layer, is_state

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
