"""Estimated beside measured turns after ``fitter tune``.

``python -m tools.measurements.tuned MODEL --server LLAMA_SERVER`` tunes the model, compares estimates for 1, 2, 4 and 8
users with a real llama-server, and then runs all combinations of what ``tune`` tries one after the other. Nothing else
should run beside it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import fitter
from fitter.api.real_runs.tune_plan import Tuner, text_of_turns, tune
from fitter.output.arguments import arguments
from fitter.parameters.table import Fitting
from fitter.planning.checked.tuning import TuningChange, TuningRun
from fitter.programs.running_server import running
from fitter.programs.server_requests import Load, take_turns

USERS = (1, 2, 4, 8)
ROUNDS = 6
OFF_BY = 0.2
MINUTES = 24 * 60.0


def main(argv: list[str] | None = None) -> int:
    """Print a line for each comparison; the status is 1 where an estimate is off by more than a fifth."""
    parser = argparse.ArgumentParser(description="Compare estimated turns with those of a real llama-server.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--generate", type=int, default=40)
    parser.add_argument("--rpc", help="an rpc-server, as a slow device")
    parser.add_argument("--layers", type=int, help="layers on it")
    parser.add_argument("--only", choices=["users", "every"], help="one of the two comparisons")
    args = parser.parse_args(argv)
    asked: dict[str, Any] = {"prompt": args.prompt, "generate": args.generate, "n_ctx": 8192, "rpc": args.rpc}
    asked["n_gpu_layers"] = args.layers
    worst = 0.0
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CONFIG_HOME"] = home
        tuning = tune(args.model, server=args.server, minutes=MINUTES, **asked)
        for run in tuning.runs:
            print(f"{run.text}: {_measured(run)}{run.problem}", flush=True)
        assert tuning.tuned is not None
        worst = abs(tuning.tuned / tuning.best.seconds - 1)
        print(
            f"best: {tuning.best.text}; estimated {tuning.tuned:.3f} s, measured {_measured(tuning.best)}", flush=True
        )
        if args.only != "every":
            worst = max(worst, _users(args.model, args.server, asked))
        if args.only != "users":
            _every(args.model, args.server, asked, tuning.best)
    return int(worst > OFF_BY)


def _users(model: Path, server: Path, asked: dict[str, Any]) -> float:
    """Compare the turns of several users; return the largest error."""
    # a second number of users tells what each of them costs
    tune(model, server=server, minutes=MINUTES, users=USERS[-2], **asked)
    errors = [0.0]
    for users in USERS:
        plan = fitter.fit(model, program="llama-server", users=users, **asked)
        assert plan.turns is not None
        load = Load(0, asked["prompt"], asked["generate"], users, ROUNDS)
        with running([str(server.resolve()), "-m", str(model.resolve()), *arguments(plan)], 120.0) as started:
            taken = take_turns(started, load, text_of_turns(), time.monotonic() + 120)
        estimated = plan.turns.all.seconds
        errors.append(abs(estimated / taken.seconds - 1))
        print(
            f"{users} users: estimated {estimated:.2f} s, measured {taken.seconds:.2f} s ± {taken.spread:.2f}",
            flush=True,
        )
    return max(errors)


def _every(model: Path, server: Path, asked: dict[str, Any], chosen: TuningRun) -> None:
    """Run all combinations, and start the quickest and the chosen one twice more."""
    tuner = Tuner(model, server, time.monotonic() + 60 * MINUTES, cast(Fitting, asked), None, None)
    tuner.run(())
    kinds = [((), *((change,) for change in values)) for values in tuner.kinds()]
    for several in itertools.product(*kinds):
        changes = tuple(change for some in several for change in some)
        if changes:
            tuner.run(changes)
    runs = sorted((run for run in tuner.runs if not run.problem), key=lambda run: run.seconds)
    print(f"{len(tuner.runs)} combinations, {len(tuner.runs) - len(runs)} do not run", flush=True)
    for name, changes in (("quickest", runs[0].changes), ("chosen", chosen.changes)):
        print(f"{name}: {_again(model, server, asked, changes)}", flush=True)
    print(f"slowest: {runs[-1].text}: {_measured(runs[-1])}")


def _again(model: Path, server: Path, asked: dict[str, Any], changes: tuple[TuningChange, ...]) -> str:
    """Start it twice more: the quickest of many runs was lucky, too."""
    found = []
    for _ in range(2):
        tuner = Tuner(model, server, time.monotonic() + 60 * MINUTES, cast(Fitting, asked), None, None)
        tuner.run(())
        tuner.run(changes)
        found.append(tuner.runs[-1])
    return f"{found[0].text}: " + ", ".join(map(_measured, found))


def _measured(run: TuningRun) -> str:
    return f"{run.seconds:.3f} s ± {run.spread:.3f}"


if __name__ == "__main__":
    sys.exit(main())
