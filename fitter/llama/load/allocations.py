"""Counting what llama.cpp's libraries allocate, with or without really allocating it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.load.breakdown import MAX_ROWS, rows_of
from fitter.llama.types import Row


class Allocations:
    """``rows``: what was allocated, by buffer type, once ``counted`` has ended. Rows of the host have no device.

    Real allocations are all counted as model bytes. Others are the peak, with compute buffers counted separately.
    """

    rows: tuple[Row, ...] = ()


@contextmanager
def counted(really: bool = False) -> Iterator[Allocations]:
    """Count the buffers that are allocated on ggml's devices inside the ``with`` block.

    Unless ``really`` is true, each buffer is only a range of addresses without memory, which must not be written to.
    What was loaded inside the block can be freed after it. Only one block at a time.
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
    """Make host buffers that are allocated inside the ``with`` block take no memory until they are written to.

    Writing zeros does not count. They can be freed after the block. Only one block at a time, and never for a load that
    computes. In a worker process, a KV cache with ``n_cells`` cells per stream takes little memory for its cells too.
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
