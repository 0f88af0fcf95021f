"""Upstream's own ``llama-fit-params`` on the same virtual devices: the second opinion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.llama.types import VirtualDevice, describe

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("FITTER_TOOLS", ROOT / "build" / "llama" / "bin"))
BACKEND = ROOT / "fitter" / "llama" / "libggml-fitter.so"
MIB = 1024 * 1024
VERBOSE = ("-lv", "5")


@dataclass(frozen=True)
class UpstreamPlan:
    """What upstream's fit chose; ``seconds`` of its whole process are measured by the caller."""

    arguments: tuple[str, ...]
    n_ctx: int
    n_gpu_layers: int
    tensor_split: tuple[float, ...] | None
    override_tensor: tuple[str, ...]

    @property
    def keywords(self) -> dict[str, Any]:
        """Its placement and context for ``fitter.measure`` and ``fitter.estimate``."""
        return {
            "n_ctx": self.n_ctx,
            "n_gpu_layers": self.n_gpu_layers,
            "tensor_split": self.tensor_split,
            "override_tensor": self.override_tensor,
        }


@dataclass(frozen=True)
class UpstreamRow:
    """A line of ``--fit-print``: MiB, rounded down."""

    name: str
    model: int
    context: int
    compute: int


def tool(name: str) -> Path:
    """An upstream program built from vendor; fails with what to do where it was not."""
    path = TOOLS / name
    assert path.exists(), f"{path} is not there: run 'make tools'"
    return path


def environment(devices: Sequence[VirtualDevice]) -> dict[str, str]:
    """The environment in which any llama.cpp program sees ``devices``."""
    return {**os.environ, "GGML_BACKEND_PATH": str(BACKEND), "FITTER_DEVICES": describe(devices)}


def fit_command(model: Path, devices: Sequence[VirtualDevice], extra: Sequence[str] = ()) -> list[str]:
    """The command that fits ``model`` to ``devices``: named, because only then upstream looks for more backends."""
    names = ",".join(device.name for device in devices)
    return [str(tool("llama-fit-params")), "-m", str(model), "-dev", names, *extra]


def run(command: Sequence[str], devices: Sequence[VirtualDevice]) -> subprocess.CompletedProcess[str]:
    """Run an upstream program on virtual devices, which it looks for only where ``-dev`` names some."""
    if devices and not {"-dev", "--device"} & set(command):
        command = [*command, "-dev", ",".join(device.name for device in devices)]
    return subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=600, check=False)


def fit(model: Path, devices: Sequence[VirtualDevice], extra: Sequence[str] = ()) -> UpstreamPlan | None:
    """What upstream chooses, ``None`` where it gives up."""
    return plan_of(run(fit_command(model, devices, extra), devices))


def plan_of(done: subprocess.CompletedProcess[str]) -> UpstreamPlan | None:
    """The plan in what ``llama-fit-params`` said, ``None`` where it gave up."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("-c ")]
    return parse_plan(lines[-1]) if done.returncode == 0 and lines else None


def parse_plan(line: str) -> UpstreamPlan:
    """The arguments that ``llama-fit-params`` printed."""
    return plan_from(shlex.split(line))


def plan_from(words: Sequence[str]) -> UpstreamPlan:
    """The plan that upstream's arguments stand for."""
    found = dict(zip(words[::2], words[1::2], strict=True))
    return UpstreamPlan(
        tuple(words),
        int(found["-c"]),
        int(found["-ngl"]),
        tuple(map(float, found["-ts"].split(","))) if "-ts" in found else None,
        tuple(found["-ot"].split(",")) if "-ot" in found else (),
    )


def fit_print(model: Path, devices: Sequence[VirtualDevice], arguments: Sequence[str]) -> dict[str, UpstreamRow]:
    """MiB per device, and of ``Host``, that upstream measures with ``arguments``."""
    done = run([*fit_command(model, devices, ["--fit-print", "on"]), *arguments], devices)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"(\S+) (\d+) (\d+) (\d+) *", line):
            rows[match[1]] = UpstreamRow(match[1], *map(int, match.groups()[1:]))
    return rows


def count_loads(model: Path, devices: Sequence[VirtualDevice], extra: Sequence[str] = ()) -> int:
    """Dummy loads that upstream's fit makes."""
    return loads_of(run(fit_command(model, devices, [*extra, *VERBOSE]), devices))


def loads_of(done: subprocess.CompletedProcess[str]) -> int:
    """Dummy loads in the log of a program that ran with ``VERBOSE``."""
    return len(re.findall(r"llama_model_loader: loaded meta data", done.stdout + done.stderr))
