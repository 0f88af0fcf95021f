"""The memory of models and contexts: llama.cpp's report about a load, and counted allocations."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fitter.errors import LibraryError, LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.build.layouts import data
from fitter.llama.types import Breakdown, ModelInfo, Params, Row

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


class Allocations:
    """Counted allocations, available after the block of ``counted``.

    Attributes:
        rows: Bytes by buffer type; host rows have no device. Real allocations count as model bytes; others are the
            peak, with compute buffers apart.
    """

    rows: tuple[Row, ...] = ()


@contextmanager
def counted(really: bool = False) -> Iterator[Allocations]:
    """Count the buffers that are allocated on ggml's devices inside the ``with`` block.

    Unless ``really`` is true, each buffer is a range of addresses without memory, which nothing may write to. Models
    that are loaded inside can be freed later. Only one block at a time.
    """
    library, backend = native.libraries(), native.open_backend()
    allocations = Allocations()
    if not backend.fitter_allocations_begin(really):
        raise LlamaCppError("allocations are being counted already")
    try:
        yield allocations
    finally:
        backend.fitter_allocations_end()
        rows = library.ffi.new("fitter_row_t[]", MAX_ROWS)
        count = min(backend.fitter_allocations_rows(rows, MAX_ROWS), MAX_ROWS)
        if count < 0:
            why = library.text(backend.fitter_virtual_error())
            raise LlamaCppError(f"the allocations cannot be counted: {why}")
        allocations.rows = rows_of(library, rows[0:count])


@contextmanager
def untouched(n_cells: int = 0) -> Iterator[None]:
    """Let host buffers that are allocated inside the ``with`` block take memory only when they are written to.

    Writing zeros takes none. The buffers can be freed later. Only one block at a time, and never for a load that
    computes. In a worker, the cells of a KV cache (``n_cells`` per stream) take little memory too.
    """
    backend, cells = native.open_backend(), native.cells()
    if not backend.fitter_host_untouched_begin():
        raise LlamaCppError("another dummy load in this process has not ended")
    if cells is not None:
        cells.fitter_cells_begin(ctypes.c_uint64(n_cells))
    try:
        yield
    finally:
        if cells is not None:
            cells.fitter_cells_end()
        backend.fitter_host_untouched_end()


def check_split_mode(library: native.Library, params: Params) -> None:
    """Raise ``LibraryError`` if ``params`` split tensors and the loaded build's memory was never compared."""
    if params.split_mode != "tensor":
        return
    ggml, compared = native.loaded_versions(library).ggml, data()["split_tensors"]
    if ggml.split("-")[0] not in compared:
        raise LibraryError(
            f"split mode 'tensor' is planned for ggml {', '.join(compared)} only, and this llama.cpp has {ggml}: "
            "use --split-mode layer, or plan with the llama-cpp-python that fitter was built for"
        )


@contextmanager
def split_counted(library: native.Library, params: Params, model: Any) -> Iterator[list[Any]]:
    """Count each device's allocations inside the ``with`` block, if ``params`` split tensors.

    Yields a list for the result, whose breakdown then has the counts.

    Args:
        library: The native libraries.
        params: Parameters of the load.
        model: The model of a context; ``None`` while the model itself is loaded.
    """
    made: list[Any] = []
    if params.split_mode != "tensor":
        yield made
        return
    library.fitter.fitter_split_begin(library.pointer(model or 0))
    try:
        yield made
    finally:
        library.fitter.fitter_split_end(library.pointer(made[0] if made and made[0] else 0))


def takes_nothing(library: native.Library, params: Params, model: Any) -> None:
    """Tell that a ``model`` without memory has none, whatever an earlier model at its address had."""
    with split_counted(library, params, None) as made:
        made.append(model)


def computed_in(context: Any) -> int:
    """Return the owner of the allocations that ``context`` computes with."""
    address = context if isinstance(context, int) else ctypes.cast(context, ctypes.c_void_p).value
    return (address or 0) + 1
