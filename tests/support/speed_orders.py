"""Published speeds beside the cost model's, and how many pairs of one machine have the measured order.

``python -m tests.support.speed_orders`` counts the pairs of ``tests/data/speeds`` and names those in the wrong order.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.speed.cost import Estimate, ExpertCache, Layer, Work, Workload, price
from tests.support import speed_rows
from tests.support.speed_rows import DATA, LATER, PLACEMENTS, Measured

CACHES = DATA / "expert_cache_sizes.csv"
APART = 0.1
"""Two measured speeds that are nearer than this share say no order."""


class Speed(NamedTuple):
    """A row with its tokens per second: priced, measured."""

    row: Measured
    priced: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.priced / self.measured


@dataclass(frozen=True)
class Pair:
    """Two rows of one machine, model and depth."""

    one: Speed
    other: Speed

    @property
    def is_apart(self) -> bool:
        return not 1 - APART <= self.one.measured / self.other.measured <= 1 + APART

    @property
    def is_in_order(self) -> bool:
        return (self.one.priced > self.other.priced) == (self.one.measured > self.other.measured)

    @property
    def has_two_micro_batches(self) -> bool:
        return self.one.row.work.n_ubatch != self.other.row.work.n_ubatch


def priced_row(row: Measured, workload: Workload) -> Estimate:
    return price(row.work, row.devices, row.host, workload)


def generation_speeds(rows: Iterable[Measured]) -> list[Speed]:
    """Each row with the speed of its generated tokens."""
    return [
        Speed(row, priced_row(row, Workload(0, 128, row.depth)).generation_tokens_per_second, row.generation_tps)
        for row in rows
        if row.generation_tps
    ]


def prompt_speeds(rows: Iterable[Measured], is_text: bool = False) -> list[Speed]:
    """Each row with the speed of its prompt."""
    workload = Workload(generate=0, is_text=is_text)
    of = [(row, replace(workload, prompt=row.prompt, cached=row.prompt_after)) for row in rows if row.prompt_tps]
    return [Speed(row, priced_row(row, each).prompt_tokens_per_second, row.prompt_tps or 0.0) for row, each in of]


def pairs(speeds: Sequence[Speed]) -> list[Pair]:
    """Every two arms of a cell that were not measured to be equal."""
    cells: dict[tuple[str, ...], list[Speed]] = {}
    for speed in speeds:
        cells.setdefault(speed.row.cell, []).append(speed)
    return [
        Pair(one, other)
        for cell in cells.values()
        for one, other in itertools.combinations(cell, 2)
        if (one.row.arm != other.row.arm or one.row.work.n_ubatch != other.row.work.n_ubatch)
        and one.measured != other.measured
    ]


def in_order(of: Sequence[Pair]) -> tuple[int, int]:
    """Count the pairs in the measured order, and all."""
    return sum(pair.is_in_order for pair in of), len(of)


def expert_caches(rate: Callable[[float], float] | None = None, path: Path = CACHES) -> list[Measured]:
    """Rows of ``expert_cache_sizes.csv`` with the measured hit rates, or with ``rate`` of the share that is cached."""
    rows, _ = speed_rows.placements(path)
    with path.open(encoding="utf-8", newline="") as file:
        found = dict(enumerate(csv.DictReader(file), start=2))
    return [
        replace(row, work=_cached(row.work, _hit_rate(found[row.line], rate))) if found[row.line]["hit_rate"] else row
        for row in rows
    ]


def _hit_rate(row: dict[str, str], rate: Callable[[float], float] | None) -> float:
    return rate(float(row["cache_mib"]) / float(row["host_experts_mib"])) if rate else float(row["hit_rate"])


def _cached(work: Work, hit_rate: float) -> Work:
    """``work`` with a cache of the experts that are on the host, on the first device."""

    def cached(layer: Layer) -> Layer:
        weights = (
            replace(each, cache=ExpertCache(0, hit_rate)) if each.experts and each.place == HOST else each
            for each in layer.weights
        )
        return replace(layer, weights=tuple(weights))

    return replace(work, layers=tuple(map(cached, work.layers)))


def main() -> None:
    """Print a line for each count and for each pair that is priced in the wrong order."""
    tables = {path.name: speed_rows.placements(path)[0] for path in (PLACEMENTS, LATER)}
    for name, rows in tables.items():
        for what, speeds in (("generation", generation_speeds(rows)), ("prompt", prompt_speeds(rows))):
            _print(f"{name}: {what}", pairs(speeds))
    speeds = [speed for rows in tables.values() for speed in prompt_speeds(rows)]
    _print("prompts with two micro batches", [pair for pair in pairs(speeds) if pair.has_two_micro_batches])
    _print(f"{CACHES.name}: generation", pairs(generation_speeds(expert_caches())))


def _print(what: str, every: Sequence[Pair]) -> None:
    apart = [pair for pair in every if pair.is_apart]
    print("{}: {} of {} in the measured order; {} of {} that differ by more than {:.0%}".format(
        what, *in_order(every), *in_order(apart), APART))  # fmt: skip
    for pair in every:
        if not pair.is_in_order:
            print("  " + " | ".join(_line(speed) for speed in (pair.one, pair.other)))


def _line(speed: Speed) -> str:
    row = speed.row
    return f"line {row.line}, -ub {row.work.n_ubatch}: {speed.measured:g} t/s, priced {speed.priced:.4g} ({row.arm})"


if __name__ == "__main__":
    main()
