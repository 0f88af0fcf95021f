"""Find the llama-server of a plan, and read its version."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from fitter import system
from fitter.errors import LibraryError, PlanError, UsageError
from fitter.llama.build.build_folder import PYTHON, find, named, on_path
from fitter.llama.build.functions import same_commit
from fitter.llama.build.linking import EXECUTABLE, LIBRARY
from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.llama.types import LlamaCpp
from fitter.text import printable

NAME = "llama-server"

_BELOW = ("", "bin", "build/bin", "usr/bin")
_BESIDE = ("", "../bin")
_SECONDS = 30.0
_LAST_SECONDS = 1.0
"""Seconds for the rest of what an ended program has printed."""
_MOST_BYTES = 1 << 16
_VERSION = re.compile(r"^version: *(.+)$", re.MULTILINE)
_COMMIT = re.compile(r"(?:\(|\bcommit )([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class ServerProgram:
    """A llama-server that starts."""

    path: str
    """Its path."""
    version: str
    """Its version and commit, as printed; empty without any."""

    @property
    def commit(self) -> str:
        """Its commit; empty without any."""
        match = _COMMIT.search(self.version)
        return match[1] if match else ""


def find_server(server: str | None = None, llama_cpp: str | None = None) -> str:
    """Find the llama-server.

    Args:
        server: Its file or directory, if set.
        llama_cpp: Else a llama-server, a directory with one, or a libllama beside one. Without both, the one on the
            PATH.

    Returns:
        Its path.

    Raises:
        UsageError: It is not at the named place.
        LibraryError: No place is named, and the PATH has none.
    """
    if server is not None:
        return _program_at(server, _BELOW) or _missing_error(server)
    where = named(llama_cpp)
    if where != PYTHON:
        return _program_at(where, _BELOW) or _missing_error(where)
    if program := on_path(NAME):
        return program
    raise LibraryError(f"there is no {NAME} on the PATH: install llama.cpp, or name one with --server")


def named_server(llama_cpp: str | None) -> str | None:
    """Return the path of the llama-server that ``llama_cpp`` or the environment names; ``None`` if they name none."""
    where = named(llama_cpp)
    path = None if where == PYTHON else _program_at(where, ())
    return path if path and os.path.basename(path) == NAME + EXECUTABLE else None


def _missing_error(where: str) -> str:
    if not os.path.exists(os.path.expanduser(where)):
        raise UsageError(f"there is no {NAME} at {where}: name the file with --server")
    raise UsageError(f"{where} is no {NAME} and has none: name the file with --server")


def _program_at(where: str, below: tuple[str, ...]) -> str | None:
    if program := on_path(where):
        return program
    path = os.path.expanduser(where)
    if os.path.isdir(path):
        files = (os.path.join(path, name, NAME + EXECUTABLE) for name in below)
        return next((os.path.abspath(file) for file in files if os.path.isfile(file)), None)
    if os.path.isfile(path):
        if LIBRARY.format("").removeprefix("lib") not in os.path.basename(path):
            return os.path.abspath(path)
        return _program_at(os.path.dirname(os.path.abspath(path)), _BESIDE)
    return None


def asked(path: str) -> ServerProgram:
    """Run the llama-server at ``path`` for its version.

    Raises:
        LibraryError: It does not start: not executable, for another machine, or without a library.
    """
    try:
        with SupervisedProgram([path, "--version"], os.environ) as program:
            text, status = _all_of(program)
    except OSError as error:
        raise LibraryError(cannot_start(path, error)) from None
    said = printable(text.decode(errors="replace").strip().rpartition("\n")[2])
    if status is None:
        raise LibraryError(
            f"{path} --version did not end within {_SECONDS:.0f} seconds: is it a {NAME}? Name another with --server"
        )
    if status != 0:
        raise LibraryError(f"{path} does not start ({ending(status)}): {said or 'it says nothing'}")
    match = _VERSION.search(text.decode(errors="replace"))
    return ServerProgram(path, printable(match[1].strip()) if match else "")


def cannot_start(path: str, error: OSError) -> str:
    """Explain why the program at ``path`` cannot be started, and what to do."""
    if isinstance(error, PermissionError):
        return f"{path} is not executable: chmod +x it, or name another {NAME} with --server"
    why = (error.strerror or str(error)).lower()
    return f"{path} cannot be started ({why}): name a {NAME} for this machine with --server"


def ending(status: int) -> str:
    """Describe how a program ended."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _all_of(program: SupervisedProgram) -> tuple[bytes, int | None]:
    """Return the end of a program's output, and its exit status; ``None`` if it does not end in time."""
    pipe = system.Reader(os.dup(program.output.fileno()))
    deadline, text = time.monotonic() + _SECONDS, b""
    status = None
    while status is None and time.monotonic() < deadline:
        status = program.wait(0.02)
        while pipe.is_ready(0.0 if status is None else _LAST_SECONDS) and (piece := pipe.read()):
            text = (text + piece)[-_MOST_BYTES:]
    pipe.close()
    return text, status


def check_same_build(planned: LlamaCpp | None, server: ServerProgram) -> None:
    """Raise ``PlanError`` if ``server`` is another llama.cpp than the plan's."""
    if planned is None:
        return
    is_same = same_commit(server.commit, planned.commit)
    if is_same is None:
        is_same = _key_of(server.path) == planned.key
    if not is_same and not server.version:
        raise PlanError(
            f"{server.path} does not say its version, so it may not be the llama.cpp {planned.version} that the plan "
            f"was made with: is it a {NAME}? Name one with --server"
        )
    if not is_same:
        raise PlanError(
            f"the plan was made with llama.cpp {planned.version}, and {server.path} is {server.version}, "
            f"which may take other memory: fit with --llama-cpp {server.path}"
        )


def _key_of(path: str) -> str:
    try:
        return find(path).key
    except (LibraryError, UsageError):
        return ""
