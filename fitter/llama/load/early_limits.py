"""Limits of a header, checked before a load that starts before anything has read the header.

llama.cpp aborts at more layers or experts than it has room for, and creates all words of a vocabulary without texts
before it reads a tensor.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_WORDS = 1 << 23
"""No published model has as many: Gemma 3 has 262,208."""

LIMITS = {".block_count": (1, 512), ".expert_count": (0, 1024), ".vocab_size": (0, MOST_WORDS)}
"""Least and largest value of a key, as in ``header_limits.json``, which takes too long to read before every load."""


def are_kept(library: Any, path: str) -> bool:
    """Return whether the header of a file keeps the limits; true if it cannot be read, which the load will report."""
    gguf = library.fitter.fitter_skeleton_open(os.fsencode(path))
    if gguf == library.ffi.NULL:
        return True
    try:
        info, entry = library.ffi.new("fitter_gguf_info_t *"), library.ffi.new("fitter_gguf_kv_t *")
        library.fitter.fitter_gguf_info(gguf, info)
        for index in range(info.n_kv):
            library.fitter.fitter_gguf_kv(gguf, index, entry)
            least, most = LIMITS.get("." + (library.text(entry.key) or "").rpartition(".")[2], (0, None))
            if most is not None and entry.kind == b"u" and not least <= entry.u <= most:
                return False
    finally:
        library.fitter.fitter_gguf_close(gguf)
    return True
