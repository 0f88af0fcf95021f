"""The words of a vocabulary without texts: llama.cpp makes as many as a header says, before it sees a tensor."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_WORDS = 1 << 23
"""No published model has as many: Gemma 3 has 262,208."""


def are_too_many(library: Any, path: str) -> bool:
    """Whether the header of the file at ``path`` has more; where it cannot be read, that is said by who loads it."""
    gguf = library.fitter.fitter_skeleton_open(os.fsencode(path))
    if gguf == library.ffi.NULL:
        return False
    try:
        info, entry = library.ffi.new("fitter_gguf_info_t *"), library.ffi.new("fitter_gguf_kv_t *")
        library.fitter.fitter_gguf_info(gguf, info)
        for index in range(info.n_kv):
            library.fitter.fitter_gguf_kv(gguf, index, entry)
            if entry.kind == b"u" and entry.u > MOST_WORDS and (library.text(entry.key) or "").endswith(".vocab_size"):
                return True
    finally:
        library.fitter.fitter_gguf_close(gguf)
    return False
