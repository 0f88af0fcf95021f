"""Whether a build of llama.cpp can be trusted: asked once of each build, in a process of its own, and kept.

A build that fitter was compiled for is trusted. Any other is first given the models of ``fitter.llama.load.canary``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from fitter.errors import LibraryError
from fitter.llama.build import elf, stored_answers
from fitter.llama.processes import interpreter, worker_environment
from fitter.llama.build.build_folder import Build
from fitter.llama.processes.resource_errors import is_resource_error
from fitter.storage import folders

_PATIENCE = 120.0
"""Seconds that the models may take: a crash is quick, and a loaded machine is slow."""
_VERSION = "2"
"""To be counted up when what is asked of a build changes."""
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals that a program brings on itself; any other comes from outside."""

_PLACING, _COMPUTING = "main", "compute"


def check(build: Build, own: tuple[str, ...], commit: str) -> None:
    """Raise ``LibraryError`` if ``build`` cannot be trusted.

    ``own``: the paths of fitter's own libraries, for which the verdict is good. ``commit``: llama.cpp's.
    """
    if problem := verdict(build, own):
        raise LibraryError(
            f"{build.libllama} (commit {commit or 'unknown'}) is not a llama.cpp that fitter can use: {problem}; name "
            "another one with --llama-cpp, or reinstall llama-fitter with LLAMA_CPP_SOURCE_DIR set to its source"
            + _again(build, own)
        )


def problem_of(build: Build, own: tuple[str, ...]) -> str:
    """As ``verdict``, with what to do to have it asked anew."""
    problem = verdict(build, own)
    return problem and problem + _again(build, own)


def _again(build: Build, own: tuple[str, ...]) -> str:
    path = stored_answers.path_of(_placing(build, own))
    return f"; delete {path} to have it tried again" if folders.is_lasting() and path.exists() else ""


def _placing(build: Build, own: tuple[str, ...]) -> str:
    return f"verdict-{_key(build, own)}"


def verdict(build: Build, own: tuple[str, ...]) -> str:
    """Why ``build`` cannot be trusted, '' if it can; from an earlier time where it was asked then.

    Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(_placing(build, own), build, _PLACING)


def problem_of_computing(build: Build, own: tuple[str, ...]) -> str:
    """Why ``build`` cannot compute on this machine's processor with weights in its own layouts, '' if it can.

    Those of AMX end in a crash where ``build`` was compiled by a GCC that writes but a part of the configuration of
    AMX's tiles (gcc.gnu.org/PR114098). Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(f"computing-{_key(build, own)}", build, _COMPUTING)


def _asked_once(name: str, build: Build, entry: str) -> str:
    if (known := _read(name)) is not None:
        return known
    with stored_answers.alone():
        # Another process may have been quicker.
        if (known := _read(name)) is None:
            known = ask(build, entry)
            stored_answers.write(name, {"problem": known})
    return known


def _read(name: str) -> str | None:
    problem = (stored_answers.read(name) or {}).get("problem")
    return problem if isinstance(problem, str) else None


def ask(build: Build, entry: str = _PLACING) -> str:
    """Why ``build`` cannot be trusted, '' if it can, asked now. Raises ``LibraryError`` if it cannot be asked.

    ``entry``: the function of ``fitter.llama.load.canary`` that is called. An answer is what that says, or a crash that
    comes again. Anything else, such as a signal from outside or a full disk, may be another machine's tomorrow.
    """
    first = _try(build, entry)
    last = first if isinstance(first, str) else _try(build, entry)
    if isinstance(last, str):
        return last
    if last == first and last.crash:
        return f"it ended with signal {last.crash} when a small model was loaded"
    raise LibraryError(f"{build.libllama} cannot be tried with a small model ({last.said}): try again")


class _Accident(NamedTuple):
    """A try without an answer. ``crash``: the signal that llama.cpp ended with, 0 for any other reason."""

    crash: int
    said: str


def _try(build: Build, entry: str) -> str | _Accident:
    try:
        environment = {**os.environ, worker_environment.LLAMA_CPP: build.where}
        done = interpreter.run("fitter.llama.load.canary", entry, seconds=_PATIENCE, environment=environment)
    except subprocess.TimeoutExpired:
        return _Accident(0, f"it did not end within {_PATIENCE:.0f} seconds")
    except OSError as error:
        return _Accident(0, str(error))
    if done.returncode == 0 and done.stdout:
        return done.stdout.splitlines()[-1].strip()
    if done.returncode < 0:
        number = -done.returncode
        is_own = number in _CRASHES and not is_resource_error(done.stderr)
        return _Accident(number if is_own else 0, f"it ended with signal {number}")
    said = done.stderr.strip().splitlines()
    return _Accident(0, said[-1] if said else f"it ended with status {done.returncode}")


def _key(build: Build, own: tuple[str, ...]) -> str:
    parts = [_VERSION, build.key, *(elf.linking_of(path).build_id or _digest(path) for path in own)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
