"""Loads that ggml-metal's own C++ has answered (tests/data/metal/README.md), and new ones to compare the profile on."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice, describe
from tools import shapes
from tools.environment import with_variables
from tools.vulkan.loads import MODELS, answer, draw_params, params_of, params_text, write_table

TABLE = Path(__file__).resolve().parents[2] / "tests" / "data" / "metal" / "bytes.csv.gz"
COLUMNS = ("model", "n_devices", "environment", "params", "result")
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


def answers(loads: Sequence[Load], directory: Path, library: Path | None) -> Iterator[str]:
    """What ggml-metal's own C++ (``library``, see build.py) says to each load; without it, the profile."""
    worker: Worker | None = None
    session = None
    try:
        for load in loads:
            if worker is None or load.session != session:
                if worker is not None:
                    worker.close()
                worker, session = _start(load, library), load.session
            said = answer(worker, shapes.write(load.model, directory, vocab=False), load.params)
            if said.startswith("FAIL llama.cpp"):
                # It would start again without the environment.
                worker.close()
                worker = None
            yield said
    finally:
        if worker is not None:
            worker.close()


@cache
def known() -> tuple[tuple[Load, str], ...]:
    """Every load of the table with its answer, those of one session next to each other."""
    with gzip.open(TABLE, "rt", newline="") as file:
        rows = [
            (Load(row["model"], int(row["n_devices"]), row["environment"], params_of(row["params"])), row["result"])
            for row in csv.DictReader(file)
        ]
    return tuple(sorted(rows, key=lambda row: row[0].session))


def store(answers: Iterable[tuple[Load, str]]) -> None:
    """Write the table; the same answers make the same file."""
    rows = (
        (load.model, load.n_devices, load.environment, params_text(load.params), result) for load, result in answers
    )
    write_table(TABLE, (COLUMNS, *rows))


def _start(load: Load, library: Path | None) -> Worker:
    worker = Worker(load.devices if library is None else ())
    variables: dict[str, str] = dict([load.environment.split("=", 1)]) if load.environment else {}
    if library is not None:
        variables |= {
            "GGML_BACKEND_PATH": str(library),
            "GGML_METAL_DEVICES": str(load.n_devices),
            "ORACLE_METAL_DEVICES": describe(load.devices),
        }
    with with_variables(variables):
        worker.devices()
    return worker
