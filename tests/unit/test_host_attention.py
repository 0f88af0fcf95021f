"""The host's attention as measured: each kind relative to generation with flash attention on one machine."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from fitter.planning.speed import cost

FILE = Path(__file__).resolve().parents[1] / "data" / "speeds" / "host_attention.csv"
KINDS = {
    "plain_attention": ("f16", "1", "0"),
    "prompt_attention": ("f16", "512", "1"),
    "quantized_prompt_attention": ("q8_0", "512", "1"),
    "plain_prompt_attention": ("f16", "512", "0"),
}


def measured() -> dict[tuple[str, ...], dict[tuple[str, ...], float]]:
    """GFLOP per second and thread of each model, by cache, tokens and flash attention."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    with FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = tuple(row[name] for name in ("heads", "kv_heads", "head_size", "threads"))
            found.setdefault(model, {})[row["cache"], row["tokens"], row["flash"]] = float(row["gflops"])
    return found


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_each_kind_is_as_much_faster_than_generation_as_measured(name: str, kind: tuple[str, str, str]) -> None:
    costs = cost.default().host
    ratios = [speeds[kind] / speeds["f16", "1", "1"] for speeds in measured().values() if kind in speeds]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert 0.75 <= getattr(costs, name) / costs.attention / mean <= 1.33, mean


def test_a_prompt_of_few_tokens_is_computed_as_generation_is() -> None:
    for speeds in measured().values():
        if few := speeds.get(("f16", "16", "1")):
            assert few < 1.2 * speeds["f16", "1", "1"] and speeds["f16", "64", "1"] > 5 * few
