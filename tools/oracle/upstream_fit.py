"""Upstream's ``llama-fit-params`` on the oracle and on the profile: the same devices must get the same arguments."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fitter.llama.types import VirtualDevice, describe
from fitter.machine.gpu_catalogue import capability
from tools.comparisons.cuda_reference import write_model
from tools.comparisons.upstream import environment, fit_command
from tools.models import shapes

MIB = 2**20
# Free MiB of each device, by compute capability: one small card to more than the largest shape needs.
SETS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((750, 5800),),
    ((890, 24077),),
    ((610, 10800), (860, 23688)),
    ((1200, 31600), (1200, 31600)),
    ((890, 48270), (890, 48270), (860, 23688)),
    tuple((900, 80000) for _ in range(8)),
)

ROCM_SETS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("gfx1030", 5800),),
    (("gfx1100", 24400),),
    (("gfx1201", 16000), ("gfx1100", 24400)),
    (("gfx906", 32600), ("gfx906", 32600)),
    (("gfx1151", 96000),),
    tuple(("gfx942", 190000) for _ in range(8)),
)


def compare(
    models: Path, oracle: Path, jobs: int = 2, sets: Sequence[Sequence[tuple[int | str, int]]] = SETS
) -> tuple[int, list[str]]:
    """How many pairs of shape and devices were tried, and a line for each that differs."""
    pairs = list(itertools.product(shapes.SHAPES, sets))
    for shape in shapes.SHAPES:
        write_model(shape, models)

    def one(pair: tuple[str, Sequence[tuple[int | str, int]]]) -> str | None:
        shape, cards = pair
        devices = tuple(_device(i, kind, free * MIB) for i, (kind, free) in enumerate(cards))
        command = fit_command(write_model(shape, models), devices)
        profile = environment(devices)
        real = {**profile, "GGML_BACKEND_PATH": str(oracle), "FITTER_CUDART_DEVICES": describe(devices)}
        said = [_run(command, variables) for variables in (real, profile)]
        return None if said[0] == said[1] else f"{shape} on {cards}: oracle {said[0]}, profile {said[1]}"

    with ThreadPoolExecutor(jobs) as pool:
        return len(pairs), [line for line in pool.map(one, pairs) if line is not None]


def _device(index: int, kind: int | str, free: int) -> VirtualDevice:
    if isinstance(kind, str):
        return VirtualDevice(f"ROCm{index}", "Card", "rocm", capability(kind), free, free)
    return VirtualDevice(f"CUDA{index}", "Card", "cuda", kind, free, free)


def _run(command: list[str], variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()
