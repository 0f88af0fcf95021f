"""Put headers with one value at an extreme through every door of fitter: fit, explore, quants, a directory and serve.

    python -m tools.mutated_headers [--count 2000] [--jobs 2] [--seed 1] [--doors fit,explore] [--output FILE.jsonl]

Each must end with a plan or with one line, below 600 MB for all of its processes and in ten seconds. The exit status is
1 where one does not. What takes too long is tried once more, since another process may have been in the way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tools.mutated_headers import doors
from tools.mutated_headers.doors import Outcome
from tools.mutated_headers.mutations import Mutation, Source, drawn, mutated, sources
from tools.serving_speed import Served, serving

DOORS = ("fit", "explore", "quants", "directory", "serve")
_IN_DIRECTORY = 10
"""Files of a directory, of which one is whole."""

_Job = Callable[[], Outcome]


def outcomes(drawn: Sequence[Mutation], found: dict[str, Source], wanted: Sequence[str], jobs: int) -> Iterator[Outcome]:
    """What each of them comes to at each door, in no order."""
    with tempfile.TemporaryDirectory(prefix="mutated-") as name, ThreadPoolExecutor(jobs) as pool:
        root = Path(name)
        with serving("--root", name, "--workers", "1") as served:
            doors.limit(served.process.pid)
            every = [job for number, each in enumerate(drawn) for job in _jobs(number, each, found, wanted, root, served)]
            if "directory" in wanted:
                own = _IN_DIRECTORY - 1
                groups = [drawn[at : at + own] for at in range(0, len(drawn), own)]
                every += [_directory(number, group, found, root) for number, group in enumerate(groups)]
            for outcome in pool.map(lambda job: job(), every):
                yield outcome


def _jobs(
    number: int, mutation: Mutation, found: dict[str, Source], wanted: Sequence[str], root: Path, served: Served
) -> Iterator[_Job]:
    """A job for each door that takes one file."""
    source = found[mutation.architecture]
    asking = threading.Lock()
    for door, ways in doors.COMMANDS.items():
        if door in wanted:
            path, words = root / f"{door}-{number}.gguf", ways[number % len(ways)]

            def run(door: str = door, path: Path = path, words: Sequence[str] = words) -> Outcome:
                source.write(path, mutated(source, mutation))
                try:
                    return _patiently(lambda: doors.command(door, str(mutation), path, words))
                finally:
                    path.unlink()

            yield run
    if "serve" in wanted:
        path = root / f"served-{number}.gguf"

        def ask() -> Outcome:
            source.write(path, mutated(source, mutation))
            try:
                with asking:
                    return _patiently(lambda: doors.question(served, str(mutation), path.name))
            finally:
                path.unlink()

        yield ask


def _directory(number: int, group: Sequence[Mutation], found: dict[str, Source], root: Path) -> _Job:
    """A job for a directory with a file of each of ``group``, and one that is whole."""

    def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix=f"d{number}-", dir=root) as name:
            whole = found["qwen3"].write(Path(name) / "whole.gguf")
            files = [whole]
            for place, each in enumerate(group):
                source = found[each.architecture]
                files.append(source.write(Path(name) / f"{place}.gguf", mutated(source, each)))
            what = "; ".join(map(str, group))
            return _patiently(lambda: doors.directory(what, Path(name), [file.name for file in files]))

    return run


def _patiently(run: _Job) -> Outcome:
    first = run()
    return first if first.wrong != "time" else min(first, run(), key=lambda each: each.seconds)


def _table(found: Sequence[Outcome]) -> Iterator[str]:
    yield "| door | tried | most MB | most s | ended as | wrong |"
    yield "| --- | --: | --: | --: | --- | --- |"
    for door in DOORS:
        own = [each for each in found if each.door == door]
        if own:
            ends = ", ".join(f"{status}: {count}" for status, count in sorted(Counter(each.status for each in own).items()))
            wrong = Counter(each.wrong for each in own if each.wrong)
            yield (
                f"| {door} | {len(own)} | {max(each.memory for each in own) / 1e6:.0f} "
                f"| {max(each.seconds for each in own):.1f} | {ends} "
                f"| {', '.join(f'{what}: {count}' for what, count in wrong.items()) or 'none'} |"
            )


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        made = sources(Path(name))
    wanted = given.doors.split(",")
    found: list[Outcome] = []
    output = given.output.open("w") if given.output else None
    for outcome in outcomes(drawn(made, given.count, given.seed), made, wanted, given.jobs):
        found.append(outcome)
        if output:
            print(json.dumps(asdict(outcome)), file=output, flush=True)
        if outcome.wrong:
            print(f"{outcome.wrong}: {outcome.door}: {outcome.what}: {outcome.said} "
                  f"({outcome.memory / 1e6:.0f} MB, {outcome.seconds:.1f} s)", flush=True)
    print("\n".join(_table(found)))
    return any(each.wrong for each in found)


if __name__ == "__main__":
    sys.exit(main())
