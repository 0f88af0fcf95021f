"""Processes of tests: the command ``fitter`` as a user runs it, and Python code of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What the command has said when it ran in this process."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


Command = Callable[..., Said]
"""Runs the command in this process with words of any kind: the fixture ``command``."""


def run_fitter(*words: object, cwd: Path | None = None, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``fitter`` with these words and variables of its environment; a variable that is None is unset."""
    return _run(["-m", "fitter", *map(str, words)], cwd, variables)


def run_python(code: str, *words: object, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run code that can import what the tests can; the words are its arguments."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return _run(["-c", code, *map(str, words)], None, {"PYTHONPATH": path, **variables})


def json_of_python(code: str, *words: object, **variables: str | None) -> Any:
    """Run code that has to succeed, and return the JSON on the last line that it prints."""
    done = run_python(code, *words, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _run(words: Sequence[str], cwd: Path | None, variables: dict[str, str | None]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
