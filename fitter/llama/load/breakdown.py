"""llama.cpp's report about a model and a context, from a dummy load or a real one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.types import Breakdown, ModelInfo, Row

MAX_ROWS = 1024

_GIVEN_UP = re.compile(r"([^/]*\.cpp:\d+: .*)$")
"""Where in its source ggml gave up, and why."""


def breakdown_of(context: Any) -> Breakdown:
    """Read the memory of a context, from a dummy load or a real one.

    Args:
        context: Its address, or ``llama_cpp``'s pointer to it, such as ``llama._ctx.ctx`` of a ``Llama``.

    Raises:
        LlamaCppError: llama.cpp does not report its memory.
    """
    library = native.libraries()
    pointer = library.pointer(context)
    rows = library.ffi.new("fitter_row_t[]", MAX_ROWS)
    # call it once, because a recording device records each queried size
    count = library.fitter.fitter_breakdown(pointer, rows, MAX_ROWS)
    if not 0 <= count <= MAX_ROWS:
        why = library.last_error()
        if given_up := _GIVEN_UP.search(why):
            raise LlamaCppError(
                "llama.cpp cannot split the tensors of this model over these devices, and would end with "
                f"'{given_up[1]}': use --split-mode layer, other devices, another --tensor-split, or overrides (-ot) "
                "of all feed-forward weights of a layer"
            )
        raise LlamaCppError(f"llama.cpp does not report the memory of a context: {why}")
    llama = library.llama
    return Breakdown(
        rows=rows_of(library, rows[0:count]),
        devices=_context_devices(library, pointer),
        n_ctx=int(llama.llama_n_ctx(context)),
    )


def rows_of(library: native.Library, rows: Iterable[Any]) -> tuple[Row, ...]:
    """Convert ``fitter_row_t`` structs."""
    return tuple(
        Row(
            buffer_type=library.text(row.buffer_type) or "",
            device=library.text(row.device),
            is_host=bool(row.is_host),
            model=int(row.model),
            context=int(row.context),
            compute=int(row.compute),
        )
        for row in rows
    )


def _model_devices(library: native.Library, model: Any) -> tuple[str, ...]:
    names: list[str] = []
    while name := library.text(library.fitter.fitter_model_device(library.pointer(model), len(names))):
        names.append(name)
    return tuple(names)


def _context_devices(library: native.Library, context: Any) -> tuple[str, ...]:
    names: list[str] = []
    while name := library.text(library.fitter.fitter_context_device(context, len(names))):
        names.append(name)
    return tuple(names)


def model_info_of(library: native.Library, model: Any) -> ModelInfo:
    out = library.ffi.new("fitter_model_info_t *")
    if not library.fitter.fitter_model_info(library.pointer(model), out):
        raise LlamaCppError(f"llama.cpp does not describe the model: {library.last_error()}")
    return ModelInfo(
        n_layer=int(out.n_layer),
        n_layer_nextn=int(out.n_layer_nextn),
        n_ctx_train=int(out.n_ctx_train),
        n_embd=int(out.n_embd),
        n_head=int(out.n_head),
        n_head_kv=int(out.n_head_kv),
        n_swa=int(out.n_swa),
        n_expert=int(out.n_expert),
        n_vocab=int(out.n_vocab),
        n_params=int(out.n_params),
        bytes=int(out.size),
        has_encoder=bool(out.has_encoder),
        is_recurrent=bool(out.is_recurrent),
        is_hybrid=bool(out.is_hybrid),
        devices=_model_devices(library, model),
    )
