"""Keys of tokenizers: equal keys, equal tokenizers."""

from __future__ import annotations

import hashlib
import os

from fitter.llama.build import library as native

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
