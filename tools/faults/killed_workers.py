"""Kill worker processes at random moments of a plan: it must be the plan of an undisturbed run, or an error.

``python -m tools.faults.killed_workers`` plans again and again, and sends a random worker a random signal each time. It
prints what differs in a plan that is another one; then its exit status is 1.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fitter.errors import EXIT_FAILURE
from tools.models import shapes

# Machines on which the search asks for many placements, so that an answer that is missing would show.
PLANS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama-3.1-8b", ("--gpu", "6GiB", "--gpu", "3GiB")),
    ("qwen3-30b-a3b", ("--gpu", "8GiB", "--gpu", "6GiB")),
    ("nemotron-h-9b", ("--gpu", "4GiB", "--gpu", "3GiB")),
    ("gpt-oss-20b", ("--gpu", "8GiB")),
    ("gemma3-12b", ("--gpu", "none", "--host-memory", "64GiB")),
)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
_LIMIT = 120.0


@dataclass(frozen=True)
class Command:
    """A command line of fitter: a plan as JSON, or with ``is_lock`` the lock file of the case."""

    name: str
    words: tuple[str, ...]
    is_lock: bool = False


@dataclass(frozen=True)
class Run:
    """How a command ended: its ``answer`` (a plan without the effort, or a lock file), and its first line on stderr."""

    status: int
    answer: str
    said: str
    seconds: float

    def is_as(self, undisturbed: Run) -> bool:
        """Whether it has the same answer."""
        return (self.status, self.answer) == (undisturbed.status, undisturbed.answer)

    @property
    def is_error(self) -> bool:
        """Whether it has no answer, and says so."""
        return self.status == EXIT_FAILURE and not self.answer and bool(self.said)


def commands(directory: Path) -> tuple[Command, ...]:
    """The plans, and a lock of the first of them, of models that are written to ``directory``."""
    found = []
    for shape, machine in PLANS:
        model = shapes.write(shape, directory)
        found.append(Command(shape, (str(model), *machine, "--json")))
    case = f'[cases.{PLANS[1][0]}]\nmodel = "{found[1].words[0]}"\ngpu = ["8GiB", "6GiB"]\n'
    (directory / "fitter.toml").write_text(case)
    return *found, Command("lock", ("lock", "--cases", str(directory / "fitter.toml")), is_lock=True)


def run(
    command: Command, moments: Sequence[tuple[float, signal.Signals]] = (), draw: random.Random | None = None
) -> Run:
    """Run ``command``, and send each signal so many seconds after its start to a random one of its processes."""
    started = time.monotonic()
    lock = Path(command.words[-1]).with_name("fitter.lock") if command.is_lock else None
    if lock is not None:
        lock.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", "fitter", *command.words], stdout=output, stderr=errors)
        own = psutil.Process(process.pid)
        for seconds, number in moments:
            time.sleep(max(0.0, started + seconds - time.monotonic()))
            with suppress(psutil.Error):
                if children := own.children(recursive=True):
                    (draw or random).choice(children).send_signal(number)
        status = process.wait(_LIMIT)
        output.seek(0)
        errors.seek(0)
        said = errors.read().strip().splitlines()
        answer = output.read()
    if lock is not None:
        answer = lock.read_text() if lock.exists() else ""
    elif answer:
        document = json.loads(answer)
        # how it was found may differ
        del document["search"]
        answer = json.dumps(document, sort_keys=True)
    return Run(status, answer, said[0] if said else "", time.monotonic() - started)


def drawn(draw: random.Random, seconds: float, most: int) -> list[tuple[float, signal.Signals]]:
    """From one to ``most`` signals, each at a moment of a run that takes so many seconds."""
    return sorted((draw.uniform(0.02, seconds), draw.choice(SIGNALS)) for _ in range(draw.randint(1, most)))


def lines_of(run: Run) -> list[str]:
    """An answer on many lines."""
    return (json.dumps(json.loads(run.answer), indent=1) if run.answer.startswith("{") else run.answer).splitlines()


def main(args: Sequence[str] | None = None) -> int:
    """Run and count; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2, help="signals of each run, at most")
    told = parser.parse_args(args)
    draw = random.Random(told.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        every = commands(Path(directory))
        undisturbed = {}
        for command in every:
            run(command)
            undisturbed[command.name] = run(command)
            assert undisturbed[command.name].status in (0, 1), undisturbed[command.name]
        for number in range(told.runs):
            command = draw.choice(every)
            whole = undisturbed[command.name]
            moments = drawn(draw, whole.seconds, told.kills)
            found = run(command, moments, draw)
            is_same = found.is_as(whole)
            counts["the same plan" if is_same else "an error" if found.is_error else "ANOTHER"] += 1
            if found.is_error:
                counts[found.said] += 1
            elif not is_same:
                print(f"run {number}, {command.name}, {moments}: status {found.status}, {found.said}")
                print("\n".join(difflib.unified_diff(lines_of(whole), lines_of(found), lineterm="", n=0)), flush=True)
    for what, count in counts.most_common():
        print(f"{count:5} {what}")
    return int(counts["ANOTHER"] > 0)


if __name__ == "__main__":
    sys.exit(main())
