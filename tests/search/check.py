"""Hold the search to its promises on random machines.

python -m tests.search.check [--machines 1000] [--first 0] [--jobs 2] [--upstream SHARE] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fitter.llama.client import Worker
from tests.search.machines import better, draw, renamed
from tests.search.outcomes import Asking, Outcome, worse


def check(number: int, asking: Asking, base_only: bool = False) -> dict[str, Any]:
    """What is wrong with the plans for the machine with a ``number`` and those that are better."""
    machine = draw(number)
    base = asking.fit(machine)
    found: list[str] = []
    if not base_only:
        for what, other in better(machine):
            after = asking.fit(other)
            if said := worse(after, base):
                found.append(f"{what}: {said}")
        if gpus := renamed(machine):
            other_names = asking.fit(machine, gpus)
            if (other_names.placement, other_names.n_ctx) != (base.placement, base.n_ctx):
                found.append(f"renamed: {base.placement} {base.n_ctx} -> {other_names.placement} {other_names.n_ctx}")
    return {"machine": str(machine), "base": asdict(base), "found": found}


def _range(arguments: tuple[int, int, int, bool]) -> None:
    first, last, step, base_only = arguments
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        asking = Asking(Path(directory), worker)
        for number in range(first, last, step):
            print(json.dumps(check(number, asking, base_only)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--base", action="store_true")
    options = parser.parse_args(arguments)
    _range((options.first, options.first + options.machines, options.step, options.base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
