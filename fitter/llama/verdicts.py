"""Whether a build of llama.cpp can be trusted: asked once of each build, in a process of its own, and kept.

A build that fitter was compiled for is trusted. Any other is first given the models of ``fitter.llama.canary``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from fitter.errors import LibraryError
from fitter.llama import elf, kept, surroundings
from fitter.llama.builds import Build

_PATIENCE = 120.0
"""Seconds that the models may take: a crash is quick, and a loaded machine is slow."""
_VERSION = "1"
"""To be counted up when what is asked of a build changes."""

_BOOT = """\
import sys
sys.path[:] = {path}
from fitter.llama.canary import {entry}
{entry}()
"""
_PLACING, _COMPUTING = "main", "compute"


def check(build: Build, own: tuple[str, ...], commit: str) -> None:
    """Raise ``LibraryError`` if ``build`` cannot be trusted.

    ``own``: the paths of fitter's own libraries, for which the verdict is good. ``commit``: llama.cpp's.
    """
    if problem := verdict(build, own):
        raise LibraryError(
            f"{build.libllama} (commit {commit or 'unknown'}) is not a llama.cpp that fitter can use: {problem}; name "
            "another one with --llama-cpp, or reinstall llama-fitter with LLAMA_CPP_SOURCE_DIR set to its source"
        )


def verdict(build: Build, own: tuple[str, ...]) -> str:
    """Why ``build`` cannot be trusted, '' if it can; from an earlier time where it was asked then.

    Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(f"verdict-{_key(build, own)}", build, _PLACING)


def problem_of_computing(build: Build, own: tuple[str, ...]) -> str:
    """Why ``build`` cannot compute on this machine's processor with weights in its own layouts, '' if it can.

    Those of AMX end in a crash where ``build`` was compiled by a GCC that writes but a part of the configuration of
    AMX's tiles (gcc.gnu.org/PR114098). Raises ``LibraryError`` if it cannot be asked now.
    """
    return _asked_once(f"computing-{_key(build, own)}", build, _COMPUTING)


def _asked_once(name: str, build: Build, entry: str) -> str:
    if (known := _read(name)) is not None:
        return known
    with kept.alone():
        # Another process may have been quicker.
        if (known := _read(name)) is None:
            known = ask(build, entry)
            kept.write(name, {"problem": known})
    return known


def _read(name: str) -> str | None:
    problem = (kept.read(name) or {}).get("problem")
    return problem if isinstance(problem, str) else None


def ask(build: Build, entry: str = _PLACING) -> str:
    """Why ``build`` cannot be trusted, '' if it can, asked now. Raises ``LibraryError`` if it cannot be asked.

    ``entry``: the function of ``fitter.llama.canary`` that is called.
    """
    boot = _BOOT.format(path=ascii(sys.path), entry=entry)
    environment = {**os.environ, surroundings.LLAMA_CPP: build.where}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", boot],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        # No verdict: it may be the machine's fault.
        raise LibraryError(f"{build.libllama} cannot be tried with a small model ({error}): try again") from None
    if done.returncode < 0:
        return f"it ended with signal {-done.returncode} when a small model was loaded"
    if done.returncode > 0 or not done.stdout:
        said = done.stderr.strip().splitlines()
        return f"it failed when a small model was loaded ({said[-1] if said else f'status {done.returncode}'})"
    return done.stdout.splitlines()[-1].strip()


def _key(build: Build, own: tuple[str, ...]) -> str:
    parts = [_VERSION, build.key, *(elf.linking_of(path).build_id or _digest(path) for path in own)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
