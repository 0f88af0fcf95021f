"""Compare the bytes of drawn caches of experts with dummy loads.

``python -m tools.comparisons.expert_caches LLAMA_CPP``: LLAMA_CPP is a llama.cpp from b11549 on, as ``--llama-cpp``
takes it. Each case is a model, cards, layers and experts on them, and a size; the memory that llama.cpp takes for the
cache is the difference of two loads.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fitter
from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown
from fitter.machine.gpu import parse_gpus
from fitter.model.header import Model, open_model
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import llama_placement
from fitter.planning.speed.caches import ALIGNMENT, ExpertGroup, experts_on_host, groups_of
from fitter.planning.speed.cost import Layer, Weights
from fitter.planning.speed.model_facts import facts_of
from fitter.text import MIB
from tools.models import shapes

SHAPES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3.1", "gpt-oss-20b", "gpt-oss-120b", "qwen3-next-80b-a3b")
CARDS = ("rtx-3060-12gb", "rtx-4090", "rtx-5090", "h100-sxm")


HOST_ALIGNMENT = 32
"""Alignment of the CPU's buffers."""


@dataclass(frozen=True)
class Case:
    """``on_host``: the experts of so many layers, the first ones, are on the host."""

    shape: str
    cards: tuple[str, ...]
    size: int
    n_gpu_layers: int
    on_host: int
    split: tuple[int, ...]

    def __str__(self) -> str:
        words = f"-ngl {self.n_gpu_layers} -ncmoe {self.on_host} -ts {','.join(map(str, self.split))}"
        return f"{self.shape} on {', '.join(self.cards)}: {words}, {self.size // MIB} MiB"


def draw(number: int, n_layer: dict[str, int]) -> Case:
    """Draw a case: the same number is the same case."""
    rng = random.Random(number)
    shape = rng.choice(SHAPES)
    cards = tuple(rng.choice(CARDS) for _ in range(rng.choice((1, 1, 2, 3))))
    size = int(2 ** rng.uniform(5, 15)) * MIB
    layers = n_layer[shape]
    on_devices = layers + 1 if rng.random() < 0.6 else rng.randint(len(cards), layers + 1)
    on_host = layers if rng.random() < 0.5 else rng.randint(1, layers)
    return Case(shape, cards, size, on_devices, on_host, tuple(rng.randint(1, 9) for _ in cards))


def bytes_on(groups: Sequence[ExpertGroup], n_devices: int, n_expert: int) -> tuple[list[int], int]:
    """Add up the bytes of a cache on each device, and those of its tables of slots on the host."""
    devices = [sum(group.bytes for group in groups if group.device == d) for d in range(n_devices)]
    table = -(-4 * n_expert // HOST_ALIGNMENT) * HOST_ALIGNMENT
    return devices, table * sum(len(group.layers) for group in groups if group.n_slots)


def predicted(case: Case, model: Model) -> tuple[list[int], int]:
    """Compute the bytes on each device and on the host."""
    facts = facts_of(model)
    homes = llama_placement(model.n_layer + 1, case.n_gpu_layers, [float(n) for n in case.split], case.split).homes
    layers = [
        Layer(home, (Weights(HOST if index < case.on_host else home, 1, 1, experts=True),))
        for index, home in enumerate(homes[: len(facts.layers)])
    ]
    groups = groups_of(
        experts_on_host(facts, layers), case.size, case.split, facts.n_expert, facts.n_expert_used, ALIGNMENT
    )
    return bytes_on(groups, len(case.cards), facts.n_expert)


def measured(case: Case, path: Path, worker: Worker) -> tuple[list[int], int] | None:
    """Measure the same; ``None`` where the cache is too small for one token."""
    gpus = parse_gpus(case.cards)

    def load(size: int) -> Breakdown:
        parameters: dict[str, Any] = {
            "n_ctx": 2048,
            "n_gpu_layers": case.n_gpu_layers,
            "tensor_split": [float(n) for n in case.split],
            "n_cpu_moe": case.on_host,
            "moe_cache_size": size,
        }
        return fitter.measure(path, gpus=gpus, worker=worker, **parameters)

    without = load(0)
    try:
        having = load(case.size)
    except FitterError as error:
        # llama.cpp's words, or fitter's
        if "too small" in str(error) or "has no room" in str(error):
            return None
        raise
    rows = [(having.on(gpu.name), without.on(gpu.name)) for gpu in gpus]
    return [a.context - b.context for a, b in rows], having.host.context - without.host.context


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("llama_cpp")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    equal = refused = 0
    with tempfile.TemporaryDirectory() as directory, Worker(llama_cpp=options.llama_cpp) as worker:
        paths = {shape: shapes.write(shape, Path(directory), vocab=False) for shape in SHAPES}
        models = {shape: open_model(path, worker.header) for shape, path in paths.items()}
        n_layer = {shape: model.n_layer for shape, model in models.items()}
        for number in range(options.first, options.first + options.count):
            case = draw(number, n_layer)
            told, found = predicted(case, models[case.shape]), measured(case, paths[case.shape], worker)
            refused += found is None
            if told == (found or ([0] * len(case.cards), 0)):
                equal += 1
            else:
                print(f"#{number} {case}: {told} predicted, {found} measured")
    print(f"{equal} of {options.count} equal; {refused} caches were refused as too small")
    return 0 if equal == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
