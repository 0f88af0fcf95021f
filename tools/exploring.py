"""How long a ``Planner`` takes to answer, and how long a grid takes: run alone, since it prints seconds.

``python -m tools.exploring`` asks a planner about the Qwen3 30B A3B shape, with its vocabulary, on machines that hold
part of it and all of it: other contexts, KV types and margins, drawn. It then explores grids of 100, 200 and 400 cells.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import fitter
from tools.shapes import write

SHAPE = "qwen3-30b-a3b"
MACHINES = {"part of it on a card": "12GiB", "part of it on two": "8GiB + 6GiB", "all of it": "rtx-5090"}
GRID = ("rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-3090", "rtx-4090", "2x rtx-3060-12gb")
QUESTIONS = 30


def question(drawn: random.Random) -> dict[str, Any]:
    """Another context, KV type or margin."""
    kind = drawn.choice(("context", "KV type", "margin"))
    if kind == "context":
        return {"n_ctx": drawn.randrange(2048, 40961)}
    if kind == "margin":
        return {"margin": drawn.randrange(512 * 2**20, 3 * 2**30)}
    return {"type_k": drawn.choice(("q8_0", "q4_0", "bf16")), "n_ctx": drawn.randrange(8, 160) * 256}


def planner(model: Path) -> None:
    """Medians of answers, and of the same questions to ``fitter.fit``."""
    for name, machine in MACHINES.items():
        drawn = random.Random(name)
        asked = [question(drawn) for _ in range(QUESTIONS)]
        gpus = machine.split(" + ")
        with fitter.Planner(model, gpus=gpus) as own:
            own.fit()
            times = []
            for each in asked:
                began = time.perf_counter()
                own.fit(**each)
                times.append(1000 * (time.perf_counter() - began))
        alone = []
        for each in asked[:5]:
            began = time.perf_counter()
            fitter.fit(model, gpus=gpus, **each)
            alone.append(1000 * (time.perf_counter() - began))
        print(
            f"planner, {name} ({machine}): median {statistics.median(times):.0f} ms of {len(times)} questions "
            f"({min(times):.0f} to {max(times):.0f}); fitter.fit: median {statistics.median(alone):.0f} ms",
            flush=True,
        )


def grids(model: Path, most: int) -> None:
    """Seconds of grids of a quarter, a half and all of the cells."""
    for count in (most // 4, most // 2, most):
        contexts = [1024 + 256 * each for each in range(count // (2 * len(GRID)))]
        found = fitter.explore(model, GRID, n_ctx=contexts, type_k=["f16", "q8_0"])
        cells, seconds = len(found.cells), found.seconds
        print(f"explore, {cells} cells: {seconds:.1f} s, {1000 * seconds / cells:.0f} ms each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=400, help="cells of the largest grid")
    with tempfile.TemporaryDirectory() as folder:
        model = write(SHAPE, Path(folder))
        most = parser.parse_args().cells
        planner(model)
        grids(model, most)


if __name__ == "__main__":
    main()
