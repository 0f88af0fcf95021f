"""fitter and upstream's llama-fit-params in turn on the same models and virtual machines, and how fitter's time grows.

    python -m benchmarks.compare [--runs N] [--only TEXT] [--results FILE] [--output FILE]
    python -m benchmarks.compare --from FILE [--results FILE]

Needs ``make tools``. Five runs take some 20 minutes on two cores, most of them upstream's on eight devices; nothing
else should run meanwhile. The tables go to benchmarks/RESULTS.md, to stdout where --only leaves cases out.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fitter
from benchmarks import measuring, tables
from benchmarks.results import Results, Setting, load, save
from fitter.machine.gpu import parse_gpus
from tools.comparisons.cases import CASES, Case
from tools.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


def setting(runs: int) -> Setting:
    """What is compared here, and on what."""
    pin = dict(re.findall(r'^(\w+) = "(.*)"$', (ROOT / "vendor" / "llama.cpp" / "pin.toml").read_text(), re.MULTILINE))
    return Setting(
        date=datetime.date.today().isoformat(),
        fitter=fitter.__version__,
        commit=_commit(),
        llama_cpp_python=pin["version"],
        llama_cpp=pin["commit"][:9],
        python=platform.python_version(),
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        runs=runs,
    )


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return done.stdout.strip()


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


@dataclass(frozen=True)
class Part:
    """Something to measure: ``add`` puts it into the results; ``weight`` is, roughly, what its time grows with."""

    name: str
    weight: float
    add: Callable[[Results, Path, int], Results]


def _part(case: Case) -> Part:
    def add(results: Results, directory: Path, runs: int) -> Results:
        return replace(results, comparisons=(*results.comparisons, measuring.compare(case, directory, runs)))

    # upstream, which takes most of the time, searches for each device again
    return Part(case.name, 1 + len(parse_gpus(case.gpus)) * len(SHAPES[case.shape].tensors) / 1000, add)


PARTS = (
    *map(_part, CASES),
    Part("scaling/devices", 2, lambda results, *how: replace(results, devices=measuring.grow_devices(*how))),
    Part("scaling/layers", 2, lambda results, *how: replace(results, layers=measuring.grow_layers(*how))),
)


def measure(only: str, runs: int, output: Path | None) -> Results:
    """Measure every part whose name contains ``only``. What is there after each part is written to ``output``."""
    results = Results(setting(runs))
    parts = [part for part in PARTS if only in part.name]
    progress = _Progress([part.weight for part in parts])
    with tempfile.TemporaryDirectory() as directory:
        for part in parts:
            try:
                results = part.add(results, Path(directory), runs)
            except measuring.ProgramFailed as error:
                results = replace(results, failed=(*results.failed, f"{part.name}: {error}"))
            progress.say(_last(results, part.name))
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                save(results, output)
    return results


def _last(results: Results, name: str) -> str:
    """What to say about the part ``name``, which is the last that was measured."""
    if results.failed and results.failed[-1].startswith(f"{name}: "):
        return results.failed[-1]
    if results.comparisons and results.comparisons[-1].name == name:
        last = results.comparisons[-1]
        return f"{name}: {tables.ratio(last):.1f}×, {last.fitter.loads} loads"
    return name


class _Progress:
    """Says on stderr what is done, and how long the rest will take if the weights are right."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._done = 0
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        self._done += 1
        elapsed = (time.monotonic() - self._started) / 60
        left = elapsed * sum(self._weights[self._done :]) / sum(self._weights[: self._done])
        said = f"[{self._done}/{len(self._weights)}] {text}; {elapsed:.1f} minutes so far, some {left:.1f} left"
        print(said, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured, and write the tables. The exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each program per case (5)")
    parser.add_argument("--only", default="", help="cases whose name contains this text, or scaling/devices, …/layers")
    parser.add_argument("--results", type=Path, help="write the tables here (benchmarks/RESULTS.md)")
    parser.add_argument("--output", type=Path, help="keep the raw results here, as JSON")
    parser.add_argument("--from", dest="source", type=Path, help="write the tables of raw results, measure nothing")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs needs at least one")
    if options.source is not None:
        results = load(options.source)
    else:
        results = measure(options.only, options.runs, options.output)
        if not (results.comparisons or results.devices or results.layers or results.failed):
            parser.error(f"no case has {options.only!r} in its name")
    text = tables.document(results)
    if options.only and options.results is None:
        print(text, end="")
    else:
        (options.results or RESULTS).write_text(text)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
