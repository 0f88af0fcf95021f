"""Measure loads with one build of llama.cpp, on any system: ``loads.py BUILD JOBS ANSWERS``. Needs nothing but fitter.

``JOBS`` is JSON: a list of groups, each with an environment, described devices, and loads of a path and parameters.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.processes import wire
from fitter.llama.types import Params, VirtualDevice


def answers(build: str, group: dict[str, Any]) -> list[Any]:
    """What each load of a group takes, or why it is refused."""
    os.environ.update(group["environment"])
    found = []
    try:
        with Worker([wire.decode(VirtualDevice, device) for device in group["devices"]], llama_cpp=build) as worker:
            for path, params in group["loads"]:
                try:
                    found.append(wire.encode(worker.measure(path, wire.decode(Params, params), reserve=True)))
                except FitterError as error:
                    found.append(f"{type(error).__name__} {str(error).removeprefix(f'{path}: ')}")
    finally:
        for name in group["environment"]:
            del os.environ[name]
    return found


def main(build: str, jobs: str, result: str) -> None:
    """Write the answers to the jobs as JSON."""
    with open(jobs, encoding="utf-8") as file:
        groups = json.load(file)
    with open(result, "w", encoding="utf-8") as file:
        json.dump([answers(build, group) for group in groups], file)


if __name__ == "__main__":
    main(*sys.argv[1:])
