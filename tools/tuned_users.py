"""Estimated beside measured turns for several users: ``python -m tools.tuned_users MODEL --server LLAMA_SERVER``.

Run ``fitter tune`` first: without it, what this machine reaches of its processor is not known.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import fitter
from fitter.api.tune_plan import text_of_turns
from fitter.output.arguments import arguments
from fitter.programs.running_server import running
from fitter.programs.turn_runs import Load, take_turns

USERS = (1, 2, 4, 8)
ROUNDS = 6


def main(argv: list[str] | None = None) -> int:
    """Print a line for each number of users; the status is 1 where one differs by more than a fifth."""
    parser = argparse.ArgumentParser(description="Compare estimated turns with those of a real llama-server.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--generate", type=int, default=40)
    args = parser.parse_args(argv)
    worst = 0.0
    for users in USERS:
        asked = {"users": users, "prompt": args.prompt, "generate": args.generate, "n_ctx": 8192}
        plan = fitter.fit(args.model, program="llama-server", **asked)
        assert plan.turns is not None
        load = Load(0, args.prompt, args.generate, users, ROUNDS)
        with running([str(args.server.resolve()), "-m", str(args.model.resolve()), *arguments(plan)], 120.0) as server:
            taken = take_turns(server, load, text_of_turns(), time.monotonic() + 120)
        estimated = plan.turns.all.seconds
        worst = max(worst, abs(estimated / taken.seconds - 1))
        measured = f"{taken.seconds:.2f} s ± {taken.spread:.2f}"
        print(f"{users} users: estimated {estimated:.2f} s, measured {measured}", flush=True)
    return int(worst > 0.2)


if __name__ == "__main__":
    sys.exit(main())
