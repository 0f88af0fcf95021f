"""Scratch memory of ggml-cuda for attention without flash attention, which llama.cpp does not count. Bytes.

For cuBLAS it converts the attention scores of a whole micro batch and all cells in use to 16 bits, in memory that it
never frees. At a long context that is gigabytes: half the size of the scores in the compute buffer, which llama.cpp
counts. ``load_reserve`` reserves it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.request.request import Request
from fitter.planning.speed.model_facts import LayerFacts
from fitter.storage import read_data
from fitter.text import MIB

_ROW = "not counted"
"""Buffer type of rows of scratch memory."""

_BACKENDS = ("CUDA", "ROCm")
"""Prefixes of ggml-cuda's default buffer types, on NVIDIA's and AMD's cards."""


@cache
def _figures() -> dict[str, int]:
    return read_data(__file__)


def others() -> int:
    """Return further uncounted bytes on a card that computes attention so."""
    return _figures()["others_mib"] * MIB


def scores_of(request: Request, params: Params, breakdown: Breakdown) -> dict[str, int]:
    """Compute the most bytes that each device converts to 16 bits at once, by its name.

    Empty with flash attention, and with a V cache of 32 bits, which is multiplied without a conversion.
    """
    if breakdown.flash_attn is not False or params.type_v == "f32":
        return {}
    scores = n_scores(request, params, breakdown.n_ctx)
    return {
        device.name: scores * _figures()["bytes_per_score"]
        for device in request.devices
        if device.buffer_type.startswith(_BACKENDS) and breakdown.on(device.name).context
    }


def n_scores(request: Request, params: Params, n_ctx: int) -> int:
    """Count the scores that attention of a layer has for a micro batch, without flash attention."""
    n_streams = 1 if params.kv_unified else params.n_seq_max
    n_tokens, n_cells = min(params.n_ubatch, params.n_batch), n_ctx // n_streams
    window = 0 if params.swa_full else request.facts.window

    def cells(layer: LayerFacts) -> int:
        return min(n_cells, window + n_tokens) if layer.is_windowed and window else n_cells

    return max((layer.n_head * cells(layer) for layer in request.facts.layers), default=0) * n_tokens


def beyond_margins(request: Request, params: Params, breakdown: Breakdown) -> Breakdown:
    """Add to a device's compute buffers the scratch memory that its margin does not hold."""
    margins = {device.name: device.margin for device in request.devices}
    more = {name: size + others() - margins[name] for name, size in scores_of(request, params, breakdown).items()}
    rows = tuple(Row(_ROW, name, False, 0, 0, size) for name, size in more.items() if size > 0)
    return replace(breakdown, rows=(*breakdown.rows, *rows)) if rows else breakdown
