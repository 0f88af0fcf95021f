"""Published speeds of one machine with two placements, two micro batches, or two caches of experts: which is faster.

``python -m tests.support.speed_orders`` prints the pairs that are priced in the wrong order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fitter.planning.speed.caches import hit_rate
from tests.support import speed_rows
from tests.support.cases import named_cases
from tests.support.speed_orders import Pair, Speed, expert_caches, generation_speeds, in_order, pairs, prompt_speeds
from tests.support.speed_rows import LATER, PLACEMENTS, Measured


def apart(speeds: Sequence[Speed]) -> list[Pair]:
    """Return the pairs that were measured to differ by more than a tenth."""
    return [pair for pair in pairs(speeds) if pair.is_apart]


@named_cases(
    ("generation", PLACEMENTS, generation_speeds, 87, 90),
    ("prompts", PLACEMENTS, prompt_speeds, 70, 72),
    ("generation, published later", LATER, generation_speeds, 36, 38),
    ("prompts, published later", LATER, prompt_speeds, 62, 62),
)
def test_two_placements(path: Path, speeds: Callable[[Sequence[Measured]], list[Speed]], least: int, of: int) -> None:
    rows, _ = speed_rows.placements(path)
    right, total = in_order(apart(speeds(rows)))
    assert total == of and right >= least


@named_cases(
    ("RTX 3090", PLACEMENTS, "bittide", "n-cpu-moe", [256, 512, 2048, 4096, 8192], (0.78, 0.98), (0.5, 0.98)),
    ("R9700", LATER, "bigcherry", "-ub .*-ncmoe 41", [512, 1024, 2048, 4096, 8192], (0.85, 1.15), (0.55, 1.15)),
    ("R9700, fewer experts", LATER, "bigcherry", "-ub .*-ncmoe 30", [512, 2048, 4096], (0.9, 1.05), (0.55, 1)),
)
def test_two_micro_batches(
    path: Path,
    source: str,
    placement: str,
    n_ubatch: list[int],
    as_text: tuple[float, float],
    by_chance: tuple[float, float],
) -> None:
    """The larger is faster, as measured; an estimate is within the factors, of a text and of tokens as if by chance."""
    rows = [
        row
        for row in speed_rows.placements(path)[0]
        if source in row.source and row.prompt_tps and re.search(placement, row.arm)
    ]
    assert [row.work.n_ubatch for row in rows] == n_ubatch
    for is_text, (low, high) in ((True, as_text), (False, by_chance)):
        speeds = prompt_speeds(rows, is_text)
        assert all(low <= speed.ratio <= high for speed in speeds), [speed.ratio for speed in speeds]
        right, total = in_order(pairs(speeds))
        assert right == total == len(n_ubatch) * (len(n_ubatch) - 1) // 2


def test_two_micro_batches_and_placements() -> None:
    rows = [row for path in (PLACEMENTS, LATER) for row in speed_rows.placements(path)[0]]
    every = [pair for pair in pairs(prompt_speeds(rows)) if pair.has_two_micro_batches]
    assert in_order(every) == (43, 43)


@named_cases(("as often found as measured", None, 29), ("as often as estimated", hit_rate, 27))
def test_caches_of_experts(rate: Callable[[float], float] | None, least: int) -> None:
    right, total = in_order(apart(generation_speeds(expert_caches(rate))))
    assert total == 29 and right >= least


def test_a_cache_of_experts_over_four_lanes() -> None:
    """Too small a cache makes generation slower, one of 14 GiB faster."""
    rows = [row for row in expert_caches() if "bigcherry" in row.source]
    speeds = {speed.row.arm.split(":")[0]: speed for speed in generation_speeds(rows)}
    without = speeds["no cache"]
    cached = [speed for arm, speed in speeds.items() if "moe-cache" in arm]
    assert len(cached) == 5 and all(0.9 <= speed.ratio <= 1.15 for speed in cached)
    assert [speed.priced > without.priced for speed in cached] == [False, False, False, True, True]
    assert [speed.measured > without.measured for speed in cached] == [False, False, False, True, True]
