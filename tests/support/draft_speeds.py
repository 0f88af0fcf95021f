"""Published speeds of multi-token prediction, and the cost model's estimates of them.

The rows are in ``tests/data/speeds/speculation.csv``: those of a model that drafts for itself, whole on one card, with
the share of drafts that was accepted in that run. ``drafts`` of ``cost.toml`` was fitted on every second row, from the
first on; the other rows judge it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import DeviceSpeed, default_host, speed_of
from fitter.planning.plan.turns import drafted_step_seconds, expected, of_each
from fitter.planning.speed.cost import Work, Workload, default, family_name, price, token_seconds
from tests.support.speed_rows import Where, model_of, work_of

FILE = Path(__file__).resolve().parents[1] / "data" / "speeds" / "speculation.csv"
LIVE = 256
"""Tokens in the cache on average: short prompts, and answers of 400 tokens at most."""


@dataclass(frozen=True)
class Drafted:
    """A measurement: tokens per second with ``depth`` tokens drafted at a time. ``series``: source, card and model."""

    series: tuple[str, str, str]
    device: DeviceSpeed
    work: Work
    depth: int
    accepted: float
    speed: float

    @property
    def estimated(self) -> float:
        """Tokens per second by the cost model."""
        alone, check = (
            price(self.work, [self.device], default_host(), Workload(0, 2, LIVE, 1, depth)).generation_seconds
            for depth in (0, self.depth)
        )
        own, output = self.work.layers[-2:]
        used = self.work.n_expert_used / self.work.n_expert if self.work.n_expert else 1.0
        size = sum(each.bytes * (used if each.experts else 1) for layer in (own, output) for each in layer.weights)
        n_vocab = output.weights[0].n_params / self.work.n_embd
        draft = self.depth * (token_seconds(size, 1, self.device) + default().host.sampling * n_vocab)
        seconds = drafted_step_seconds(alone, check, draft, default().families[family_name(self.device)].drafts)
        return expected(self.depth, of_each(self.accepted, self.depth)) / seconds


def drafted() -> list[Drafted]:
    """All rows that can be priced, in the order of the file, without those that draft nothing."""
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    own = [row for row in rows if "MTP" in row["model"] and row["gpu"] and row["depth"] not in ("", "0")]
    # the dimensions of step35 are not known; a least probability drafts less than the depth
    return [_drafted(row) for row in own if row["p_min"] == "0" and not row["model"].startswith("step35")]


def _drafted(row: dict[str, str]) -> Drafted:
    name, quant = row["model"].split()[:2]
    if name == "qwen":
        name, quant = "Qwen3.8-27B", row["model"].split()[2]
    model = model_of(name, quant, float(row["gib"]) if row["gib"] else None, "f16")
    device = speed_of(virtual_devices([row["gpu"]])[0])
    if "Vulkan" in row["model"]:
        device = replace(device, kind="vulkan")
    work = work_of(model, Where(len(model.layers), lambda layer, tensor: None), 1, 512)
    series = row["source"], row["gpu"], row["model"]
    return Drafted(series, device, work, int(row["depth"]), float(row["accepted"]), float(row["speed"]))
