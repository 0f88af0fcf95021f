"""Whether llama.cpp can read a model's tokenizer: loads of the model are made without it.

A tokenizer takes most of the time of a load, and no byte of memory depends on it. So it is read once for each build of
llama.cpp, and the answer is kept by its key.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

from fitter.llama.build import library as native
from fitter.llama.build import stored_answers
from fitter.llama.build.layouts import read_whole
from fitter.llama.build.log import failure

_PIECE = 1 << 20
_LEAST = 1 << 16
"""llama.cpp reads a smaller tokenizer as fast as its key is computed."""


def tokenizer_key(path: str) -> str:
    """Return a key that is equal for equal tokenizers, of one architecture, in one build of llama.cpp.

    The key is a digest of all metadata that only a tokenizer reads, byte for byte. So llama.cpp accepts all tokenizers
    with one key, or refuses all. It is empty for a small tokenizer, and for a header of an unknown form.
    """
    library = native.libraries()
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_tokenizer_entries(os.fsencode(path), out):
        return ""
    _, (offsets, sizes) = library.columns(out, 0, 2)
    if sum(sizes) < _LEAST:
        return ""
    digest = hashlib.sha256(native.loaded().key.encode())
    try:
        with open(path, "rb") as file:
            for offset, size in zip(offsets, sizes, strict=True):
                file.seek(offset)
                while size > 0 and (piece := file.read(min(size, _PIECE))):
                    digest.update(piece)
                    size -= len(piece)
    except OSError:
        # the load of the file reports it
        return ""
    return digest.hexdigest()


def is_read(path: str) -> bool:
    """Return whether llama.cpp is known to read the tokenizer of the model at ``path``.

    A small tokenizer is read at once. Raises ``LlamaCppError`` where llama.cpp refuses that.
    """
    if key := tokenizer_key(path):
        return stored_answers.read(_name(key)) is not None
    _read(path)
    return True


def check(path: str) -> None:
    """Read a tokenizer, and remember that llama.cpp can. Raises ``LlamaCppError`` with its reason if it cannot."""
    key = tokenizer_key(path)
    _read(path)
    if key and key == tokenizer_key(path):
        stored_answers.write(_name(key), {"tokenizer": key})


def _read(path: str) -> None:
    llama = native.libraries().llama
    params = llama.llama_model_default_params()
    nothing = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.cast(nothing, ctypes.c_void_p)
    params.vocab_only = True
    read_whole(params)
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise failure(path, "llama.cpp cannot load the model")
    llama.llama_model_free(model)


def _name(key: str) -> str:
    return f"tokenizer-{key}"
