"""The caches of a context: llama.cpp's log names them, and a dummy load records their tensors.

Lines of the log, names and order of tensors are those of ``src/llama-kv-cache*.cpp`` and ``src/llama-memory-*.cpp``;
``llama_kv_cache::state_write_meta`` writes the cells.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.build.functions import backend_api, ggml_version, leaves_out_what_is_masked, position_bytes
from fitter.llama.load.breakdown import model_info_of
from fitter.llama.types import Cache, CacheKind, Caches, CacheTensor

_CELLS = re.compile(r": size = .*\( *(\d+) cells, *(\d+) layers, *\d+/ *(\d+) seqs\)")
_STATES = re.compile(r": size = .*\( *(\d+) cells, *(\d+) layers, *\d+ seqs(?: +\d+ rs_seq)?\)")
_COMPRESSOR = re.compile(
    r": (\w+) ratio = (\d+), state = (\d+) x \d+, streams = (\d+), rs_seq = \d+, layers = (\d+), size = "
)
_MADE = re.compile(r": creating +(.+?) KV cache\b")
_TENSOR = re.compile(
    r"cache_(?P<tag>.*)(?P<part>[kvrs])_l(?P<layer>\d+)|dsv4_(?P<compressor>.+)_state_(?:kv|score)_l\d+"
)

_SWA = "SWA"
_INDEXERS = frozenset({"indexer", "DSV4 lightning-indexer"})
_COMPRESSED = {"DSV4 CSA compressed": "csa", "DSV4 HCA compressed": "hca", "DSV4 lightning-indexer": "lid"}
"""Names of DeepSeek-V4's caches in the log, and of the compressors that fill them."""

PADDED = "padding V cache to"
"""In the log if rows of V have several sizes without flash attention: all are as large as the largest."""

_FULL, _PARTIAL = 0, 1
"""``LLAMA_STATE_SEQ_FLAGS_NONE`` and ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``."""

_MROPE, _IMROPE = 8, 40
"""``llama_rope_type`` of models whose positions have several dimensions."""

_CHUNKED = frozenset({"llama4"})
"""Architectures whose attention windows do not slide (``LLAMA_SWA_TYPE_CHUNKED``)."""

_MASKED_ALONE = frozenset({"dots3note"})
"""Architectures whose context for multi-token prediction has a window in its only cache."""

_N_GRAMS = "{}.ple.ngram_size"
"""A model with this key stores the token of each cell, which takes equal room."""

_RECURRENT_CELL = 8
"""A position, and the number of sequences that follow: none in the state of one sequence."""

_CELL = 12
"""A position, the number of sequences that follow, and the sequence of the state."""


def caches_of(library: native.Library, context: Any, log: Sequence[str], tensors: Sequence[CacheTensor]) -> Caches:
    """List the caches of a context.

    Args:
        library: The native libraries.
        context: The context.
        log: llama.cpp's log of its creation.
        tensors: All recorded tensors of its caches.

    Raises:
        LlamaCppError: This build does not tell enough.
    """
    llama = library.llama
    if llama.llama_state_seq_get_size_ext is None:
        raise LlamaCppError(f"{llama.path} does not tell how large a sequence's state is: plan with a newer llama.cpp")
    model = llama.llama_get_model(context)
    architecture = _metadata(library, model, "general.architecture")
    ggml = ggml_version(llama.library)[0]
    has_tokens = bool(_metadata(library, model, _N_GRAMS.format(architecture)))
    has_dimensions = llama.llama_model_rope_type(model) in (_MROPE, _IMROPE)
    more = position_bytes(ggml)
    cell = CellBytes(_CELL + more * has_tokens, _CELL + more * (has_tokens or has_dimensions))
    caches = matched(log, tensors, cell)
    if architecture in _MASKED_ALONE and len(caches) == 1:
        caches = (replace(caches[0], kind="swa"),)
    return Caches(
        caches,
        n_swa=_window(library, model, architecture),
        is_chunked=architecture in _CHUNKED,
        leaves_out_masked=leaves_out_what_is_masked(ggml),
        n_seq_max=int(llama.llama_n_seq_max(context)),
        n_rs_seq=int(llama.llama_n_rs_seq(context)) if llama.llama_n_rs_seq is not None else 0,
        empty=int(llama.llama_state_seq_get_size_ext(context, 0, _FULL)),
        empty_partial=int(llama.llama_state_seq_get_size_ext(context, 0, _PARTIAL)),
        # from b11413 on, as the interface; an empty state does not tell
        has_rotations=backend_api(llama.library) >= 3,
    )


