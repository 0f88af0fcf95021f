"""Which tokenizer a model has, told without reading it."""

from __future__ import annotations

import hashlib
import os

from fitter.llama.build import library as native

_PIECE = 1 << 20
_LEAST = 1 << 16
"""Fewer bytes are read as quickly as their key is made."""


def tokenizer_key(path: str) -> str:
    """Return a key that is equal for equal tokenizers, of one architecture, in one build of llama.cpp.

    It is a digest of everything in the header that only a tokenizer reads, byte for byte. So llama.cpp accepts or
    refuses all tokenizers with one key alike. Empty for a small one, and where the header cannot be stepped through.
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
        # whoever needs the file will say it
        return ""
    return digest.hexdigest()
