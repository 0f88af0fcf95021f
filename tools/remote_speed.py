"""How long a plan of a model takes whose files are elsewhere, and what it fetches: ``python -m tools.remote_speed``.

A local server with ranges has sparse files of the largest shapes, split as they are published. Each is planned by a
process of its own, first without anything in the cache and then with it; local files are the comparison. The server
counts what it sends. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.client import Worker
from tools import shapes
from tools.ranges import FileServer, clean_environment, serving

FILES = {"deepseek-v3.1": 9, "kimi-k2": 14}
"""Shapes, and how many files each is split into."""
GPUS = ("4x 31600MiB", "2x 23688MiB", "2x 48270MiB")
MOST_BYTES = 1.2
"""Bytes fetched, by those of the headers."""
MOST_SECONDS = 2.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """A plan by a process: seconds on the clock and on processors, bytes that the server sent, and its answers."""

    seconds: float
    cpu: float
    sent: int = 0
    requests: int = 0


def run(model: str, environment: Mapping[str, str], server: FileServer) -> Run:
    """Plan a model; raises ``RuntimeError`` where it does not fit."""
    command = [sys.executable, "-m", "fitter", model, "-c", "32768", *(word for gpu in GPUS for word in ("--gpu", gpu))]
    server.forget()
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=_ROOT, env=dict(environment), capture_output=True, text=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, server.sent, len(server.requests))


def measured(shape: str, count: int, times: int, server: FileServer) -> bool:
    """Measure a shape and print it; returns whether everything is within its limit."""
    first = shapes.write_split(shape, server.folder, count)
    files = sorted(server.folder.glob(f"{shape}-*.gguf"))
    with Worker() as worker:
        headers = sum(worker.header(str(file)).data_offset for file in files)
    url = f"{server.url}/{first.name}"
    runs: dict[str, list[Run]] = {"local": [], "empty cache": [], "cached": []}
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="fitter-") as cache:
            environment = {**clean_environment(), "XDG_CACHE_HOME": cache}
            runs["local"].append(run(str(first), environment, server))
            runs["empty cache"].append(run(url, environment, server))
            runs["cached"].append(run(url, environment, server))
    is_good = True
    for name, found in runs.items():
        share = max(each.sent for each in found) / headers
        seconds = statistics.median(each.seconds for each in found)
        is_good = is_good and share < MOST_BYTES and seconds < MOST_SECONDS
        cpu = statistics.median(each.cpu for each in found)
        print(
            f"{shape:15} {name:12} {seconds:6.2f} s (least {min(each.seconds for each in found):.2f}) {cpu:6.2f} s of "
            f"processors, {found[-1].requests:3} requests, {share:.3f} of {headers / 2**20:.1f} MiB of headers",
            flush=True,
        )
    return is_good


def main(args: Sequence[str] | None = None) -> int:
    """Measure every shape; returns 1 where something is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="how often each is planned [default: 5]")
    parser.add_argument("--shape", action="append", choices=list(FILES), help="only this one [default: all]")
    given = parser.parse_args(args)
    with (
        tempfile.TemporaryDirectory(prefix="fitter-", dir=os.environ.get("TMPDIR")) as place,
        serving(Path(place)) as it,
    ):
        good = [measured(shape, FILES[shape], given.times, it) for shape in given.shape or FILES]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
