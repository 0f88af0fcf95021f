"""What a run of the benchmark found, as it is kept in JSON: seconds, bytes and counts as measured, nothing derived."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.processes import wire


@dataclass(frozen=True)
class Memory:
    """Peak resident memory of a program and all of its child processes together, in bytes.

    ``peak`` counts a page that several processes map once (the kernel's PSS, sampled). ``at_most`` is the sum of every
    process's own high-water mark: it counts such a page for each of them, and no peak between two samples escapes it.
    """

    peak: int
    at_most: int
    processes: int


@dataclass(frozen=True)
class Chosen:
    """The plan. Sizes in bytes: ``weights`` on the devices, ``left`` there beyond all margins; ``over`` its margin."""

    n_ctx: int
    weights: int
    left: int
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """One program on one case: seconds of each whole process, dummy loads, ``None`` where it found no plan."""

    seconds: tuple[float, ...]
    loads: int
    memory: Memory
    chosen: Chosen | None


@dataclass(frozen=True)
class Comparison:
    """fitter and upstream's ``llama-fit-params`` on the same model and devices.

    ``fitter`` was asked for the context that upstream chose, ``open`` for its own choice.
    """

    name: str
    n_devices: int
    n_vocab: int
    n_params: int
    fitter: Program
    open: Program
    upstream: Program


@dataclass(frozen=True)
class Growth:
    """fitter on ``n`` devices or layers; ``weights`` of ``total`` bytes are on the ``used`` devices."""

    n: int
    seconds: tuple[float, ...]
    loads: int
    used: int
    weights: int
    total: int


@dataclass(frozen=True)
class Setting:
    """What was compared, and on what."""

    date: str
    fitter: str
    commit: str
    llama_cpp_python: str
    llama_cpp: str
    python: str
    cpu: str
    cores: int
    runs: int


@dataclass(frozen=True)
class Results:
    """Everything that one run found; ``failed`` says which parts could not be measured, and why."""

    setting: Setting
    comparisons: tuple[Comparison, ...] = ()
    devices: tuple[Growth, ...] = ()
    layers: tuple[Growth, ...] = ()
    failed: tuple[str, ...] = ()


def save(results: Results, path: Path) -> None:
    """Write ``results`` as JSON."""
    path.write_text(json.dumps(wire.encode(results), indent=1) + "\n")


def load(path: Path) -> Results:
    """Read what ``save`` wrote. Raises ``TypeError`` where it is something else."""
    results: Results = wire.decode(Results, json.loads(path.read_text()))
    return results
