"""``fitter check`` of 20 cases beside 20 runs of upstream's ``llama-fit-params --fit-print on``, in turn.

    python -m benchmarks.check_speed [--runs N]

Each case is another model, of 1B to 1T parameters, with a full tokenizer; both see the same virtual GPU and measure the
same context. Upstream makes one dummy load in each run. Needs ``make tools``; three runs take about a minute on two
cores.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import with_layers
from fitter.machine.gpu import parse_gpus
from tools import shapes, upstream

ROOT = Path(__file__).resolve().parent.parent
GPU = "1024GiB"
CONTEXT = 8192
LAYERS = {
    "llama-3.1-8b": (1, 16),
    "llama-3.1-70b": (40,),
    "qwen3-32b": (32,),
    "qwen3-30b-a3b": (24,),
    "qwen3-235b-a22b": (47,),
    "gpt-oss-120b": (18,),
}
"""Models with fewer layers than the real ones, beside those that have all."""


class ProgramFailed(Exception):
    """A program ended as it should not: there is nothing to compare."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a clock, and of all processors."""

    wall: float
    cpu: float


def write_models(directory: Path) -> tuple[Path, ...]:
    """The 20 models, as sparse files."""
    paths = [shapes.write(name, directory) for name in shapes.SHAPES]
    for name, counts in LAYERS.items():
        for count in counts:
            path = directory / f"{name}-{count}-layers.gguf"
            shapes.write_shape(with_layers(shapes.SHAPES[name], count), path)
            paths.append(path)
    return tuple(paths)


def write_cases(directory: Path, models: Sequence[Path]) -> None:
    """A ``fitter.toml`` with a case for each model."""
    tables = [f'[defaults]\ngpu = ["{GPU}"]\nn_ctx = {CONTEXT}\n']
    tables += [f'[cases."{model.stem}"]\nmodel = "{model.name}"\n' for model in models]
    (directory / "fitter.toml").write_text("\n".join(tables))


def ours(directory: Path) -> None:
    """One check of all cases."""
    _run([sys.executable, "-m", "fitter", "check"], directory, {**os.environ, "PYTHONPATH": str(ROOT)})


def theirs(directory: Path, models: Sequence[Path]) -> None:
    """One run for each model."""
    devices = parse_gpus([GPU])
    for model in models:
        command = upstream.fit_command(model, devices, ["--fit-print", "on", "-c", str(CONTEXT)])
        _run(command, directory, upstream.environment(devices))


def cost(function: Callable[[], object]) -> Cost:
    """What calling ``function`` takes, in this process and those that it starts and waits for."""
    started, before = time.perf_counter(), _processor_seconds()
    function()
    return Cost(time.perf_counter() - started, _processor_seconds() - before)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=directory, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProgramFailed(f"{' '.join(command)}: {done.returncode}: {done.stderr.strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn, and print each run and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each (3)")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs needs at least one")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        models = write_models(directory)
        write_cases(directory, models)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        _run([sys.executable, "-m", "fitter", "lock"], directory, environment)
        # Once unmeasured: an installed package has its byte code, and the files are in memory.
        ours(directory)
        theirs(directory, models[:1])
        walls, cpus = [], []
        print(f"{len(models)} cases, {os.cpu_count()} processors: seconds (of processors)")
        for _ in range(options.runs):
            check, upstreams = cost(lambda: ours(directory)), cost(lambda: theirs(directory, models))
            walls.append(upstreams.wall / check.wall)
            cpus.append(upstreams.cpu / check.cpu)
            print(
                f"fitter check {check.wall:.2f} ({check.cpu:.2f}), llama-fit-params {upstreams.wall:.2f} "
                f"({upstreams.cpu:.2f}): {walls[-1]:.1f} times as fast, {cpus[-1]:.1f} in processor time",
                flush=True,
            )
        print(f"median: {statistics.median(walls):.1f} times as fast, {statistics.median(cpus):.1f} in processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