def _window(library: native.Library, model: Any, architecture: str) -> int:
    """Return the window of sliding-window attention; llama.cpp reports none if it does not help to roll back."""
    written = _metadata(library, model, f"{architecture}.attention.sliding_window")
    return model_info_of(library, model).n_swa or (int(written) if written.isdecimal() else 0)


def _metadata(library: native.Library, model: Any, key: str) -> str:
    """Return a value of the model's metadata as text, '' without one."""
    value = ctypes.create_string_buffer(256)
    length = library.llama.llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode("utf-8", "replace") if length >= 0 else ""


class CellBytes(NamedTuple):
    """Bytes written of a cell beside its rows: in an indexer's cache, and in any other."""

    indexer: int
    other: int


def matched(log: Iterable[str], tensors: Sequence[CacheTensor], cell: CellBytes) -> tuple[Cache, ...]:
    """Assign the recorded tensors to the caches in the log, in order. Raises ``LlamaCppError`` if they do not match."""
    left: dict[str, list[CacheTensor]] = {}
    for tensor in tensors:
        left.setdefault(_owner(tensor.name), []).append(tensor)
    whole = []
    for owner, cache in _logged_caches(log, cell):
        of_cache = _taken(cache, left.get(owner, []))
        if any((tensor.rows, tensor.planes) != _shape(cache, tensor) for tensor in of_cache):
            raise _unknown_cache(f"{of_cache[0].name} is not of the cache of {cache.cells} cells that its log names")
        whole.append(replace(cache, tensors=of_cache))
    if forgotten := [tensor.name for each in left.values() for tensor in each]:
        raise _unknown_cache(f"{forgotten[0]} is of no cache that its log names")
    return tuple(whole)


def _logged_caches(log: Iterable[str], cell: CellBytes) -> list[tuple[str, Cache]]:
    """Return the caches in the log, each with the owner of its tensors, which it lacks."""
    caches: list[tuple[str, Cache]] = []
    compressed: dict[str, int] = {}
    made = ""
    for line in log:
        if creating := _MADE.search(line):
            made = creating[1]
        elif cells := _CELLS.search(line):
            compressor = _COMPRESSED.get(made)
            kind: CacheKind = "compressed" if compressor else "swa" if made == _SWA else "kv"
            if compressor:
                compressed[compressor] = len(caches)
            bytes_of_cell = cell.indexer if made in _INDEXERS else cell.other
            caches.append(("kv", Cache(kind, int(cells[1]), int(cells[3]), int(cells[2]), cell_bytes=bytes_of_cell)))
            made = ""
        elif states := _STATES.search(line):
            caches.append(
                ("recurrent", Cache("recurrent", int(states[1]), 1, int(states[2]), cell_bytes=_RECURRENT_CELL))
            )
        elif state := _COMPRESSOR.search(line):
            name, ratio, rows, n_stream, n_layer = state[1], *map(int, state.groups()[1:])
            caches.append((name, Cache("compressor", rows, n_stream, n_layer, ratio=ratio)))
            if name in compressed:
                owner, cache = caches[compressed[name]]
                caches[compressed[name]] = owner, replace(cache, ratio=ratio)
    return caches


def _owner(name: str) -> str:
    tensor = _TENSOR.fullmatch(name)
    if tensor is None:
        raise _unknown_cache(f"{name} is none of the tensors of its caches")
    return tensor["compressor"] or ("recurrent" if tensor["part"] in "rs" else "kv")


def _taken(cache: Cache, left: list[CacheTensor]) -> tuple[CacheTensor, ...]:
    """Take the cache's tensors from the start of ``left``: those of so many layers, or all."""
    end = len(left)
    if cache.kind in ("kv", "swa", "compressed"):
        # K is the first tensor of a layer; V may follow
        first = [index for index, tensor in enumerate(left) if _part(tensor) == "k"]
        end = first[cache.n_layer] if cache.n_layer < len(first) else end
    of_cache, left[:] = tuple(left[:end]), left[end:]
    return of_cache


def _part(tensor: CacheTensor) -> str | None:
    match = _TENSOR.fullmatch(tensor.name)
    return match and match["part"]


def _shape(cache: Cache, tensor: CacheTensor) -> tuple[int, int]:
    """Return rows and planes of a cache's tensor; snapshots add to those of recurrent states."""
    if cache.kind == "recurrent":
        return (tensor.rows if tensor.rows % cache.cells == 0 else 0), 1
    if cache.kind == "compressor":
        return cache.cells, (tensor.planes if tensor.planes % cache.n_stream == 0 else 0)
    return cache.cells, cache.n_stream


def _unknown_cache(what: str) -> LlamaCppError:
    return LlamaCppError(f"the caches of this build of llama.cpp are not known: {what}")
