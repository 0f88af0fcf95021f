"""Draw, ask and store loads on Vulkan and Metal devices (tests/data/vulkan, tests/data/metal)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fitter.llama.build.build_folder import PYTHON
from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice
from tools.builds.environment import with_variables
from tools.comparisons.load_answers import MODELS, answer, draw_params, params_of, params_text, read_table, write_table

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MEMORY = 2_000_000 * 2**20
"""Bytes that every device has."""


@dataclass(frozen=True)
class Backend:
    """A backend: its name as a folder of tests/data, and what loads on it are drawn from.

    ``drivers`` is empty where the backend has only one, ``n_devices`` and ``environments`` are what is drawn.
    """

    name: str
    device: str
    drivers: tuple[str, ...]
    n_devices: tuple[int, ...]
    environments: tuple[str, ...]

    @property
    def table(self) -> Path:
        """The file of the stored answers."""
        return DATA / self.name / "bytes.csv.gz"


VULKAN = Backend(
    "vulkan",
    "Vulkan",
    ("radv", "nvidia", "anv", "lavapipe"),
    (1, 1, 1, 2, 3),
    (
        "GGML_VK_DISABLE_GRAPH_OPTIMIZE=1",
        "GGML_VK_SUBALLOCATION_BLOCK_SIZE=268435456",
        "GGML_VK_FORCE_MAX_ALLOCATION_SIZE=400000000",
        "GGML_VK_FORCE_MAX_BUFFER_SIZE=300000000",
        "GGML_OP_OFFLOAD_MIN_BATCH=1",
        "GGML_VK_DISABLE_F16=1",
    ),
)
METAL = Backend(
    "metal",
    "MTL",
    (),
    (1, 1, 1, 2),
    ("GGML_METAL_GRAPH_OPTIMIZE_DISABLE=1", "GGML_METAL_BF16_DISABLE=1", "GGML_OP_OFFLOAD_MIN_BATCH=1"),
)


@dataclass(frozen=True)
class Load:
    """One load on ``n_devices`` devices of a driver; ``environment`` is ``NAME=value`` or empty."""

    backend: Backend
    model: str
    driver: str
    n_devices: int
    environment: str
    params: Params

    @property
    def session(self) -> tuple[str, str, int]:
        """The facts that loads of one process share."""
        return self.environment, self.driver, self.n_devices

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The virtual devices that stand for the real ones."""
        profile = f"{self.backend.name}-{self.driver}" if self.driver else self.backend.name
        names = [f"{self.backend.device}{i}" for i in range(self.n_devices)]
        return tuple(VirtualDevice(name, "fake", profile, 0, MEMORY, MEMORY) for name in names)

    def __str__(self) -> str:
        words = (self.model, self.driver, f"x{self.n_devices}", self.environment, params_text(self.params))
        return " ".join(word for word in words if word)


def draw(backend: Backend, count: int, seed: int) -> list[Load]:
    """Draw ``count`` loads, spread evenly over models and drivers; loads of one session follow each other."""
    dice = random.Random(seed)
    drivers = backend.drivers or ("",)
    loads = []
    for number in range(count):
        model = list(MODELS)[number % len(MODELS)]
        driver = drivers[number // len(MODELS) % len(drivers)]
        n_devices = dice.choice(backend.n_devices)
        environment = dice.choice(backend.environments) if dice.random() < 0.25 else ""
        loads.append(Load(backend, model, driver, n_devices, environment, draw_params(dice, model)))
    return sorted(loads, key=lambda load: load.session)


def answers(
    loads: Iterable[Load],
    model: Callable[[Load], Path],
    real: Callable[[Load], Mapping[str, str]] | None = None,
    llama_cpp: str = PYTHON,
) -> Iterator[str]:
    """Answer each load (see ``load_answers.answer``), by the profile, or by the backend with ``real``.

    ``real`` returns the variables with which a process has the backend and the load's devices, ``llama_cpp`` is the
    build that loads. Loads of one session follow each other. Raises ``SystemExit`` where the backend has other devices.
    """
    for _, group in itertools.groupby(loads, key=lambda load: load.session if real else load.environment):
        worker: Worker | None = None
        try:
            for load in group:
                variables = dict([load.environment.split("=", 1)]) if load.environment else {}
                with with_variables({**variables, **(real(load) if real else {})}):
                    worker = worker or Worker(llama_cpp=llama_cpp)
                    worker.configure(() if real else load.devices)
                    n_devices = sum(device.type != "cpu" for device in worker.devices())
                    if n_devices != load.n_devices:
                        raise SystemExit(f"{load.backend.name}: {n_devices} devices instead of {load.n_devices}")
                    said = answer(worker, model(load), load.params)
                yield said
                if said.startswith("FAIL llama.cpp"):
                    # A worker that crashed would start again without the variables.
                    worker.close()
                    worker = None
        finally:
            if worker is not None:
                worker.close()


@cache
def stored(backend: Backend) -> tuple[tuple[Load, str], ...]:
    """Read every stored load with the backend's answer; loads of one session follow each other."""
    rows = [
        (
            Load(
                backend,
                row["model"],
                row.get("driver", ""),
                int(row["n_devices"]),
                row["environment"],
                params_of(row["params"]),
            ),
            row["result"],
        )
        for row in read_table(backend.table)
    ]
    return tuple(sorted(rows, key=lambda row: row[0].session))


def store(backend: Backend, answered: Iterable[tuple[Load, str]]) -> None:
    """Write the table of stored loads; the same answers make the same file."""
    has_driver = bool(backend.drivers)
    columns = ("model", *(["driver"] * has_driver), "n_devices", "environment", "params", "result")
    rows = (
        (
            load.model,
            *([load.driver] * has_driver),
            load.n_devices,
            load.environment,
            params_text(load.params),
            result,
        )
        for load, result in answered
    )
    write_table(backend.table, (columns, *rows))
