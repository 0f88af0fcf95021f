"""``python -m tools.server_fit``: llama-server's own fit beside fitter, for every case.

First what each measures of the same load, then of each plan what llama-server measures with its arguments, and what it
decides itself. The exit status is 1 if anything differs, or if it gets more than a plan."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from fitter.llama.client import Worker
from tools.server_fit.compare import Models, fitted, one_load_differs, plan_differs, planned
from tools.server_fit.pairs import Case, cases

Report = Callable[[Case, Models, Worker], list[str]]


def loads(case: Case, models: Models, worker: Worker) -> list[str]:
    """Where one load is not measured the same."""
    return [str(each) for each in one_load_differs(case, models, worker)]


def plans(case: Case, models: Models, worker: Worker) -> list[str]:
    """Where a plan is not what llama-server measures, or gets less context or weights on devices than its own fit."""
    plan = planned(case, models, worker)
    if not plan.fits:
        return []
    said = [str(each) for each in plan_differs(plan, case, models)]
    theirs = fitted(case, models, worker, plan)
    if theirs is None or theirs.is_over:
        return said
    n_ctx = theirs.decided.params["n_ctx"]
    if plan.params.n_ctx < n_ctx:
        said.append(f"context: llama-server {n_ctx}, fitter {plan.params.n_ctx}")
    full = planned(case, models, worker, strategy="llama.cpp")
    ours = sum(each.model for each in full.devices)
    if full.params.n_ctx <= n_ctx and ours < theirs.on_devices:
        said.append(f"weights on devices: llama-server {theirs.on_devices}, fitter {ours}")
    return said


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
    parts: dict[str, Report] = {"loads": loads, "plans": plans}
    n_different = 0
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        models = Models(Path(directory))
        for name, part in parts.items():
            if options.part not in (None, name):
                continue
            for case in wanted:
                found = part(case, models, worker)
                n_different += bool(found)
                for each in found:
                    print(f"{name}: {case.name}: {each}", flush=True)
    print(f"{len(wanted)} cases, {n_different} differences")
    return 1 if n_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
