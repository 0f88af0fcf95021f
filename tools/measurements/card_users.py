"""Turns of 1 to 32 users on a real card, beside fitter's estimates without one.

``python -m tools.measurements.card_users`` compares them. What a card took is in ``tests/data/speeds/card_users.csv``;
it prints a table of it. On a machine with a card, ``--measure FILE --server LLAMA_SERVER`` writes models with random
weights, runs each with its plan for 32 users, and sends it their turns. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fitter
from fitter.api.real_runs.tune_plan import text_of_turns
from fitter.output.arguments import arguments
from fitter.planning.plan.plan import Plan
from fitter.programs.later import ENVIRONMENT
from fitter.programs.running_server import Running, running
from fitter.programs.server_requests import Load, take_turns
from tools.comparisons.load_answers import read_table
from tools.models import shapes
from tools.models.weights import write_random

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "speeds" / "card_users.csv"
COLUMNS = (
    "card",
    "model",
    "placement",
    "work",
    "slots",
    "settings",
    "users",
    "seconds",
    "spread",
    "prompt_token",
    "step",
)
CACHE_RAM = 16384
HOST_BANDWIDTH = 135.1e9
"""Of the machine beside the card, as fitter measured it."""
ROUNDS = 2
_SAID_MS = 20.0
TURNS = 16


@dataclass(frozen=True)
class Sent:
    """What users send: ``prefix`` tokens said before, ``new`` ones, and ``answer`` tokens back."""

    prefix: int
    new: int
    answer: int

    @property
    def workload(self) -> str:
        """It as ``--workload`` takes it: so many turns that the first counts for little."""
        prompt = self.prefix + self.new
        reused = f"reused={self.prefix / prompt:.3f},turns={TURNS}," if self.prefix else ""
        return f"prompt={prompt},{reused}answer={self.answer}"

    @property
    def longest(self) -> int:
        """Tokens that a slot has room for."""
        return self.prefix + TURNS * (self.new + self.answer)


WORKS = {
    "one request": Sent(0, 512, 128),
    "conversation": Sent(2048, 128, 128),
    "short conversation": Sent(512, 64, 32),
}


@dataclass(frozen=True)
class Run:
    """One start of a llama-server: a model, its placement, what users send, their numbers, and its slots."""

    model: str
    placement: str
    work: str
    users: tuple[int, ...]
    slots: int
    settings: str = ""

    @property
    def key(self) -> dict[str, str]:
        """Its columns."""
        own = {"model": self.model, "placement": self.placement, "work": self.work}
        return {**own, "slots": str(self.slots), "settings": self.settings}

    @property
    def keywords(self) -> dict[str, bool]:
        """Its settings, as ``fit`` takes them."""
        return {_SETTINGS[word][0]: _SETTINGS[word][1] for word in self.settings.split()}


_SETTINGS = {
    "-kvu": ("kv_unified", True),
    "--cache-idle-slots": ("cache_idle_slots", True),
    "--no-cache-idle-slots": ("cache_idle_slots", False),
}
SAVED = "--cache-idle-slots"
STAY = "--no-cache-idle-slots"
SHARED = f"-kvu {STAY}"
NUMBERS = (1, 2, 4, 8, 16, 32)

RUNS = (
    Run("llama-3.1-8b", "card", "one request", NUMBERS, 32, SAVED),
    Run("llama-3.1-8b", "card", "one request", (8,), 8, STAY),
    Run("llama-3.1-8b", "card", "one request", (8,), 32, SHARED),
    Run("llama-3.1-8b", "card", "conversation", NUMBERS, 32, SAVED),
    Run("llama-3.1-8b", "card", "conversation", (8, 32), 32, STAY),
    Run("llama-3.1-8b", "card", "conversation", (2, 8, 32), 32, SHARED),
    Run("llama-3.1-8b", "card", "conversation", NUMBERS[:-1], 4, SAVED),
    Run("llama-3.1-8b", "card", "conversation", (8,), 4, STAY),
    Run("gpt-oss-20b", "card", "conversation", (1, 8, 32), 32, STAY),
    Run("qwen3-30b-a3b", "card", "one request", NUMBERS[:3], 32, SAVED),
    Run("qwen3-30b-a3b", "card", "conversation", (1, 8), 8, STAY),
    Run("qwen3-30b-a3b", "experts on the host", "short conversation", (1, 8), 8, STAY),
)


def plan_of(path: Path, run: Run, **keywords: Any) -> Plan:
    """Plan for all users with all layers on the card, and the experts there too or on the host."""
    n_layer = shapes.SHAPES[run.model].n_layer
    on_host = n_layer if run.placement == "experts on the host" else None
    sent = WORKS[run.work]
    return fitter.fit(
        path,
        program="llama-server",
        workload=sent.workload,
        users=max(run.users),
        n_seq_max=run.slots,
        n_ctx=run.slots * sent.longest,
        cache_ram=CACHE_RAM,
        n_gpu_layers=n_layer + 1,
        n_cpu_moe=on_host,
        **run.keywords,
        **keywords,
    )


def measure(output: Path, server: Path, folder: Path, only: Sequence[str]) -> None:
    """Take the turns of ``RUNS`` on this machine's first card, and write what they took as they come."""
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for run in RUNS:
            if only and run.model not in only:
                continue
            path = folder / f"{run.model}.gguf"
            if not path.exists():
                began = time.monotonic()
                write_random(run.model, folder, server.parent / "libggml-base.so")
                print(f"{path}: written in {time.monotonic() - began:.0f} s", flush=True)
            plan = plan_of(path, run)
            words = [str(server), "-m", str(path), *arguments(plan)]
            print(*words, flush=True)
            with running(words, 300.0, _told, ENVIRONMENT) as started:
                for row in _rows(started, plan, run):
                    writer.writerow({"card": ", ".join(use.description for use in plan.devices), **run.key, **row})
                    file.flush()


