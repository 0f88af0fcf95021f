"""Published speeds of steps with several tokens, of several users or of one, and the cost model's estimates of them.

The rows are in ``tests/data/speeds/steps.csv``: ``users`` have a sequence each (llama-batched-bench), tokens of
``ubatch`` are one sequence (llama-bench with small micro batches). ``few`` and ``unlike`` of ``cost.toml`` were fitted
on every second line, from the first on; the other lines judge them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import DeviceSpeed, default_host, speed_of
from fitter.planning.speed.cost import Attention, Costs, Layer, Weights, Work, Workload, price

FILE = Path(__file__).resolve().parents[1] / "data" / "speeds" / "steps.csv"
_GIB = 2**30


@dataclass(frozen=True)
class Step:
    """A measurement: tokens per second of a step with so many tokens. ``series``: card, model, kind and depth."""

    series: tuple[str, str, str, int]
    device: DeviceSpeed
    work: Work
    workload: Workload
    tokens: int
    speed: float

    def estimated(self, costs: Costs | None = None) -> float:
        """Tokens per second by the cost model."""
        return self.tokens / price(self.work, [self.device], default_host(), self.workload, costs).generation_seconds


def steps() -> list[Step]:
    """All rows, in the order of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [_step(row) for row in csv.DictReader(file)]


def _step(row: dict[str, str]) -> Step:
    n_layer, tokens, depth = int(row["n_layer"]), int(row["tokens"]), int(row["depth"])
    params, experts = float(row["params"]) * 1e9, float(row["expert_params"]) * 1e9
    size = float(row["gib"]) * _GIB
    of_experts, of_others = (size * part / params / n_layer for part in (experts, params - experts))
    weights = [Weights(0, of_others, (params - experts) / n_layer)]
    weights += [Weights(0, of_experts, experts / n_layer, experts=True)] if experts else []
    sharing, kv_bytes = float(row["sharing"]), float(row["kv_bytes"])
    # two operations for each number of 16 bits of a KV head, and each query head
    full = Attention(kv_bytes, kv_bytes * sharing, sharing)
    windowed = Attention(kv_bytes, kv_bytes * sharing, sharing, int(row["window"]))
    n_windowed = round(float(row["windowed"]) * n_layer)
    layers = [Layer(0, tuple(weights), windowed)] * n_windowed + [Layer(0, tuple(weights), full)] * (
        n_layer - n_windowed
    )
    work = Work(
        (*layers, Layer(0, ())), int(row["n_embd"]), int(row["n_expert"]), int(row["n_expert_used"]), n_splits=(2, 2)
    )
    users, drafted = (tokens, 0) if row["kind"] == "users" else (1, tokens - 1)
    device = speed_of(virtual_devices([row["gpu"]])[0])
    series = row["gpu"], row["model"], row["kind"], depth
    return Step(series, device, work, Workload(0, 2, depth, users, drafted), tokens, float(row["speed"]))
