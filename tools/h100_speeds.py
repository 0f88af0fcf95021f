"""Placements that llama-bench has timed on an H100, beside estimates: ``python -m tools.h100_speeds [--write]``.

The measured speeds are in ``tests/data/speeds/h100_placements.csv``. It prints the table of
``docs/explanation/cost-model.md``, and how many pairs are in the measured order; ``--write`` puts the table
there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fitter
from fitter.llama.client import Worker
from tools import shapes
from tools.real_cards import ROOT, page_with

DATA = ROOT / "tests" / "data" / "speeds" / "h100_placements.csv"
PAGE = ROOT / "docs" / "explanation" / "cost-model.md"
BEGIN = "<!-- python -m tools.h100_speeds --write -->\n"
HOST_BANDWIDTH = 135.1e9
PROMPT, GENERATE = 1024, 32


@dataclass(frozen=True)
class Timed:
    """Tokens per second at ``depth`` tokens in the cache; ``load_mode`` is llama.cpp's."""

    model: str
    placement: str
    load_mode: str
    depth: int
    prompt: float
    generation: float
    estimated_prompt: float
    estimated_generation: float


def keywords(arguments: str) -> dict[str, Any]:
    """Those of ``fitter.estimate`` for arguments of llama-bench."""
    words = arguments.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    found: dict[str, Any] = {"n_gpu_layers": int(given["-ngl"])}
    if "-ncmoe" in given:
        found["n_cpu_moe"] = int(given["-ncmoe"])
    if "-ot" in given:
        found["override_tensor"] = [given["-ot"]]
    if "-nkvo" in given:
        found["offload_kqv"] = False
    return found


def timed(directory: Path) -> Iterator[Timed]:
    """Every row with its estimate; models are written to ``directory``."""
    with DATA.open(newline="", encoding="utf-8") as file, Worker() as worker:
        for row in csv.DictReader(file):
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
            yield Timed(
                *(row["model"], row["placement"], row["load_mode"], depth),
                *(float(row["prompt"]), float(row["generation"])),
                *(price.prompt_tokens_per_second, price.generation_tokens_per_second),
            )


def in_order(rows: Sequence[Timed], what: str) -> tuple[int, int]:
    """Of pairs of one model that were measured to differ by more than 10 %: those estimated in that order, and all."""
    found = [0, 0]
    for a, b in itertools.combinations(rows, 2):
        measured = getattr(a, what), getattr(b, what)
        is_pair = (a.model, a.depth, a.load_mode) == (b.model, b.depth, b.load_mode)
        if is_pair and max(measured) > 1.1 * min(measured):
            found[1] += 1
            is_more = getattr(a, f"estimated_{what}") > getattr(b, f"estimated_{what}")
            found[0] += is_more == (measured[0] > measured[1])
    return found[0], found[1]


def table(rows: Sequence[Timed]) -> str:
    """All of it in Markdown. Prompts are estimated at depth 0 alone."""
    lines = [
        "| model | placement | prompt | estimate | generation | estimate | at 4,096 | estimate |",
        "| --- " * 8 + "|",
    ]
    deep: Mapping[tuple[str, str], Timed] = {(row.model, row.placement): row for row in rows if row.depth}
    for row in rows:
        if not row.depth:
            other = deep[row.model, row.placement]
            speeds = (row.prompt, row.estimated_prompt, row.generation, row.estimated_generation)
            speeds += (other.generation, other.estimated_generation)
            cells = " | ".join(f"{speed:,.0f}" for speed in speeds)
            lines.append(f"| {row.model} | {row.placement} | {cells} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Estimate, print."""
    parser = argparse.ArgumentParser(prog="tools.h100_speeds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the page as well")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        rows = list(timed(Path(directory)))
    text = table(rows)
    prompts = [row for row in rows if not row.depth]
    print(text, f"generation {in_order(rows, 'generation')}, prompt {in_order(prompts, 'prompt')}", sep="\n")
    if given.write:
        PAGE.write_text(page_with(text, PAGE.read_text(encoding="utf-8"), BEGIN), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
