"""Upstream's ``llama-fit-params`` on the oracle and on the profile: the same devices must get the same arguments."""

from __future__ import annotations

import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fitter.llama.client import describe
from fitter.llama.types import VirtualDevice
from tests import shapes
from tests.cuda_reference import write_model
from tests.upstream import environment, fit_command

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


def compare(models: Path, oracle: Path, jobs: int = 2) -> tuple[int, list[str]]:
    """How many pairs of shape and devices were tried, and a line for each that differs."""
    pairs = list(itertools.product(shapes.SHAPES, SETS))
    for shape in shapes.SHAPES:
        write_model(shape, models)

    def one(pair: tuple[str, tuple[tuple[int, int], ...]]) -> str | None:
        shape, cards = pair
        devices = tuple(
            VirtualDevice(f"CUDA{i}", "Card", "cuda", capability, free * MIB, free * MIB)
            for i, (capability, free) in enumerate(cards)
        )
        command = fit_command(write_model(shape, models), devices)
        profile = environment(devices)
        real = {**profile, "GGML_BACKEND_PATH": str(oracle), "ORACLE_DEVICES": describe(devices)}
        said = [_run(command, variables) for variables in (real, profile)]
        return None if said[0] == said[1] else f"{shape} on {cards}: oracle {said[0]}, profile {said[1]}"

    with ThreadPoolExecutor(jobs) as pool:
        return len(pairs), [line for line in pool.map(one, pairs) if line is not None]


def _run(command: list[str], variables: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()
