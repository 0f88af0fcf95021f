"""Answers about builds of llama.cpp, stored in the cache directory, and whether a build can be trusted.

A build that fitter was compiled for is trusted. Any other must first load the models of ``fitter.llama.load.canary``,
once for each build, in another process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fitter import system
from fitter.errors import LibraryError
from fitter.llama.build.build_folder import Build
from fitter.llama.build.linking import binaries
from fitter.llama.processes import interpreter
from fitter.llama.processes.worker_exit import is_resource_error
from fitter.storage import cache_folder, is_lasting, locked, make_private, read_json, write_json


def answers_folder() -> Path:
    """Name ``llama-fitter/llama-cpp`` in the cache directory (``XDG_CACHE_HOME``)."""
    return cache_folder("llama-cpp")


def answer_path(name: str) -> Path:
    """Name the file of an answer."""
    return answers_folder() / f"{name}.json"


def read_answer(name: str) -> dict[str, Any] | None:
    """Read an answer; ``None`` if there is none, or if it cannot be read."""
    try:
        answer = read_json(answer_path(name))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def write_answer(name: str, answer: dict[str, Any]) -> None:
    """Store an answer, all or nothing; ignore errors, because it can be asked again."""
    with contextlib.suppress(OSError):
        write_json(answer_path(name), answer)


@contextlib.contextmanager
def asked_alone() -> Iterator[None]:
    """Let other processes that would ask too wait, if files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            make_private(answers_folder())
            stack.enter_context(locked(answers_folder() / "lock"))
        yield


_PATIENCE = 120.0
"""Seconds for the models: a crash is quick, and a busy machine slow."""
_VERSION = "3"
"""Increase it when the questions to a build change."""

_PLACING, _COMPUTING = "main", "compute"


def check(build: Build, fitter_libraries: tuple[str, ...], commit: str) -> None:
    """Raise ``LibraryError`` if ``build`` cannot be trusted.

    Args:
        build: The build.
        fitter_libraries: Paths of fitter's libraries, which the verdict includes.
        commit: llama.cpp's commit.
    """
    if problem := verdict(build, fitter_libraries):
        raise LibraryError(
            f"{build.libllama} (commit {commit or 'unknown'}) is not a llama.cpp that fitter can use: {problem}; name "
            "another one with --llama-cpp, or reinstall llama-fitter with LLAMA_CPP_SOURCE_DIR set to its source"
            + _how_to_retry(build, fitter_libraries)
        )


def problem_of(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    """Return the verdict, with the command that asks again."""
    problem = verdict(build, fitter_libraries)
    return problem and problem + _how_to_retry(build, fitter_libraries)


def _how_to_retry(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    path = answer_path(_placing_name(build, fitter_libraries))
    return f"; delete {path} to have it tried again" if is_lasting() and path.exists() else ""


def _placing_name(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    return f"verdict-{_key(build, fitter_libraries)}"


def verdict(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    """Return why ``build`` cannot be trusted, '' if it can; from an earlier answer if there is one.

    Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(_placing_name(build, fitter_libraries), build, _PLACING)


def problem_of_computing(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    """Return why ``build`` cannot compute with weights in the processor's own layouts, '' if it can.

    AMX's layouts crash if a GCC compiled ``build`` that writes only part of the configuration of AMX's tiles
    (gcc.gnu.org/PR114098). Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(f"computing-{_key(build, fitter_libraries)}", build, _COMPUTING)


def _asked_once(name: str, build: Build, entry: str) -> str:
    if (answer := _read(name)) is not None:
        return answer
    with asked_alone():
        # Another process may have been quicker.
        if (answer := _read(name)) is None:
            answer = ask(build, entry)
            write_answer(name, {"problem": answer})
    return answer


def _read(name: str) -> str | None:
    problem = (read_answer(name) or {}).get("problem")
    return problem if isinstance(problem, str) else None


def ask(build: Build, entry: str = _PLACING) -> str:
    """Ask now why ``build`` cannot be trusted, '' if it can.

    An answer, or a crash that repeats, counts. Anything else, such as a signal from outside or a full disk, may differ
    next time.

    Args:
        build: The build.
        entry: Function of ``fitter.llama.load.canary`` to call.

    Raises:
        LibraryError: There is no answer.
    """
    first = _run_canary(build, entry)
    last = first if isinstance(first, str) else _run_canary(build, entry)
    if isinstance(last, str):
        return last
    if last == first and last.crash:
        return f"it ended with signal {last.crash} when a small model was loaded"
    raise LibraryError(f"{build.libllama} cannot be tried with a small model ({last.said}): try again")


class _Accident(NamedTuple):
    """A try without an answer. ``crash``: the signal that ended llama.cpp, 0 for another reason."""

    crash: int
    said: str


def _run_canary(build: Build, entry: str) -> str | _Accident:
    # workers import this module, and read stored answers alone
    import subprocess

    try:
        environment = {**os.environ, interpreter.LLAMA_CPP: build.where}
        done = interpreter.run("fitter.llama.load.canary", entry, seconds=_PATIENCE, environment=environment)
    except subprocess.TimeoutExpired:
        return _Accident(0, f"it did not end within {_PATIENCE:.0f} seconds")
    except OSError as error:
        return _Accident(0, str(error))
    if done.returncode == 0 and done.stdout:
        return done.stdout.splitlines()[-1].strip()
    if done.returncode < 0:
        number = -done.returncode
        is_own = number in system.CRASHES and not is_resource_error(done.stderr)
        return _Accident(number if is_own else 0, f"it ended with signal {number}")
    said = done.stderr.strip().splitlines()
    return _Accident(0, said[-1] if said else f"it ended with status {done.returncode}")


def _key(build: Build, fitter_libraries: tuple[str, ...]) -> str:
    parts = [_VERSION, build.key, *(binaries.linking_of(path).build_id or _digest(path) for path in fitter_libraries)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
