"""Hold the search to its promises on random machines: make test-search.

    python -m tools.search.check [--machines 1000] [--first 0] [--cards 15] [--mixed | --remote | --plain]
                                 [--jobs 2] [--upstream 4] [--output FILE]

No card added, no memory freed, no limit raised, no faster host or link, no lever and no slot less makes a plan worse;
half the context is no slower, and twice of it no faster; a plan with all that it chose set by the user, one after the
other, stays the same; no option that only narrows a search (-nkvo, -fa, -cmoe, -ncmoe, -ub, -ngl, -dev, -ts) makes one
faster, or takes less time than the bound; equal cards with other names get the same plan; a plan that leaves a device
idle could not use it for a layer; no plan is worse than upstream's own that keeps the margins (asked on every fourth
machine, for that takes most of the time); no plan is beyond twice its bound without the reason. With --mixed, machines
have an integrated GPU beside their cards, drafts, or both; with --remote, an rpc-server; with --plain, they are what
most people have. The exit status is 1 where one is not kept.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fitter.llama.worker.remembered_loads import RememberingWorker
from tools.loopback.rpc_servers import servers
from tools.search.machines import Machine, draw, draw_mixed, draw_plain, draw_remote, renamed
from tools.search.outcomes import Asking, Outcome, worse
from tools.search.relations import relations

TWICE = 2.0
DRAWS = {"mixed": draw_mixed, "remote": draw_remote, "plain": draw_plain}
"""Kinds of machines, of which upstream is not asked."""


@dataclass(frozen=True)
class Checked:
    """A machine, its plan, and every promise that is not kept there, with how many were asked about."""

    machine: str
    plan: Outcome
    asked: int
    broken: tuple[str, ...]


def check(machine: Machine, asking: Asking, with_upstream: bool = False) -> Checked:
    """Ask for the plan of ``machine``, and for all that it is compared with."""
    plan = asking.fit(machine)
    broken: list[str] = []
    asked = 0
    for relation in relations(machine, plan):
        asked += 1
        other = asking.fit(relation.machine)
        is_excused = relation.is_excused and other.compute > plan.compute
        # no estimate knows the pipeline of several devices, which is kept where it fits
        is_excused |= other.is_pipelined and not plan.is_pipelined
        if relation.is_free and not is_excused and (said := worse(other, relation.plan)):
            broken.append(f"{relation.what}: {said}")
        is_kept = plan.is_pipelined and not other.is_pipelined
        if relation.is_held and not is_kept and (said := worse(relation.plan, other)):
            broken.append(f"{relation.what} is better: {said}")
        if (
            relation.is_held
            and other.n_ctx == plan.n_ctx
            and (other.seconds or math.inf) < (1 - 1e-9) * (plan.bound or 0.0)
        ):
            broken.append(f"{relation.what} is below the bound: {other.seconds:.3f} s of {plan.bound:.3f}")
    if gpus := renamed(machine):
        asked += 1
        other = asking.fit(machine, gpus)
        if (other.placement, other.n_ctx) != (plan.placement, plan.n_ctx):
            broken.append(f"renamed: {plan.placement} at {plan.n_ctx} -> {other.placement} at {other.n_ctx}")
    if plan.fits and not plan.n_gpu_layers:
        asked += 1
        for gpu in machine.gpus:
            one = asking.fit(machine, devices=[gpu.name], n_gpu_layers=1, n_ctx=plan.n_ctx)
            if one.fits and (one.seconds or 0.0) < (plan.seconds or 0.0) * 0.99:
                broken.append(f"idle: a layer on {gpu.name}, {plan.seconds} -> {one.seconds} s")
    if with_upstream and plan.fits and not machine.options.get("kv_unified"):
        theirs = asking.upstream(machine)
        asked += theirs is not None
        if theirs is not None and (said := worse(plan, theirs)):
            broken.append(f"upstream: {said}: {' '.join(theirs.arguments)[:200]}")
    if plan.distance is not None and plan.distance > TWICE and not plan.reasons:
        broken.append(f"{plan.distance:.2f} times the bound without a reason")
    return Checked(str(machine), plan, asked, tuple(broken))


def _checked(task: tuple[list[int], int, int, str]) -> list[Checked]:
    numbers, cards, every, kind = task
    drawn = DRAWS.get(kind, lambda number: draw(number, cards))
    started = servers(kind == "remote")
    with tempfile.TemporaryDirectory() as directory, RememberingWorker() as worker, started as endpoints:
        asking = Asking(Path(directory), worker, *endpoints)
        machines = map(drawn, numbers)
        return [check(each, asking, bool(every) and each.number % every == 0) for each in machines]


def run(numbers: Sequence[int], cards: int, jobs: int, every: int, kind: str = "") -> Iterator[Checked]:
    """All machines with these ``numbers`` and at most so many ``cards``, some at once, in no order."""
    tasks = [(list(numbers[i : i + 10]), cards, every, kind) for i in range(0, len(numbers), 10)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap_unordered(_checked, tasks):
            yield from found


def summary(every: Sequence[Checked]) -> str:
    """What was found, in some lines."""
    far = sorted(each.plan.distance for each in every if each.plan.distance is not None)
    walls = sorted(each.plan.wall for each in every)
    lines = [
        f"{len(every)} machines, {sum(each.plan.fits for each in every)} plans that fit, "
        f"{sum(bool(each.plan.error) for each in every)} errors",
        f"{sum(each.asked for each in every)} comparisons, {sum(len(each.broken) for each in every)} promises not kept",
        f"a fit takes {walls[len(walls) // 2]:.2f} s (median), {walls[-1]:.1f} s at most",
    ]
    if far:
        lines.append(
            f"times the bound: median {far[len(far) // 2]:.3f}, 95th percentile {far[len(far) * 95 // 100]:.2f}, "
            f"worst {far[-1]:.2f}; {sum(each > TWICE for each in far)} beyond {TWICE:g}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what is not kept. The exit status is 1 where anything is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first machine")
    parser.add_argument("--cards", type=int, default=15, help="most cards of a machine")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--upstream", type=int, default=4, help="ask upstream for every so many; 0 for none")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--mixed", dest="kind", action="store_const", const="mixed", help="with integrated GPUs and drafts"
    )
    kinds.add_argument("--remote", dest="kind", action="store_const", const="remote", help="with an rpc-server")
    kinds.add_argument(
        "--plain", dest="kind", action="store_const", const="plain", help="one to four cards, long prompts"
    )
    parser.add_argument("--output", type=Path, help="write all that was found here, a JSON object a line")
    options = parser.parse_args(arguments)
    every: list[Checked] = []
    with_upstream = 0 if options.kind else options.upstream
    numbers = range(options.first, options.first + options.machines)
    stream = options.output.open("w") if options.output else None
    for checked in run(numbers, options.cards, options.jobs, with_upstream, options.kind or ""):
        every.append(checked)
        for said in (*checked.broken, *filter(None, (checked.plan.error,))):
            print(f"{checked.machine}\n    {said}", flush=True)
        if stream:
            stream.write(json.dumps(asdict(checked)) + "\n")
            stream.flush()
    if stream:
        stream.close()
    print(summary(every))
    return 1 if any(each.broken for each in every) else 0


if __name__ == "__main__":
    sys.exit(main())
