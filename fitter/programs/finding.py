"""Which llama-server a plan is for, and what that one says of itself. It is only run for its version here."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from fitter.errors import LibraryError, PlanError, UsageError
from fitter.llama.build.build_folder import PYTHON, find, named, on_path
from fitter.llama.build.functions import same_commit
from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.llama.types import LlamaCpp
from fitter.text import printable

NAME = "llama-server"

_BELOW = ("", "bin", "build/bin", "usr/bin")
_BESIDE = ("", "../bin")
_SECONDS = 30.0
_MOST_BYTES = 1 << 16
_VERSION = re.compile(r"^version: *(.+)$", re.MULTILINE)
_COMMIT = re.compile(r"(?:\(|\bcommit )([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class ServerProgram:
    """A llama-server that starts."""

    path: str
    """Its path."""
    version: str
    """Its version and commit, as it says them; empty where it says none."""

    @property
    def commit(self) -> str:
        """Its commit, empty where it says none."""
        match = _COMMIT.search(self.version)
        return match[1] if match else ""


def find_server(server: str | None = None, llama_cpp: str | None = None) -> str:
    """The path of the llama-server that is meant.

    That is the file or directory ``server``; without it the one of ``llama_cpp``, where that names a llama-server, a
    directory that has one or a libllama that it stands beside; else the one on the PATH. Raises ``UsageError`` where
    the one that was named is not there, ``LibraryError`` where none was named and there is none.
    """
    if server is not None:
        return _at(server, _BELOW) or _missing(server)
    where = named(llama_cpp)
    if where != PYTHON:
        return _at(where, _BELOW) or _missing(where)
    if found := on_path(NAME):
        return found
    raise LibraryError(f"there is no {NAME} on the PATH: install llama.cpp, or name one with --server")


def named_server(llama_cpp: str | None) -> str | None:
    """The path of the llama-server that ``llama_cpp``, or the environment, names; ``None`` where that is none."""
    where = named(llama_cpp)
    path = None if where == PYTHON else _at(where, ())
    return path if path and os.path.basename(path) == NAME else None


def _missing(where: str) -> str:
    if not os.path.exists(os.path.expanduser(where)):
        raise UsageError(f"there is no {NAME} at {where}: name the file with --server")
    raise UsageError(f"{where} is no {NAME} and has none: name the file with --server")


def _at(where: str, below: tuple[str, ...]) -> str | None:
    if program := on_path(where):
        return program
    path = os.path.expanduser(where)
    if os.path.isdir(path):
        files = (os.path.join(path, name, NAME) for name in below)
        return next((os.path.abspath(file) for file in files if os.path.isfile(file)), None)
    if os.path.isfile(path):
        if ".so" not in os.path.basename(path):
            return os.path.abspath(path)
        return _at(os.path.dirname(os.path.abspath(path)), _BESIDE)
    return None


def asked(path: str) -> ServerProgram:
    """The llama-server at ``path`` with its version.

    Raises ``LibraryError`` where it does not start: it is not executable, is for another machine, lacks a library.
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
    """Why the program at ``path`` cannot be started, and what to do, for a message."""
    if isinstance(error, PermissionError):
        return f"{path} is not executable: chmod +x it, or name another {NAME} with --server"
    why = (error.strerror or str(error)).lower()
    return f"{path} cannot be started ({why}): name a {NAME} for this machine with --server"


def ending(status: int) -> str:
    """How a program ended, for a message."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _all_of(program: SupervisedProgram) -> tuple[bytes, int | None]:
    """The end of what it writes, and its exit status; ``None`` where it does not end in time."""
    os.set_blocking(program.output.fileno(), False)
    deadline, text = time.monotonic() + _SECONDS, b""
    status = None
    while status is None and time.monotonic() < deadline:
        status = program.wait(0.02)
        text = (text + (program.output.read() or b""))[-_MOST_BYTES:]
    return text, status


def check_same_build(planned: LlamaCpp | None, server: ServerProgram) -> None:
    """Raise ``PlanError`` where ``planned`` is not the llama.cpp of ``server``, which may take other memory."""
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
