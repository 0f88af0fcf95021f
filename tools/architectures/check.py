"""Compare plans that were searched for on a skeleton of a model's header with those searched for on the model itself.

``make test-architectures`` builds upstream's test-llama-archs, lets it write a tiny model of every architecture that it
knows, and runs this on them. ``--shapes`` takes the shapes of large models instead, vocabularies included.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tools.architectures.compare import (
    Checked,
    check,
    kept_workers,
    machine_for_context,
    machines_for_shape,
    machines_for_size,
    with_context,
)
from tools.models import shapes

N_CTX = 2048
"""A second copy of each tiny model has eight times that, and a machine for it: their own leaves nothing to fit."""


def main(arguments: Sequence[str]) -> int:
    """Run the comparison; the exit status is 0 if every plan is equal, 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="tools.architectures.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, help="a directory of GGUF files, such as test-llama-archs -o writes")
    parser.add_argument(
        "--shapes",
        action="store_true",
        help="the shapes of tools/models/shapes.py, on tools/comparisons/cases.py's machines",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has TEXT in its name")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time (2)")
    options = parser.parse_args(arguments)
    if options.models is None and not options.shapes:
        parser.error("say --models DIR, --shapes or both")

    start = time.monotonic()
    checked: list[Checked] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_workers())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fitter-architectures-")))
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        tasks: list[Iterator[Checked]] = []
        if options.models is not None:
            files = sorted(path for path in options.models.glob("*.gguf") if options.only in path.stem)
            tasks.append(pool.map(lambda path: _tiny(path, directory), files))
        if options.shapes:
            names = [name for name in shapes.SHAPES if options.only in name]
            tasks.append(pool.map(lambda name: _shape(name, directory), names))
        for result in itertools.chain(*tasks):
            checked.append(result)
            print(result, flush=True)
    if not checked:
        print(f"no model has {options.only!r} in its name" if options.only else "no models", file=sys.stderr)
        return 2
    print(_summary(checked), f"{time.monotonic() - start:.0f} s", sep="\n")
    return int(any(result.verdict == "differs" for result in checked))


def _tiny(path: Path, directory: Path) -> Checked:
    longer = with_context(path, directory / path.name, 8 * N_CTX)
    try:
        wanted = [(path, machine) for machine in machines_for_size(path)]
        return check(path.stem, [*wanted, (longer, machine_for_context(longer, N_CTX))])
    finally:
        longer.unlink()


def _shape(name: str, directory: Path) -> Checked:
    path = shapes.write(name, directory)
    wanted = [(path, machine) for machine in machines_for_shape(name, path)]
    split = shapes.write_split(name, directory, 3)
    wanted.append((split, replace(wanted[-1][1], name=f"three files, {wanted[-1][1].name}")))
    return check(name, wanted)


def _summary(checked: Sequence[Checked]) -> str:
    verdicts = {
        "equal": "the same plans on every machine, and the same bytes",
        "fell back": "the same plans on every machine; the skeleton is of no use",
        "refused": "the same error on every machine",
        "differs": "another plan, or another error",
    }
    lines = []
    for verdict, meaning in verdicts.items():
        names = [result.name for result in checked if result.verdict == verdict]
        listed = f": {', '.join(names)}" if names and verdict != "equal" else ""
        lines.append(f"{len(names):4} {verdict:9}  {meaning}{listed}")
    n_plans = sum(len(result.comparisons) for result in checked)
    n_placements = sum(result.n_placements for result in checked)
    loads = [sum(comparison.dummy_loads[i] for result in checked for comparison in result.comparisons) for i in (0, 1)]
    seconds = [sum(comparison.seconds[i] for result in checked for comparison in result.comparisons) for i in (0, 1)]
    lines.append(
        f"{len(checked)} models, {n_plans} pairs of plans, {n_placements} placements measured both ways; "
        f"with the skeleton {loads[0]} dummy loads in {seconds[0]:.1f} s, without {loads[1]} in {seconds[1]:.1f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
