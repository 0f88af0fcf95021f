"""Split mode ``tensor``: every device has a part of every tensor, and all compute at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fitter.errors import LibraryError
from fitter.llama.build import library as native
from fitter.llama.build.layouts import data
from fitter.llama.types import Params


def check_build(library: native.Library, params: Params) -> None:
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
