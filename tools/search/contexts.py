"""Compare the chosen context of drawn machines with a scan of every context, by steps of an eighth.

    python -m tools.search.contexts [--machines 30] [--first 0] [--cards 4]

The scan makes a plan at each context and takes the largest that ``--context-cost`` accepts. The exit status is 1 where
the chosen context is a step or more from it: less than a step is worth no time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.parameters.table import DEFAULTS
from fitter.planning.pricing.objective import longest_for
from tools.search.machines import Machine, draw
from tools.search.outcomes import Asking, Outcome


@dataclass(frozen=True)
class Scanned:
    """A machine's plan beside the scan: seconds by context, the longest time that the rule allows, the next context."""

    plan: Outcome
    seconds: dict[int, float]

    @property
    def longest(self) -> float:
        """The longest time that the rule allows."""
        return longest_for("request", DEFAULTS["context_cost"], min(self.seconds.values()))

    @property
    def largest(self) -> int:
        """The scan's choice."""
        return max(n_ctx for n_ctx, seconds in self.seconds.items() if seconds <= self.longest)

    @property
    def is_same(self) -> bool:
        """Whether the chosen context is less than a step from the scan's."""
        contexts = sorted(self.seconds)
        at = contexts.index(self.largest)
        return contexts[max(0, at - 1)] <= self.plan.n_ctx < (contexts[at + 1 :] or [self.plan.n_ctx + 1])[0]


def scan(machine: Machine, asking: Asking) -> Scanned | None:
    """Make the plan, and one at each context; ``None`` where nothing fits, or nothing is priced."""
    plan = asking.fit(machine)
    step, seconds = 256 * machine.streams, dict[int, float]()
    most = asking.fit(machine, context_cost="none")
    contexts = [4096 * machine.streams]
    while contexts[-1] < most.n_ctx:
        contexts.append(min(most.n_ctx, max(contexts[-1] + step, contexts[-1] * 9 // 8 // step * step)))
    for n_ctx in contexts:
        at = asking.fit(machine, n_ctx=n_ctx)
        if at.fits and at.seconds:
            seconds[n_ctx] = at.seconds
    return Scanned(plan, seconds) if plan.fits and plan.seconds and seconds else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print each machine. The exit status is 1 where a choice is not the scan's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first machine")
    parser.add_argument("--cards", type=int, default=4, help="most cards of a machine")
    options = parser.parse_args(arguments)
    tested: list[bool] = []
    number = options.first
    with tempfile.TemporaryDirectory() as directory, RememberingWorker() as worker:
        asking = Asking(Path(directory), worker)
        while len(tested) < options.machines:
            machine = draw(number, options.cards)
            number += 1
            if "n_ctx" in machine.options or (scanned := scan(machine, asking)) is None:
                continue
            tested.append(scanned.is_same)
            plan, longer = scanned.plan, (scanned.plan.seconds or 0.0) / min(scanned.seconds.values())
            print(
                f"{'same ' if scanned.is_same else 'other'} chosen {plan.n_ctx}, scan {scanned.largest} of "
                f"{max(scanned.seconds)}; {longer:.3f} times the quickest; {plan.loads} loads; {machine}",
                flush=True,
            )
    print(f"{sum(tested)} of {len(tested)} chosen contexts are the scan's")
    return 0 if all(tested) else 1


if __name__ == "__main__":
    sys.exit(main())
