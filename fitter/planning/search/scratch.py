"""What ggml-cuda takes while it computes attention without flash attention, which llama.cpp does not count. Bytes.

For cuBLAS it converts the attention of a whole micro batch to all cells in use to 16 bits, in memory of its own that it
keeps. At a long context that is gigabytes: half as much again as the scores in the compute buffer, which are counted.
"""

from __future__ import annotations

from functools import cache

from fitter.llama.types import Breakdown, Params
from fitter.planning.request.request import Request
from fitter.planning.speed.work import LayerFacts
from fitter.storage.data_files import read_data
from fitter.text import MIB

_BACKENDS = ("CUDA", "ROCm")
"""What the default buffer types of ggml-cuda begin with, on NVIDIA's and AMD's cards."""


@cache
def _figures() -> dict[str, int]:
    return read_data(__file__)


def others() -> int:
    """What else is taken beyond the count on a card that computes so."""
    return _figures()["others_mib"] * MIB


def scores_of(request: Request, params: Params, breakdown: Breakdown) -> dict[str, int]:
    """By the name of each device that computes attention so, the most that it converts to 16 bits at once.

    Empty with flash attention, and where the cache of V has 32 bits, which are multiplied as they are.
    """
    if breakdown.flash_attn is not False or params.type_v == "f32" or request.facts is None:
        return {}
    n_streams = 1 if params.kv_unified else params.n_seq_max
    n_tokens, n_cells = min(params.n_ubatch, params.n_batch), breakdown.n_ctx // n_streams
    window = 0 if params.swa_full else request.facts.window

    def cells(layer: LayerFacts) -> int:
        return min(n_cells, window + n_tokens) if layer.is_windowed and window else n_cells

    scores = max((layer.n_head * cells(layer) for layer in request.facts.layers), default=0) * n_tokens
    return {
        device.name: scores * _figures()["bytes_per_score"]
        for device in request.devices
        if device.buffer_type.startswith(_BACKENDS) and breakdown.on(device.name).context
    }
