"""The layers for which xllamacpp and fitter say that GPUs have room.

``python -m tools.comparisons.xllamacpp_layers RESULTS`` runs in a Python that has xllamacpp (2026.10.11549) beside
fitter. ``tests/data/xllamacpp`` has what was seen.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fitter
from tools.models import shapes

MODELS = (
    *("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma3-12b", "glm45-air"),
    *("nemotron-h-9b", "qwen3-next-80b-a3b"),
)
CARDS = {"8": [8 << 30], "12": [12 << 30], "24": [24564 << 20], "24+12": [24564 << 20, 12 << 30]}
N_CTX = 16384
MIB = 1 << 20


def arguments(path: Path, cards: Sequence[int]) -> dict[str, Any]:
    """The question, as both are asked it."""
    gpus = [{"name": f"CUDA{index}", "memory_free": free} for index, free in enumerate(cards)]
    words = {"context_length": N_CTX, "batch_size": 2048, "num_parallel": 1, "kv_cache_type": ""}
    return {"gpus": gpus, "model_path": str(path), "projectors": [], **words}


def used(path: Path, layers: int, split: Sequence[float]) -> list[int]:
    """Bytes that llama.cpp takes of each card."""
    names = [f"CUDA{index}" for index in range(len(split))]
    keywords: dict[str, Any] = {"program": "llama-server", "n_seq_max": 1, "n_ctx": N_CTX, "n_batch": 2048}
    keywords |= {"gpus": ["9999GiB"] * len(split), "tensor_split": split if any(split) else None}
    most = fitter.measure(path, n_gpu_layers=layers, **keywords).most
    return [most.on(name).used for name in names]


def _rows(directory: Path) -> Iterator[dict[str, object]]:
    from xllamacpp.memory import estimate_gpu_layers  # type: ignore[import-not-found]

    for model in MODELS:
        path = shapes.write(model, directory)
        for name, cards in CARDS.items():
            row: dict[str, object] = {"model": model, "cards": name}
            row["total_mib"] = "+".join(str(card // MIB) for card in cards)
            for who, estimate in (("fitter", fitter.estimate_gpu_layers), ("xllamacpp", estimate_gpu_layers)):
                asked = arguments(path, cards)
                try:
                    found = estimate(**asked)
                except (TypeError, KeyError, IndexError) as error:
                    row |= {f"{who}_layers": f"{type(error).__name__}"}
                    continue
                taken = used(path, found.layers, found.tensor_split)
                row |= {
                    f"{who}_layers": found.layers,
                    f"{who}_used_mib": "+".join(str(each // MIB) for each in taken),
                    f"{who}_said_mib": found.vram_size // MIB,
                }
            print(row, flush=True)
            yield row


def main(results: Path) -> None:
    """Ask both about every model and machine, and write what they answer."""
    with tempfile.TemporaryDirectory() as directory:
        rows = list(_rows(Path(directory)))
    columns = ["model", "cards", "total_mib"]
    columns += [f"{who}_{what}" for who in ("fitter", "xllamacpp") for what in ("layers", "used_mib", "said_mib")]
    with results.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
