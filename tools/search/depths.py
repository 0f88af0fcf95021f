"""Compare plans with a set context at all depths of it, and with set micro batches, on random machines.

    python -m tools.search.depths [--machines 300] [--first 0] [--jobs 2]

A plan with ``-c`` is priced at five depths, each twice the one before, up to the context of a slot. Over all of them it
is no slower than llama.cpp's own fit (by at most 2 %, as a geometric mean of seconds a token), at none more than 1.5
times as slow, and within 15 % of the best of the plans that were asked for a single depth. No set ``-ub`` is faster
by more than 2 %: for the request that the context gives, for 2,048 + 512 tokens, and for a prompt of a quarter of the
context. The exit status is 1 where one of these is not kept.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitter.errors import FitterError
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.planning.speed.cost import Workload
from tools.search.machines import CARDS, GIB, MIB, MOE, SHAPES, Card, Machine
from tools.search.outcomes import Asking, Outcome

DEPTHS = 5
MICRO_BATCHES = (256, 1024, 2048, 4096)
SLOWER, AT_ONE, BEHIND, PINNED = 1.02, 1.5, 1.15, 1.02
"""The limits: over depths against llama.cpp's fit, at one depth, against the best plan, and for a set micro batch."""


@dataclass(frozen=True)
class Compared:
    """A machine, and how many times as slow its plan is as others.

    Attributes:
        upstream: as llama.cpp's own fit over all depths; 0 where that does not fit.
        at_one: the same at the depth where it is slowest.
        best: as the best of the plans for single depths, over all depths.
        pinned: as each plan with a set micro batch.
    """

    machine: str
    upstream: float = 0.0
    at_one: float = 0.0
    best: float = 0.0
    pinned: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def broken(self) -> tuple[str, ...]:
        """Every limit that is not kept."""
        limits = (
            ("llama.cpp's fit, over depths", self.upstream, SLOWER),
            ("llama.cpp's fit, at one depth", self.at_one, AT_ONE),
            ("the best plan for one depth", self.best, BEHIND),
            *((what, times, PINNED) for what, times in self.pinned.items()),
        )
        return tuple(f"{times:.3f} times {what}" for what, times, most in limits if times > most)


def draw(number: int) -> Machine:
    """Draw the machine with a number, dense models at least half of the time."""
    rng = random.Random(f"depths {number}")
    dense = [shape for shape in SHAPES if shape not in MOE]
    shape = rng.choice(dense) if rng.random() < 0.6 else rng.choice(sorted(MOE))
    some = [rng.choice(CARDS) for _ in range(rng.choice((1, 1, 2)))]
    cards = tuple(Card(rng.choice(some)) for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3, 4))))
    slots = rng.choice((1, 4))
    each = rng.choice((16384, 32768, 65536, 131072))
    options: dict[str, Any] = {"n_ctx": each}
    if slots > 1:
        options |= {"n_seq_max": slots, "kv_unified": True} if rng.random() < 0.5 else {"n_seq_max": slots}
    if rng.random() < 0.3:
        options["type_k"] = options["type_v"] = "q8_0"
    if rng.random() < 0.2:
        options["host_memory"] = rng.choice((32, 64, 128, 256)) * GIB
    if rng.random() < 0.1:
        options["margin"] = rng.choice((0, 512, 2048)) * MIB
    return Machine(number, shape, cards, options)


def depths_of(machine: Machine) -> tuple[int, ...]:
    """List the depths at which plans are priced."""
    each = machine.options["n_ctx"] // machine.streams
    return tuple(each >> power for power in reversed(range(DEPTHS)))


def compare(machine: Machine, asking: Asking) -> Compared:
    """Make the plan and the others, and price all of them."""
    plan = asking.fit(machine)
    if not plan.fits:
        return Compared(str(machine), error=plan.error or "does not fit")
    depths = depths_of(machine)
    times = asking.at_depths(machine, plan, depths)
    upstream = asking.fit(machine, strategy="llama.cpp")
    theirs = asking.at_depths(machine, upstream, depths) if upstream.fits else []
    singles = [asking.fit(machine, prompt=max(1, depth - Workload.generate)) for depth in depths]
    best = min((_mean(asking.at_depths(machine, each, depths)) for each in singles if each.fits), default=math.inf)
    pinned = dict(_pinned(machine, asking, plan))
    return Compared(
        str(machine),
        _mean(times) / _mean(theirs) if theirs else 0.0,
        max((ours / other for ours, other in zip(times, theirs, strict=False)), default=0.0),
        _mean(times) / best,
        pinned,
    )


def _mean(seconds: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, seconds)) / len(seconds))


def _pinned(machine: Machine, asking: Asking, plan: Outcome) -> Iterator[tuple[str, float]]:
    quarter = machine.options["n_ctx"] // machine.streams // 4
    for prompt in (None, Workload.prompt, quarter):
        words = {} if prompt is None else {"prompt": prompt}
        free = plan if prompt is None else asking.fit(machine, **words)
        for n_ubatch in MICRO_BATCHES:
            other = asking.fit(machine, n_ubatch=n_ubatch, **words)
            if free.is_pipelined and other.batches.get("n_ubatch", 0) > free.batches["n_ubatch"]:
                # an estimate knows no pipeline, which a larger micro batch would end
                continue
            if other.fits and other.seconds and free.seconds:
                yield f"-ub {n_ubatch}, prompt {prompt or 'of the context'}", free.seconds / other.seconds


def _compared(numbers: list[int]) -> list[Compared]:
    with tempfile.TemporaryDirectory() as directory, RememberingWorker() as worker:
        asking = Asking(Path(directory), worker)
        found = []
        for number in numbers:
            machine = draw(number)
            try:
                found.append(compare(machine, asking))
            except FitterError as error:
                found.append(Compared(str(machine), error=f"{type(error).__name__}: {error}"))
        return found


def summary(every: Sequence[Compared]) -> str:
    """Say in some lines how many limits are kept."""
    done = [each for each in every if not each.error]
    pins = [times for each in done for times in each.pinned.values()]
    rows = (
        ("llama.cpp's fit, over depths", [each.upstream for each in done if each.upstream], SLOWER),
        ("llama.cpp's fit, at one depth", [each.at_one for each in done if each.at_one], AT_ONE),
        ("the best plan for one depth", [each.best for each in done], BEHIND),
        ("a set micro batch", pins, PINNED),
    )
    lines = [f"{len(every)} machines, {len(done)} plans that fit"]
    for what, times, most in rows:
        slower = sum(each > most for each in times)
        lines.append(
            f"slower than {what} by more than {most - 1:.0%}: {slower} of {len(times)}, "
            f"median {sorted(times)[len(times) // 2]:.3f}, worst {max(times):.3f}"
            if times
            else f"{what}: nothing to compare"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print what is not kept. The exit status is 1 where anything is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first machine")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.machines)
    every: list[Compared] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for some in pool.imap_unordered(_compared, [list(numbers[i : i + 5]) for i in range(0, len(numbers), 5)]):
            for compared in some:
                every.append(compared)
                for said in (*compared.broken, *([compared.error] if compared.error else [])):
                    print(f"{compared.machine}\n    {said}", flush=True)
    print(summary(every))
    return 1 if any(each.broken for each in every) else 0


if __name__ == "__main__":
    sys.exit(main())
