"""``python -m tools.server_fit``: llama-server's own fit beside fitter, for every case.

First what each measures of the same load, then of each plan what llama-server measures with its arguments, and what it
decides itself. The exit status is 1 if anything differs, or if it gets more than a plan."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fitter.llama.client import Worker
from tools.server_fit.compare import Models, compare_plan, one_load_differs
from tools.server_fit.pairs import Case, cases

Part = Callable[[Case, Models, Worker], tuple[list[str], str]]
"""What differs, and why nothing could."""


def loads(case: Case, models: Models, worker: Worker) -> tuple[list[str], str]:
    """Where one load is not measured the same."""
    return [str(each) for each in one_load_differs(case, models, worker)], ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.server_fit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this word")
    parser.add_argument("--draw", type=int, metavar="N", help="so many of the cases")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--part", choices=("loads", "plans"), help="one half of the comparison")
    options = parser.parse_args()
    wanted = [case for case in cases() if options.only in case.name]
    if options.draw is not None:
        wanted = random.Random(options.seed).sample(wanted, min(options.draw, len(wanted)))
    parts: dict[str, Part] = {"loads": loads, "plans": compare_plan}
    n_different, notes = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        models = Models(Path(directory))
        for name, part in parts.items():
            if options.part not in (None, name):
                continue
            for case in wanted:
                found, note = part(case, models, worker)
                n_different += bool(found)
                notes[note] += 1
                for each in found:
                    print(f"{name}: {case.name}: {each}", flush=True)
    print(f"{len(wanted)} cases, {n_different} differences")
    for note, count in notes.items():
        print(f"{count}: {note or 'compared'}")
    return 1 if n_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
