"""Published speeds of the split modes ``layer`` and ``tensor`` on one machine, and the cost model's estimates of both.

The pairs are in ``tests/data/speeds/splits.csv``. The constants ``[sums]`` of ``cost.toml`` were fitted on every second
line, from the first on; the other lines judge them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import DeviceSpeed, default_host, speed_of
from fitter.planning.pricing.split_price import Share, SumCosts, pipelined, split_estimate
from fitter.planning.speed.cost import Attention, Layer, Weights, Work, Workload, price

FILE = Path(__file__).resolve().parents[1] / "data" / "speeds" / "splits.csv"
_GIB = 2**30


@dataclass(frozen=True)
class Pair:
    """Two measurements on one machine, in tokens per second. ``test``: ``pp`` or ``tg`` with the number of tokens."""

    machine: str
    devices: tuple[DeviceSpeed, ...]
    model: str
    work: Work
    test: str
    depth: int
    layer: float
    tensor: float

    @property
    def workload(self) -> Workload:
        tokens = int(self.test[2:])
        return Workload(tokens, 0, self.depth) if self.test.startswith("pp") else Workload(0, tokens, self.depth)

    def estimated(self, sums: SumCosts) -> tuple[float, float]:
        """Tokens per second in both modes."""
        placed = _over(self.work, len(self.devices))
        host, workload = default_host(), self.workload
        layer = pipelined(price(placed, self.devices, host, workload), len(self.devices), workload, self.work.n_ubatch)
        share = _shares(self.devices)
        tensor = split_estimate(self.work, self.devices, share, host, workload, sums)
        if self.test.startswith("pp"):
            return layer.prompt_tokens_per_second, tensor.prompt_tokens_per_second
        return layer.generation_tokens_per_second, tensor.generation_tokens_per_second


def _shares(devices: Sequence[DeviceSpeed]) -> list[Share]:
    """Equal ones, as llama.cpp has them without --tensor-split."""
    return [Share(1 / len(devices), 1 / len(devices)) for _ in devices]


def pairs() -> list[Pair]:
    """All pairs, in the order of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [_pair(row) for row in csv.DictReader(file)]


def in_order(every: Sequence[Pair], sums: SumCosts) -> int:
    """How many pairs are estimated in the order in which they were measured."""
    return sum((a > b) == (pair.layer > pair.tensor) for pair in every for a, b in [pair.estimated(sums)])


def _pair(row: dict[str, str]) -> Pair:
    devices = tuple(speed_of(virtual_devices([card])[0]) for card in row["cards"].split("+"))
    if row["pcie_gbps"]:
        devices = tuple(replace(device, pcie=float(row["pcie_gbps"]) * 1e9) for device in devices)
    return Pair(
        row["machine"], devices, row["model"], _work(row), row["tokens"], int(row["depth"]), float(row["layer"]),
        float(row["tensor"]),
    )  # fmt: skip


def _work(row: dict[str, str]) -> Work:
    """The model with layers that are alike."""
    n_layer, params, experts = int(row["n_layer"]), float(row["params"]) * 1e9, float(row["expert_params"]) * 1e9
    size = float(row["gib"]) * _GIB
    kv_bytes, dense = float(row["kv_bytes"]), params - experts
    weights = [Weights(0, size * dense / params / n_layer, dense / n_layer)]
    if experts:
        weights.append(Weights(0, size * experts / params / n_layer, experts / n_layer, experts=True))
    layer = Layer(0, tuple(weights), Attention(kv_bytes, 8 * kv_bytes))
    output = Layer(0, ())
    return Work(
        (*[layer] * n_layer, output),
        int(row["n_embd"]),
        int(row["n_expert"]),
        int(row["n_expert_used"]),
        int(row["n_ubatch"]),
    )


def _over(work: Work, n_devices: int) -> Work:
    """The same with as many layers on each device."""
    n_layer = len(work.layers) - 1
    alike = [
        replace(work.layers[0], home=d, weights=tuple(replace(w, place=d) for w in work.layers[0].weights))
        for d in range(n_devices)
    ]
    placed = [alike[i * n_devices // n_layer] for i in range(n_layer)]
    return replace(work, layers=(*placed, replace(work.layers[-1], home=n_devices - 1)))
