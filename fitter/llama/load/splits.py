"""Split mode ``tensor``: every tensor in parts, one on each device, which llama.cpp computes with at once."""

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
    """Raise ``LibraryError`` where ``params`` split tensors and nobody has compared what the loaded build takes."""
    if params.split_mode != "tensor":
        return
    ggml, compared = native.loaded_versions(library).ggml, data()["split_tensors"]
    if ggml.split("-")[0] not in compared:
        raise LibraryError(
            f"split mode 'tensor' is planned for ggml {' and '.join(compared)} only, and this llama.cpp has {ggml}: "
            "use --split-mode layer, or plan with the llama-cpp-python that fitter was built for"
        )


@contextmanager
def split_counted(library: native.Library, params: Params, model: Any) -> Iterator[list[Any]]:
    """Count what each device allocates inside the ``with`` block, where ``params`` split tensors over devices.

    ``model`` is that of a context that is made, ``None`` where the model itself is loaded. The list takes what was
    made, whose breakdown then has what was counted.
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
    """Say of a ``model`` without memory that it has none, whatever was counted of one that had its address before."""
    with split_counted(library, params, None) as made:
        made.append(model)


def computed_in(context: Any) -> int:
    """What ``context`` computed with, as the owner of what that allocated."""
    address = context if isinstance(context, int) else ctypes.cast(context, ctypes.c_void_p).value
    return (address or 0) + 1
