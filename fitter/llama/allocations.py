"""What llama.cpp's libraries allocate, counted while they do it, or in place of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from fitter.errors import LlamaCppError
from fitter.llama import library as native
from fitter.llama.breakdown import MAX_ROWS, rows_of
from fitter.llama.types import Row


class Allocations:
    """``rows`` is what was allocated, by buffer type, once ``counted`` has ended. Those of the host have no device.

    Of what is really allocated it is all, as model bytes; else the most at once, with compute apart.
    """

    rows: tuple[Row, ...] = ()


@contextmanager
def counted(really: bool = False) -> Iterator[Allocations]:
    """Count the buffers that ggml's devices are asked for meanwhile.

    Unless ``really``, none is allocated: each is a range of addresses that nothing is written to. What is loaded
    meanwhile can be freed afterwards. Not for two at once.
    """
    library, backend = native.load(), native.open_backend()
    found = Allocations()
    if not backend.fitter_allocations_begin(really):
        raise LlamaCppError("allocations are being counted already")
    try:
        yield found
    finally:
        backend.fitter_allocations_end()
        rows = library.ffi.new("fitter_row_t[]", MAX_ROWS)
        count = min(backend.fitter_allocations_rows(rows, MAX_ROWS), MAX_ROWS)
        if count < 0:
            why = library.text(backend.fitter_virtual_error())
            raise LlamaCppError(f"what was allocated cannot be counted: {why}")
        found.rows = rows_of(library, rows[0:count])


@contextmanager
def untouched(n_cells: int = 0) -> Iterator[None]:
    """Let buffers of host memory that are made meanwhile take none until something other than zeros is in them.

    They can be freed afterwards. Not for two at once, and never for a load that computes. Nor do cells of a KV cache
    take much, where it has ``n_cells`` for each of its streams, and this process was made for planning.
    """
    backend, cells = native.open_backend(), native.cells()
    if not backend.fitter_host_untouched_begin():
        raise LlamaCppError("host memory is replaced already")
    if cells is not None:
        cells.fitter_cells_begin(ctypes.c_uint64(n_cells))
    try:
        yield
    finally:
        if cells is not None:
            cells.fitter_cells_end()
        backend.fitter_host_untouched_end()
