"""Count the allocations of llama.cpp's libraries, with or without real memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.load.breakdown import MAX_ROWS, rows_of
from fitter.llama.types import Row


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
