"""Put headers with one value at an extreme through every door of fitter: fit, explore, quants, a directory and serve.

    python -m tools.mutated_headers [--count 2000] [--first 0] [--jobs 2] [--seed 1] [--doors fit,serve] [--output FILE]

Each must end with a plan or with one line, below 600 MB and within ten seconds of computing, for all of its processes
together. The exit status is 1 where one does not. There are ten files in a directory, and in a grid of explore: nine of
these and a whole one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tools.loopback.web_server import Served, serving
from tools.mutated_headers import doors
from tools.mutated_headers.doors import Outcome
from tools.mutated_headers.mutations import Mutation, Source, drawn, mutated, sources

DOORS = ("fit", "quants", "serve", "explore", "directory")
_TOGETHER = 9
"""Changed headers in a directory, or in a grid, beside one that is whole."""
_WHOLE = "qwen3"

_Job = Callable[[], Outcome]


def outcomes(
    mutations: Sequence[Mutation], found: Mapping[str, Source], wanted: Sequence[str] = DOORS, jobs: int = 1
) -> Iterator[Outcome]:
    """What each of them comes to at each door, those that go together after those that go alone."""
    with tempfile.TemporaryDirectory(prefix="mutated-") as name, ThreadPoolExecutor(jobs) as pool:
        root = Path(name)
        with serving("--root", name, "--workers", str(jobs)) as served:
            doors.limit(served.process.pid)
            every = (
                _alone(door, number, each, found, root, served)
                if isinstance(each, Mutation)
                else _together(door, each, found, root)
                for door, number, each in _in_order(mutations, wanted)
            )
            yield from pool.map(lambda job: job(), every)


def _in_order(
    mutations: Sequence[Mutation], wanted: Sequence[str]
) -> Iterator[tuple[str, int, Mutation | Sequence[Mutation]]]:
    for begin in range(0, len(mutations), _TOGETHER):
        group = mutations[begin : begin + _TOGETHER]
        for number, each in enumerate(group, begin):
            yield from ((door, number, each) for door in wanted if door in doors.ALONE)
        yield from ((door, begin, group) for door in wanted if door in doors.TOGETHER)


def _alone(door: str, number: int, mutation: Mutation, found: Mapping[str, Source], root: Path, served: Served) -> _Job:
    """A job for one header at one door."""

    def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix=f"{door}-", dir=root) as name:
            source = found[mutation.architecture]
            path = source.write(Path(name) / "model.gguf", mutated(source, mutation))
            if door == "serve":
                return doors.question(served, str(mutation), str(path.relative_to(root)))
            return doors.command(door, number, str(mutation), path)

    return run


def _together(door: str, group: Sequence[Mutation], found: Mapping[str, Source], root: Path) -> _Job:
    """A job for a directory with a file of each of ``group``, and one that is whole."""

    def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix=f"{door}-", dir=root) as name:
            files = [found[_WHOLE].write(Path(name) / "whole.gguf")]
            for place, each in enumerate(group):
                source = found[each.architecture]
                files.append(source.write(Path(name) / f"{place}.gguf", mutated(source, each)))
            return doors.command_of_many(door, "; ".join(map(str, group)), files)

    return run


def _table(found: Sequence[Outcome]) -> Iterator[str]:
    yield "| door | tried | most MB | most s | ended as | wrong |"
    yield "| --- | --: | --: | --: | --- | --- |"
    for door in DOORS:
        own = [each for each in found if each.door == door]
        if own:
            ends = sorted(Counter(each.status for each in own).items())
            wrong = Counter(each.wrong for each in own if each.wrong)
            yield (
                f"| {door} | {len(own)} | {max(each.memory for each in own) / 1e6:.0f} "
                f"| {max(each.seconds for each in own):.1f} "
                f"| {', '.join(f'{status}: {count}' for status, count in ends)} "
                f"| {', '.join(f'{what}: {count}' for what, count in wrong.items()) or 'none'} |"
            )


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--output", type=Path, help="a file that gets a line of JSON for each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        made = sources(Path(name))
    wanted = drawn(made, given.count, given.seed)[given.first :]
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutated-") as cache, open(given.output or os.devnull, "w") as output:
        os.environ["XDG_CACHE_HOME"] = cache
        for each in outcomes(wanted, made, given.doors.split(","), given.jobs):
            found.append(each)
            print(json.dumps(asdict(each)), file=output, flush=True)
            if each.wrong:
                took = f"{each.memory / 1e6:.0f} MB, {each.seconds:.1f} s"
                print(f"{each.wrong}: {each.door}: {each.what}: {each.said} ({took})", flush=True)
    print("\n".join(_table(found)))
    return any(each.wrong for each in found)


if __name__ == "__main__":
    sys.exit(main())
