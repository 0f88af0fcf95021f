"""Real models of a few megabytes, all tensors present, for tests that load and generate."""

from __future__ import annotations

from pathlib import Path

from examples.tiny_moe import TinyModel, write

TINY_MOE = TinyModel("tiny moe", n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=128, n_expert=8)
TINY_DENSE = TinyModel("tiny dense", n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=384, n_expert=0)


def write_tiny(path: Path, model: TinyModel = TINY_MOE) -> Path:
    """Write ``model`` (``TINY_MOE``, ``TINY_DENSE`` or dimensions of your own) to ``path``, seeded, in milliseconds."""
    return write(path, model)
