"""The one way to start another Python: isolated, with the search path of this process but for the current directory.

Whatever is in the current directory, such as a ``json.py``, is no part of fitter. Imports only what every Python
has imported already: the command calls it before anything else, since ``python -m`` looks in the current directory.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from subprocess import CompletedProcess

_LEAST_STACK = 256 << 10
"""Bytes of stack: with less than 96 KiB Python or llama.cpp crashes where small models are planned."""

BOOT = """\
import sys
sys.path[:] = {path}
from {module} import {function}
{function}(*sys.argv[1:])
"""
"""What the new interpreter runs."""


def command(module: str, function: str, *words: str) -> list[str]:
    """The command line of an interpreter that calls ``function`` of ``module`` with ``words``. Raises ``OSError``."""
    check_stack()
    boot = BOOT.format(path=ascii(search_path()), module=module, function=function)
    # isolated: nothing of its environment, of the user's site-packages or of the current directory
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable or "", *flags, "-c", boot, *words]


def run(
    module: str, function: str, *words: str, seconds: float, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a function in an interpreter of its own, without input, to its end.

    Args:
        module: The function's module.
        function: The function; its arguments are ``words``.
        seconds: How long it may take.
        environment: Its environment; by default the environment of this process.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    import subprocess

    return subprocess.run(
        command(module, function, *words),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def check_stack() -> None:
    """Raise ``OSError`` where this process, or one that it starts, would crash for want of stack."""
    if problem := stack_problem():
        raise OSError(problem)


def stack_problem() -> str:
    """That the stack is too small, and what to do; '' where it is not."""
    import resource

    size, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return f"the stack is limited to {size >> 10} KiB: run 'ulimit -s 8192' first" if 0 <= size < _LEAST_STACK else ""


def search_path() -> list[str]:
    """Where this process finds modules, without the current directory, and with the place of this package.

    Python itself adds the current directory (``python -m``, an empty entry), and so does an entry of ``PYTHONPATH``
    that is empty or relative. One that ``PYTHONPATH`` names in full stays, and so do the interpreter's own.
    """
    try:
        here = os.getcwd()
    except OSError:
        # it was removed, so nothing can be found there
        here = ""
    named = {os.path.normpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    path = [entry for entry in sys.path if os.path.isabs(entry) and (entry != here or entry in named or _is_own(entry))]
    # this file is in a folder of the package; last, as nothing else is looked for beside it
    package = os.path.abspath(os.path.join(os.path.realpath(__file__), *[os.pardir] * 4))
    return path if package in path else [*path, package]


def _is_own(entry: str) -> bool:
    """Whether it is a directory of the interpreter's own: of its standard library, or of installed packages."""
    site = sys.modules.get("site")
    own = {os.path.dirname(os.__file__)}
    if site is not None:
        own |= {*site.getsitepackages(), site.getusersitepackages()}
    return entry in own
