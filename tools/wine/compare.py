"""``python -m tools.wine.compare``: compare one llama.cpp's answers on Linux and on Windows, byte for byte.

They are drawn loads (``tools/oracle/draw.py``), or with ``--pairs`` plans of ``tools/comparisons/cases.py``: arguments
and bytes. The exit status is 1 if an answer differs.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fitter.llama.processes import wire
from fitter.machine.gpu import parse_gpus
from tools.builds import llama_builds
from tools.comparisons.cases import CASES, MIXED, Case
from tools.comparisons.cuda_reference import Load, cheapest_order, load_of, write_model
from tools.models import shapes
from tools.oracle.draw import draw
from tools.wine import loads, place, plans

PathOf = Callable[[Path], str]
"""How a system names a path of this one."""


def drawn(count: int, seed: int) -> list[Load]:
    """The loads, those that share a process next to each other."""
    rows = draw(shapes.NAMES, count, seed)
    return sorted((load_of(str(number), row) for number, row in enumerate(rows)), key=cheapest_order)


def answers_of_linux(build: str, found: Sequence[Load], folder: Path) -> list[Any]:
    """The answers of this system."""
    return _flat(_ask_linux(loads, build, _groups(found, folder, str), folder))


def answers_of_windows(build: str, found: Sequence[Load], folder: Path) -> list[Any]:
    """The answers of fitter for Windows. Raises ``FetchError``, and ``RuntimeError`` if it gives none."""
    return _flat(_ask_windows(loads, build, _groups(found, folder, place.windows_path), folder))


def plans_of_linux(build: str, cases: Sequence[Case], folder: Path, more: Mapping[str, Any]) -> list[Any]:
    """The plans of this system, each with ``more`` keywords of ``fitter.fit``."""
    return _ask_linux(plans, build, [_keywords(case, folder, str) | dict(more) for case in cases], folder)


def plans_of_windows(build: str, cases: Sequence[Case], folder: Path, more: Mapping[str, Any]) -> list[Any]:
    """The plans of fitter for Windows. Raises ``FetchError``, and ``RuntimeError`` if it gives none."""
    jobs = [_keywords(case, folder, place.windows_path) | dict(more) for case in cases]
    return _ask_windows(plans, build, jobs, folder)


def _keywords(case: Case, folder: Path, path_of: PathOf) -> dict[str, Any]:
    names = {"-c": "n_ctx", "--fit-ctx": "fit_ctx"}
    words = case.options
    options = {names[word]: int(value) for word, value in zip(words[::2], words[1::2], strict=True)}
    model = path_of(shapes.write(case.shape, folder, vocab=False))
    return {"model": model, "gpus": list(case.gpus), "prompt": case.prompt, "program": "llama-server", **options}


def _groups(found: Sequence[Load], folder: Path, path_of: PathOf) -> list[Any]:
    groups = []
    for (environment, devices), group in itertools.groupby(found, key=lambda load: (load.environment, load.devices)):
        wanted = [(path_of(write_model(load.model, folder)), wire.encode(load.params)) for load in group]
        groups.append({"environment": dict(environment), "devices": list(map(wire.encode, devices)), "loads": wanted})
    return groups


def _ask_linux(script: ModuleType, build: str, jobs: list[Any], folder: Path) -> list[Any]:
    words = _written(script, llama_builds.fetched(llama_builds.packaged()[build]), jobs, folder)
    subprocess.run([sys.executable, *map(str, words)], check=True)
    return _read(words[-1])


def _ask_windows(script: ModuleType, build: str, jobs: list[Any], folder: Path) -> list[Any]:
    words = _written(script, place.build(build), jobs, folder)
    done = place.run([place.windows_path(word) for word in words], seconds=7200)
    if done.returncode != 0:
        raise RuntimeError(f"no answers under wine: {done.stderr.strip().splitlines()[-1:]}")
    return _read(words[-1])


def _written(script: ModuleType, build: Path, jobs: list[Any], folder: Path) -> tuple[Path, Path, Path, Path]:
    """What the script is called with; the last is where it writes the answers."""
    assert script.__file__ is not None
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    return Path(script.__file__), build, path, folder / "answers.json"


def _read(path: Path) -> list[Any]:
    answers: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return answers


def _flat(groups: list[Any]) -> list[Any]:
    return [_without_folders(answer) for group in groups for answer in group]


def _without_folders(answer: Any) -> Any:
    """A refusal without the place in llama.cpp's source, which is another folder in each build."""
    return re.sub(r"\S*[/\\](\S+:\d+: )", r"\1", answer) if isinstance(answer, str) else answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask both and compare."""
    parser = argparse.ArgumentParser(prog="python -m tools.wine.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", type=int, default=200, help="how many are drawn (200)")
    parser.add_argument("--seed", type=int, default=33, help="what they are drawn with (33)")
    parser.add_argument("--pairs", action="store_true", help="compare plans of shapes and machines instead")
    parser.add_argument("--split-mode", help="of those plans, on machines with several cards")
    parser.add_argument("--build", default="v0.4.0", choices=sorted(place.BUILDS), help="the llama.cpp (v0.4.0)")
    options = parser.parse_args(arguments)
    asked: Any
    of_linux: Callable[..., list[Any]]
    of_windows: Callable[..., list[Any]]
    if options.pairs:
        more = {"split_mode": options.split_mode} if options.split_mode else {}
        asked = [case for case in (*CASES, *MIXED) if not more or len(parse_gpus(case.gpus)) > 1]
        of_linux, of_windows = partial(plans_of_linux, more=more), partial(plans_of_windows, more=more)
    else:
        asked = drawn(options.loads, options.seed)
        of_linux, of_windows = answers_of_linux, answers_of_windows
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        linux = of_linux(options.build, asked, Path(folder))
        between = time.monotonic()
        windows = of_windows(options.build, asked, Path(folder))
        ended = time.monotonic()
    differing = [(each, *pair) for each, *pair in zip(asked, linux, windows, strict=True) if pair[0] != pair[1]]
    for each, here, there in differing:
        print(f"{each}\n  Linux   {here}\n  Windows {there}")
    refused = sum(isinstance(answer, str) for answer in linux)
    print(f"{len(asked) - len(differing)} of {len(asked)} are equal, of which {refused} are refused on Linux")
    print(f"Linux took {between - begun:.0f} s, Windows under wine {ended - between:.0f} s")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
