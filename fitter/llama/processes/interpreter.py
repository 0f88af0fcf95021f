"""Start another Python, isolated: its search path without the current directory, its environment, and a worker's.

Files of the current directory, such as a ``json.py``, are no part of fitter. Imports only modules that every Python has
loaded: the command calls it first, because ``python -m`` searches the current directory.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from subprocess import CompletedProcess

_LEAST_STACK = 256 << 10
"""Least bytes of stack: with less than 96 KiB Python or llama.cpp crashes even for small models."""

BOOT = """\
import sys
sys.path[:] = {path}
from {module} import {function}
{function}(*sys.argv[1:])
"""
"""Code of the new interpreter."""


def command(module: str, function: str, *words: str) -> list[str]:
    """Return the command line of an interpreter that calls ``function`` of ``module`` with ``words``. Raises
    ``OSError``.
    """
    check_stack()
    boot = BOOT.format(path=ascii(search_path()), module=module, function=function)
    # isolated: nothing of its environment, of the user's site-packages or of the current directory
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable or "", *flags, "-c", boot, *words]


def run(
    module: str, function: str, *words: str, seconds: float, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Call a function in another interpreter, without input, and wait for its end.

    Args:
        module: The function's module.
        function: The function; its arguments are ``words``.
        seconds: Time limit.
        environment: Its environment; by default this process's.

    Raises:
        OSError: It cannot be started.
        subprocess.TimeoutExpired: It did not end in time.
    """
    import subprocess

    from fitter import system

    done = subprocess.run(
        command(module, function, *words),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    done.returncode = system.status_of(done.returncode)
    return done


def check_stack() -> None:
    """Raise ``OSError`` if this process or its children would crash for lack of stack."""
    if problem := stack_problem():
        raise OSError(problem)


def stack_problem() -> str:
    """Say that the stack is too small, and what to do; '' if it is not."""
    # not before the search path is known: it imports modules that not every Python has loaded
    from fitter import system

    size = system.stack_limit()
    return f"the stack is limited to {size >> 10} KiB: run 'ulimit -s 8192' first" if 0 <= size < _LEAST_STACK else ""


def search_path() -> list[str]:
    """Return this process's search path without the current directory, and with the place of this package.

    ``python -m``, empty entries, and empty or relative entries of ``PYTHONPATH`` add the current directory. Absolute
    entries of ``PYTHONPATH`` and the interpreter's own stay.
    """
    try:
        here = os.getcwd()
    except OSError:
        # the directory was removed
        here = ""
    named = {os.path.normpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    path = [entry for entry in sys.path if os.path.isabs(entry) and (entry != here or entry in named or _is_own(entry))]
    # the place of this package comes last, because nothing else is searched there
    package = os.path.abspath(os.path.join(os.path.realpath(__file__), *[os.pardir] * 4))
    return path if package in path else [*path, package]


def _is_own(entry: str) -> bool:
    """Return whether a directory belongs to the interpreter: standard library or installed packages."""
    site = sys.modules.get("site")
    places = {os.path.dirname(os.__file__)}
    if site is not None:
        places |= {*site.getsitepackages(), site.getusersitepackages()}
    return entry in places


LLAMA_CPP = "FITTER_LLAMA_CPP"
"""Environment variable with a worker's llama.cpp."""

LLAMA_CPU = "FITTER_LLAMA_CPU"
"""Environment variable with the file name of a worker's CPU backend, if its llama.cpp has several."""

_is_worker = False
_is_canary = False


def worker_variables(where: str | None, cpu: str = "") -> dict[str, str]:
    """Return the variables of a worker.

    Args:
        where: Its llama.cpp; ``None`` for the environment's.
        cpu: File name of its CPU backend; empty for the best one.
    """
    return {**({} if where is None else {LLAMA_CPP: where}), **({LLAMA_CPU: cpu} if cpu else {})}


def is_worker() -> bool:
    """Return whether this process is a worker."""
    return _is_worker


def is_canary() -> bool:
    """Return whether this process tests a build of llama.cpp."""
    return _is_canary


def become_worker(is_canary: bool = False) -> None:
    """Mark this process as a worker, or as one that tests a build of llama.cpp."""
    global _is_worker, _is_canary
    _is_worker, _is_canary = True, is_canary


_PLACES = ("LD_LIBRARY_PATH", "GGML_BACKEND_PATH")
"""Environment variables with paths that a program needs to start."""


def from_anywhere(environment: Mapping[str, str]) -> dict[str, str]:
    """Make those paths absolute, and remove empty ones, which mean the current directory."""
    places = {name: environment[name].split(os.pathsep) for name in _PLACES if name in environment}
    whole = {name: os.pathsep.join(os.path.abspath(each) for each in paths if each) for name, paths in places.items()}
    return {**environment, **whole}
