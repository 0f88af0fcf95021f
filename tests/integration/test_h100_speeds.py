"""Estimates for placements that llama-bench timed on an H100 (``tests/data/speeds/h100_placements.csv``)."""

from __future__ import annotations

import csv
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.llama.client import Worker
from tools.models import shapes

DATA = Path(__file__).resolve().parents[1] / "data" / "speeds" / "h100_placements.csv"
HOST_BANDWIDTH = 135.1e9
PROMPT, GENERATE = 1024, 32


@dataclass(frozen=True)
class Timed:
    """Tokens per second at ``depth`` tokens in the cache; ``load_mode`` is llama.cpp's."""

    model: str
    load_mode: str
    depth: int
    prompt: float
    generation: float
    estimated_prompt: float
    estimated_generation: float


def keywords(arguments: str) -> dict[str, Any]:
    """The keywords of ``fitter.estimate`` for arguments of llama-bench."""
    words = arguments.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    result: dict[str, Any] = {"n_gpu_layers": int(options["-ngl"])}
    if "-ncmoe" in options:
        result["n_cpu_moe"] = int(options["-ncmoe"])
    if "-ot" in options:
        result["override_tensor"] = [options["-ot"]]
    if "-nkvo" in options:
        result["offload_kqv"] = False
    return result


def estimated(row: dict[str, str], directory: Path, worker: Worker) -> Timed:
    depth = int(row["depth"])
    price = fitter.estimate(
        shapes.write(row["model"], directory, vocab=False),
        gpus=["h100-sxm"],
        worker=worker,
        host_bandwidth=HOST_BANDWIDTH,
        n_ctx=8192,
        flash_attn="on",
        prompt=PROMPT,
        generate=GENERATE,
        live_tokens=depth + GENERATE // 2,
        load_mode=row["load_mode"],
        **keywords(row["arguments"]),
    )
    speeds = float(row["prompt"]), float(row["generation"])
    estimates = price.prompt_tokens_per_second, price.generation_tokens_per_second
    return Timed(row["model"], row["load_mode"], depth, *speeds, *estimates)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Timed]:
    directory = tmp_path_factory.mktemp("models")
    with DATA.open(newline="", encoding="utf-8") as file, Worker() as worker:
        return [estimated(row, directory, worker) for row in csv.DictReader(file)]


def in_order(rows: list[Timed], speed: str) -> tuple[int, int]:
    """Count pairs of one model whose measured speeds differ by more than 10 %: in the estimated order, and all."""
    pairs = [
        (getattr(a, f"estimated_{speed}") > getattr(b, f"estimated_{speed}")) == (getattr(a, speed) > getattr(b, speed))
        for a, b in itertools.combinations(rows, 2)
        if (a.model, a.depth, a.load_mode) == (b.model, b.depth, b.load_mode)
        and max(getattr(a, speed), getattr(b, speed)) > 1.1 * min(getattr(a, speed), getattr(b, speed))
    ]
    return sum(pairs), len(pairs)


def test_the_order(rows: list[Timed]) -> None:
    assert len(rows) == 44
    assert in_order(rows, "generation") == (77, 79)
    assert in_order([row for row in rows if not row.depth], "prompt") == (37, 38)


def test_how_far_off_generation_is(rows: list[Timed]) -> None:
    """The page on the cost model states these errors."""
    off = [abs(row.estimated_generation / row.generation - 1) for row in rows]
    assert round(statistics.median(off), 1) == 0.2 and 0.79 < max(off) < 0.81


def test_prompts_of_mapped_weights(rows: list[Timed]) -> None:
    """Without experts, of which a prompt with random routers does not choose all."""
    off = [row.estimated_prompt / row.prompt for row in rows if row.load_mode == "mmap" and row.model == "llama-3.1-8b"]
    assert len(off) == 4 and all(1 < each < 1.5 for each in off)
