"""``python -m tools.wine.compare``: compare drawn loads of one llama.cpp on Linux and on Windows, byte for byte.

The loads are those of ``tools/oracle/draw.py``. The exit status is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitter.llama.processes import wire
from tools import llama_builds, shapes
from tools.cuda_reference import Load, cheapest_order, load_of, write_model
from tools.oracle.draw import draw
from tools.wine import loads, place


def drawn(count: int, seed: int) -> list[Load]:
    """The loads, those that share a process next to each other."""
    rows = draw(shapes.NAMES, count, seed)
    return sorted((load_of(str(number), row) for number, row in enumerate(rows)), key=cheapest_order)


def answers_of_linux(build: str, found: Sequence[Load], folder: Path) -> list[Any]:
    """The answers of this system."""
    jobs, result = _jobs(found, folder, windows=False), folder / "linux.json"
    subprocess.run(
        [sys.executable, loads.__file__, str(llama_builds.fetched(llama_builds.packaged()[build])), jobs, result],
        check=True,
    )
    return _read(result)


def answers_of_windows(build: str, found: Sequence[Load], folder: Path) -> list[Any]:
    """The answers of fitter for Windows. Raises ``FetchError``, and ``RuntimeError`` if it gives none."""
    jobs, result = _jobs(found, folder, windows=True), folder / "windows.json"
    words = (Path(loads.__file__), place.build(build), jobs, result)
    done = place.run([place.windows_path(word) for word in words], seconds=3600)
    if done.returncode != 0:
        raise RuntimeError(f"no answers under wine: {done.stderr.strip().splitlines()[-1:]}")
    return _read(result)


def _jobs(found: Sequence[Load], folder: Path, *, windows: bool) -> Path:
    groups = []
    for (environment, devices), group in itertools.groupby(found, key=lambda load: (load.environment, load.devices)):
        paths = [(write_model(load.model, folder), load.params) for load in group]
        wanted = [(place.windows_path(path) if windows else str(path), wire.encode(params)) for path, params in paths]
        groups.append({"environment": dict(environment), "devices": list(map(wire.encode, devices)), "loads": wanted})
    path = folder / ("windows-jobs.json" if windows else "linux-jobs.json")
    path.write_text(json.dumps(groups), encoding="utf-8")
    return path


def _read(path: Path) -> list[Any]:
    groups = json.loads(path.read_text(encoding="utf-8"))
    return [_without_folders(answer) for group in groups for answer in group]


def _without_folders(answer: Any) -> Any:
    """A refusal without the place in llama.cpp's source, which is another folder in each build."""
    return re.sub(r"\S*[/\\](\S+:\d+: )", r"\1", answer) if isinstance(answer, str) else answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, ask both and compare."""
    parser = argparse.ArgumentParser(prog="python -m tools.wine.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=33, help="what they are drawn with (33)")
    parser.add_argument("--build", default="v0.4.0", choices=sorted(place.BUILDS), help="the llama.cpp (v0.4.0)")
    options = parser.parse_args(arguments)
    found = drawn(options.loads, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        linux = answers_of_linux(options.build, found, Path(folder))
        between = time.monotonic()
        windows = answers_of_windows(options.build, found, Path(folder))
        ended = time.monotonic()
    differing = [(load, *pair) for load, *pair in zip(found, linux, windows, strict=True) if pair[0] != pair[1]]
    for load, here, there in differing:
        print(f"{load.name} {load.environment or ''} {load.params}\n  Linux   {here}\n  Windows {there}")
    refused = sum(isinstance(answer, str) for answer in linux)
    print(f"{len(found) - len(differing)} of {len(found)} loads are equal, of which {refused} are refused on Linux")
    print(f"Linux took {between - begun:.0f} s, Windows under wine {ended - between:.0f} s")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
