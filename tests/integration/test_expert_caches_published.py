"""A cache of experts is planned where it was published to pay, and left out where it made generation slower.

The publications name no model: gpt-oss 120B stands for theirs, which had most of its experts on the host as well.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from pathlib import Path

import fitter
from tests.support.llama_builds import NEWEST, where
from tools.search.outcomes import with_links

PAIRS = Path(__file__).parents[1] / "data" / "speeds" / "expert_cache_pairs.csv"
LANES = 16
"""Of the cards' links, by the catalogue."""


def pairs() -> Iterator[dict[str, str]]:
    yield from csv.DictReader(line for line in PAIRS.read_text().splitlines() if not line.startswith("#"))


def test_it_is_planned_where_it_was_published_to_pay() -> None:
    errors = []
    for pair in pairs():
        published = float(pair["generation_with"]) / float(pair["generation_without"])
        with with_links(int(pair["pcie"].removeprefix("x")) / LANES):
            without, plan = (
                fitter.fit(
                    "shape://gpt-oss-120b",
                    gpus=pair["gpus"].split(),
                    n_ctx=8192,
                    objective="generation",
                    llama_cpp=where(NEWEST),
                    allow=allow,
                )
                for allow in ([], ["moe-cache"])
            )
        assert (plan.params.moe_cache_size > 0) == (published > 1), pair
        assert without.estimate and plan.estimate
        speeds = [each.generation_tokens_per_second for each in (without.estimate, plan.estimate)]
        if published > 1:
            errors.append(abs(speeds[1] / speeds[0] / published - 1))
        if pair["prompt"]:
            slower = plan.estimate.prompt_tokens_per_second / without.estimate.prompt_tokens_per_second
            low, high = map(float, pair["prompt"].split("-"))
            assert low <= slower <= high
    assert statistics.median(errors) <= 0.25
