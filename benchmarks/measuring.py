"""Run fitter and upstream's llama-fit-params as whole processes, and note the time, the loads and the memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import fitter
from benchmarks.results import Chosen, Comparison, Growth, Memory, Program
from fitter.llama.types import VirtualDevice
from fitter.machine.gpu import parse_gpus
from tools.comparisons import upstream
from tools.comparisons.cases import Case
from tools.models import shapes
from tools.models.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024**2
SAMPLE_SECONDS = 0.003

DEVICE_COUNTS = (1, 2, 4, 8, 15, 16)
LAYER_COUNTS = (16, 32, 64, 100)
BIG = "kimi-k2"
BIG_DEVICE = "32GiB"
LAYERED = "qwen3-235b-a22b"
LAYERED_DEVICES = 8
# the margin, and what does not grow with the layers
LAYERED_SPARE_MIB = 1400


class ProgramFailed(Exception):
    """A program ended as it should not: there is nothing to compare."""


def compare(case: Case, directory: Path, runs: int) -> Comparison:
    """Look at both on ``case`` once, unmeasured, then time them ``runs`` times in turn. Raises ``ProgramFailed``.

    fitter is asked for the context that upstream chose, and once more for its own choice: upstream takes no more than
    the smallest context where weights leave the devices, and does not ask how fast a plan is.
    """
    model = shapes.write(case.shape, directory)
    shape = shapes.SHAPES[case.shape]
    gpus = parse_gpus(case.gpus)
    theirs, their_environment = upstream.fit_command(model, gpus, case.options), upstream.environment(gpus)
    # The load count is in the log, which changes neither the plan nor the memory.
    done, their_memory = watch([*theirs, *upstream.VERBOSE], their_environment)
    other, their_loads = upstream.plan_of(done), upstream.loads_of(done)
    environment = _fitter_environment(directory)
    open_ = _fitter_command(model, case.gpus, case.options)
    ours = open_ if other is None else _fitter_command(model, case.gpus, ("-c", str(other.n_ctx)))
    plans, memories = [], []
    for command in (ours, open_):
        _answer(_run(command, environment))
        watched, memory = watch(command, environment)
        plans.append(_answer(watched))
        memories.append(memory)
    seconds: list[list[float]] = [[], []]
    their_seconds: list[float] = []
    for _ in range(runs):
        for times, command in zip(seconds, (ours, open_), strict=True):
            times.append(_seconds(command, environment, 0))
        their_seconds.append(_seconds(theirs, their_environment, done.returncode))
    same, own = (
        Program(tuple(times), plan["search"]["dummy_loads"], memory, _chosen(plan))
        for times, plan, memory in zip(seconds, plans, memories, strict=True)
    )
    return Comparison(
        name=case.name,
        n_devices=len(gpus),
        n_vocab=shape.n_vocab,
        n_params=n_params(shape),
        fitter=same,
        open=own,
        upstream=Program(
            tuple(their_seconds), their_loads, their_memory, _upstream_chosen(other, model, gpus, plans[0]["devices"])
        ),
    )


def grow_devices(directory: Path, runs: int) -> tuple[Growth, ...]:
    """A model larger than any of the machines, on more and more devices of one size. Raises ``ProgramFailed``."""
    model = shapes.write(BIG, directory)
    total = shapes.SHAPES[BIG].bytes
    return _grow([(n, model, (f"{n}x {BIG_DEVICE}",), total) for n in DEVICE_COUNTS], directory, runs)


def grow_layers(directory: Path, runs: int) -> tuple[Growth, ...]:
    """More and more layers of one kind on devices with room for half of the weights. Raises ``ProgramFailed``."""
    rows = []
    for n in LAYER_COUNTS:
        shape = with_layers(shapes.SHAPES[LAYERED], n)
        model = directory / f"{LAYERED}-{n}-layers.gguf"
        shapes.write_shape(shape, model)
        size = shape.bytes // 2 // LAYERED_DEVICES // MIB + LAYERED_SPARE_MIB
        rows.append((n, model, (f"{LAYERED_DEVICES}x {size}MiB",), shape.bytes))
    return _grow(rows, directory, runs)


def with_layers(shape: Shape, n_layer: int) -> Shape:
    """``shape`` with ``n_layer`` layers, as many of each size, proportionally, as it has itself."""
    layers: dict[int, list[shapes.Tensor]] = {}
    tensors = []
    for tensor in shape.tensors:
        if match := re.match(r"blk\.(\d+)\.", tensor.name):
            layers.setdefault(int(match[1]), []).append(tensor)
        else:
            tensors.append(tensor)
    for i in range(n_layer):
        for tensor in layers[i * shape.n_layer // n_layer]:
            tensors.append(replace(tensor, name=f"blk.{i}." + tensor.name.split(".", 2)[2]))
    return replace(shape, tensors=tuple(tensors), metadata={**shape.metadata, ".block_count": n_layer})


def watch(command: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.CompletedProcess[str], Memory]:
    """Run ``command`` and look at the memory of its process tree every few milliseconds."""
    peak = processes = 0
    highest: dict[int, int] = {}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=errors) as process:
            while process.poll() is None:
                shares = []
                for pid in _tree(process.pid):
                    # gone, or going: its memory is no longer its own
                    with contextlib.suppress(OSError, LookupError):
                        shares.append(_kib(f"/proc/{pid}/smaps_rollup", "Pss"))
                        highest[pid] = _kib(f"/proc/{pid}/status", "VmHWM")
                peak, processes = max(peak, sum(shares)), max(processes, len(shares))
                time.sleep(SAMPLE_SECONDS)
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(list(command), process.returncode, output.read(), errors.read())
    return done, Memory(peak, sum(highest.values()), processes)


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def _kib(path: str, field: str) -> int:
    """Bytes of a line of a file in /proc. Raises ``OSError`` or ``LookupError`` if the process is gone."""
    with open(path) as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"{path} has no {field}")


def _grow(rows: Sequence[tuple[int, Path, tuple[str, ...], int]], directory: Path, runs: int) -> tuple[Growth, ...]:
    """Time the rows in turn, so that all of them see the same machine."""
    environment = _fitter_environment(directory)
    commands = [_fitter_command(model, gpus) for _, model, gpus, _ in rows]
    plans = [_answer(_run(command, environment)) for command in commands]
    rounds = [[_seconds(command, environment, 0) for command in commands] for _ in range(runs)]
    return tuple(
        Growth(
            n=n,
            seconds=tuple(seconds[i] for seconds in rounds),
            loads=plans[i]["search"]["dummy_loads"],
            used=sum(device["used"] > 0 for device in plans[i]["devices"]),
            weights=sum(device["model"] for device in plans[i]["devices"]),
            total=total,
        )
        for i, (n, _, _, total) in enumerate(rows)
    )


def _fitter_command(model: Path, gpus: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    words = [word for spec in gpus for word in ("--gpu", spec)]
    return [sys.executable, "-m", "fitter", str(model), *words, *options, "--json"]


def _fitter_environment(directory: Path) -> dict[str, str]:
    """Without what ``fitter calibrate`` may have stored for this machine."""
    return {**os.environ, "XDG_CONFIG_HOME": str(directory / "configuration")}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def _seconds(command: Sequence[str], environment: Mapping[str, str], status: int) -> float:
    """Seconds of the whole process, which must end with ``status``: one that fails is no quick one."""
    started = time.perf_counter()
    done = _run(command, environment)
    seconds = time.perf_counter() - started
    if done.returncode != status:
        raise ProgramFailed(f"{Path(command[0]).name} ended with {done.returncode}, and with {status} before")
    return seconds


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise ProgramFailed(f"fitter ended with {done.returncode}: {said[-1] if said else 'nothing said'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def n_params(shape: Shape) -> int:
    """Elements of all tensors."""
    count = 0
    for tensor in shape.tensors:
        elements = 1
        for size in tensor.shape:
            elements *= size
        count += elements
    return count


def _chosen(plan: Mapping[str, Any]) -> Chosen:
    devices = plan["devices"]
    return Chosen(
        n_ctx=plan["params"]["n_ctx"],
        weights=sum(device["model"] for device in devices),
        left=sum(device["left"] - device["margin"] for device in devices),
    )


def _upstream_chosen(
    plan: upstream.UpstreamPlan | None,
    model: Path,
    gpus: Sequence[VirtualDevice],
    devices: Sequence[Mapping[str, Any]],
) -> Chosen | None:
    """Upstream's plan as fitter measures it, beside the margins of ``devices``."""
    if plan is None:
        return None
    measured = fitter.measure(model, gpus=gpus, **plan.keywords)
    left = {d["name"]: d["free"] - d["margin"] - measured.on(d["name"]).used for d in devices}
    return Chosen(
        n_ctx=plan.n_ctx,
        weights=sum(row.model for row in measured.rows if not row.is_host),
        left=sum(left.values()),
        over=tuple(name for name, size in left.items() if size < 0),
    )
