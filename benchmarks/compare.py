"""fitter and upstream's llama-fit-params in turn on the same models and virtual machines, as a table.

    python benchmarks/compare.py [--runs N] [--only TEXT] [--output FILE]

Both run as whole processes, one after the other, with the model's header in the page cache. Times are medians; what
counts is the ratio, since both were measured in the same run. Needs ``make tools``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fitter
from fitter.machine.gpu import parse_gpus
from tests import shapes, upstream
from tests.cases import CASES, Case

GIB = 1024**3
MIB = 1024**2
COLUMNS = (
    "case", "ratio", "fitter s", "upstream s", "loads", "upstream", "context", "upstream",
    "weights on devices GiB", "upstream", "MiB left beyond margins", "upstream",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One case; sizes in bytes, ``None`` where upstream found no plan."""

    case: Case
    seconds: float
    upstream_seconds: float
    loads: int
    upstream_loads: int
    n_ctx: int
    upstream_n_ctx: int | None
    weights: int
    upstream_weights: int | None
    left: int
    upstream_left: int | None
    over: tuple[str, ...]


def compare(case: Case, directory: Path, runs: int) -> Result:
    """Run both ``runs`` times in turn and look at what each chose."""
    model = shapes.write(case.shape, directory)
    gpus = parse_gpus(case.gpus)
    words = [word for spec in case.gpus for word in ("--gpu", spec)]
    ours = [sys.executable, "-m", "fitter", str(model), *words, *case.options, "--json"]
    theirs = upstream.fit_command(model, gpus, case.options)
    environment = upstream.environment(gpus)
    seconds: list[float] = []
    upstream_seconds: list[float] = []
    plan: dict[str, Any] = {}
    for _ in range(runs):
        started = time.perf_counter()
        done = subprocess.run(ours, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
        plan = json.loads(done.stdout)
        started = time.perf_counter()
        subprocess.run(theirs, env=environment, capture_output=True, text=True, check=False)
        upstream_seconds.append(time.perf_counter() - started)
    other = upstream.fit(model, gpus, case.options)
    n_ctx = weights = left = None
    over: tuple[str, ...] = ()
    if other is not None:
        measured = fitter.measure(
            model,
            gpus=gpus,
            n_ctx=other.n_ctx,
            n_gpu_layers=other.n_gpu_layers,
            tensor_split=other.tensor_split,
            override_tensor=other.override_tensor,
        )
        beyond = {d["name"]: d["free"] - d["margin"] - measured.on(d["name"]).used for d in plan["devices"]}
        n_ctx, left = other.n_ctx, sum(beyond.values())
        weights = sum(row.model for row in measured.rows if not row.is_host)
        over = tuple(name for name, size in beyond.items() if size < 0)
    return Result(
        case,
        statistics.median(seconds),
        statistics.median(upstream_seconds),
        plan["search"]["dummy_loads"],
        upstream.count_loads(model, gpus, case.options),
        plan["params"]["n_ctx"],
        n_ctx,
        sum(device["model"] for device in plan["devices"]),
        weights,
        sum(device["left"] - device["margin"] for device in plan["devices"]),
        left,
        over,
    )


def cells(result: Result) -> list[str]:
    """A row of the table."""

    def shown(size: int | None, unit: int, digits: int) -> str:
        return "gave up" if size is None else f"{size / unit:.{digits}f}"

    return [
        result.case.name,
        f"{result.upstream_seconds / result.seconds:.1f}×",
        f"{result.seconds:.2f}",
        f"{result.upstream_seconds:.2f}",
        str(result.loads),
        str(result.upstream_loads),
        str(result.n_ctx),
        "gave up" if result.upstream_n_ctx is None else str(result.upstream_n_ctx),
        shown(result.weights, GIB, 2),
        shown(result.upstream_weights, GIB, 2),
        shown(result.left, MIB, 0),
        shown(result.upstream_left, MIB, 0) + (f" (over on {', '.join(result.over)})" if result.over else ""),
    ]


def main() -> int:
    """Print the table as Markdown, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each program per case (5)")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--output", type=Path, help="write the table here too")
    options = parser.parse_args()
    lines = []

    def say(words: list[str]) -> None:
        lines.append("| " + " | ".join(words) + " |")
        print(lines[-1], flush=True)

    say(list(COLUMNS))
    say(["---"] * len(COLUMNS))
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            if options.only in case.name:
                say(cells(compare(case, Path(directory), options.runs)))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