def _told(line: str) -> None:
    moved = re.search(r"prompt cache update took ([0-9.]+) ms", line)
    if moved and float(moved[1]) > _SAID_MS:
        print(moved[0], flush=True)


def _rows(started: Running, plan: Plan, run: Run) -> Iterator[dict[str, Any]]:
    assert plan.turns is not None
    sent = WORKS[run.work]
    for point in (point for point in plan.turns.points if point.users in run.users):
        load = Load(sent.prefix, sent.new, sent.answer, point.users, ROUNDS if point.users > 4 else 2 * ROUNDS)
        taken = take_turns(started, load, text_of_turns(), time.monotonic() + 120)
        print(f"{point.users} users: estimated {point.seconds:.3f} s, measured {taken.seconds:.3f} s", flush=True)
        yield {
            "users": point.users,
            "seconds": f"{taken.seconds:.4f}",
            "spread": f"{taken.spread:.4f}",
            "prompt_token": f"{taken.prompt:.3e}",
            "step": f"{taken.step:.5f}",
        }


@dataclass(frozen=True)
class Turn:
    """A row of the file, and what fitter says of it without a card. Seconds of a turn."""

    run: Run
    users: int
    measured: float
    estimated: float

    @property
    def together(self) -> tuple[float, float]:
        """Tokens per second of all answers, measured and estimated."""
        tokens = self.users * WORKS[self.run.work].answer
        return tokens / self.measured, tokens / self.estimated


def turns(folder: Path) -> Iterator[Turn]:
    """Estimate every row of the file on its virtual card, with models in ``folder``."""
    rows = read_table(FILE)
    for run in RUNS:
        path = shapes.write(run.model, folder, vocab=False)
        plan = plan_of(path, run, gpus=["h200"], host_bandwidth=HOST_BANDWIDTH)
        assert plan.turns is not None
        seconds = {point.users: point.seconds for point in plan.turns.points}
        for row in rows:
            if all(row[name] == value for name, value in run.key.items()):
                users = int(row["users"])
                yield Turn(run, users, float(row["seconds"]), seconds[users])


def table(every: Sequence[Turn]) -> Iterator[str]:
    """Write the page's table: tokens per second of all answers, measured and estimated."""
    numbers = sorted({turn.users for turn in every})
    yield f"| model | placement | work | slots | settings | {' | '.join(map(str, numbers))} |"
    yield "| --- " * (len(numbers) + 5) + "|"
    for run in RUNS:
        of = {turn.users: turn.together for turn in every if turn.run == run}
        cells = [f"{of[users][0]:,.0f} / {of[users][1]:,.0f}" if users in of else "" for users in numbers]
        yield f"| {' | '.join([*run.key.values(), *cells])} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or measure."""
    parser = argparse.ArgumentParser(prog="tools.measurements.card_users", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="take all turns on this machine's card instead")
    parser.add_argument("--server", type=Path, help="the llama-server to run")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where models are written")
    parser.add_argument("--only", nargs="*", default=(), help="models to take, instead of all")
    given = parser.parse_args(argv)
    if given.measure:
        measure(given.measure, given.server.resolve(), given.folder, given.only)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        every = list(turns(Path(folder)))
    off = statistics.median(abs(turn.estimated / turn.measured - 1) for turn in every)
    print(*table(every), f"{len(every)} turns; the median error is {off:.0%}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
