"""Loads to compare the metal profile with ggml-metal's own C++, as many and as random as one likes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.client import Worker, describe
from fitter.llama.types import Params, VirtualDevice
from tests import shapes
from tests.vulkan_reference import MODELS, answer, draw_params, params_text

MEMORY = 2_000_000 * 2**20
ENVIRONMENTS = (
    "GGML_METAL_GRAPH_OPTIMIZE_DISABLE=1",
    "GGML_METAL_BF16_DISABLE=1",
    "GGML_OP_OFFLOAD_MIN_BATCH=1",
)


@dataclass(frozen=True)
class Load:
    """One load, on ``n_devices`` devices (GGML_METAL_DEVICES); ``environment`` is ``NAME=value`` or empty."""

    model: str
    n_devices: int
    environment: str
    params: Params

    @property
    def session(self) -> tuple[str, int]:
        """What loads in one process have in common."""
        return self.environment, self.n_devices

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The devices."""
        return tuple(VirtualDevice(f"MTL{i}", "fake", "metal", 0, MEMORY, MEMORY) for i in range(self.n_devices))

    def __str__(self) -> str:
        words = (self.model, f"x{self.n_devices}", self.environment, params_text(self.params))
        return " ".join(word for word in words if word)


def draw(count: int, seed: int) -> list[Load]:
    """``count`` loads, spread evenly over the models; those of one session next to each other."""
    dice = random.Random(seed)
    models = list(MODELS)
    loads = [
        Load(
            models[number % len(models)],
            dice.choice((1, 1, 1, 2)),
            dice.choice(ENVIRONMENTS) if dice.random() < 0.25 else "",
            draw_params(dice, models[number % len(models)]),
        )
        for number in range(count)
    ]
    return sorted(loads, key=lambda load: load.session)


def answers(loads: list[Load], directory: Path, library: Path | None) -> Iterator[str]:
    """What ggml-metal's own C++ (``library``, see build.py) says to each load; without it, the profile."""
    worker: Worker | None = None
    session = None
    try:
        for load in loads:
            if worker is None or load.session != session:
                if worker is not None:
                    worker.close()
                worker, session = _start(load, library), load.session
            yield answer(worker, shapes.write(load.model, directory, vocab=False), load.params)
    finally:
        if worker is not None:
            worker.close()


def _start(load: Load, library: Path | None) -> Worker:
    worker = Worker(load.devices if library is None else ())
    variables: dict[str, str] = dict([load.environment.split("=", 1)]) if load.environment else {}
    if library is not None:
        variables |= {
            "GGML_BACKEND_PATH": str(library),
            "GGML_METAL_DEVICES": str(load.n_devices),
            "ORACLE_METAL_DEVICES": describe(load.devices),
        }
    # A worker's process takes its environment from this one.
    before: Mapping[str, str] = dict(os.environ)
    try:
        for name in [name for name in before if name.startswith("GGML_")]:
            del os.environ[name]
        os.environ.update(variables)
        worker.devices()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return worker
