"""A wheel in an environment of its own, where no compiler is on PATH: installed, and asked for a plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.models import shapes

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "ld", "nvcc")


class TrialError(Exception):
    """What does not work with the wheel, in one line."""


def try_out(wheel: Path, directory: Path) -> str:
    """Install the wheel into a new environment in ``directory``, without llama-cpp-python, and fit a made-up model.

    fitter checks the llama.cpp in the wheel, and plans with it. What was seen, in one line. Raises ``TrialError``.
    """
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)], os.environ)
    environment = _without_compilers(directory)
    python, fitter = (str(directory / "bin" / name) for name in ("python", "fitter"))
    _run([python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel)], environment)
    there = _run([python, "-m", "pip", "list", "--format", "json"], environment).stdout
    if any(entry["name"].replace("_", "-") == "llama-cpp-python" for entry in json.loads(there)):
        raise TrialError("llama-cpp-python was installed with the wheel, which should not need it")
    (build,) = json.loads(_run([fitter, "llama-cpp", "--json"], environment).stdout)["builds"]
    model = shapes.write("llama-3.1-8b", directory, vocab=False)
    plan = json.loads(_run([fitter, str(model), "--gpu", "rtx-4090", "-c", "8192", "--json"], environment).stdout)
    device = plan["devices"][0]
    return (
        f"installed without a compiler, and planned with llama.cpp {build['commit']}: {device['used']} bytes on "
        f"{device['name']}"
    )


def _without_compilers(directory: Path) -> dict[str, str]:
    """The environment variables of a process that finds no compiler: PATH has the new environment's programs alone."""
    path = str(directory / "bin")
    found = [name for name in COMPILERS if shutil.which(name, path=path)]
    if found:
        raise TrialError(f"{path} has a compiler: {', '.join(found)}")
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "LC_", "SSL_")) or key == "HOME"}
    kept |= {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    cwd = Path(environment["PATH"]) if len(environment["PATH"].split(os.pathsep)) == 1 else None
    done = subprocess.run(command, env=dict(environment), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise TrialError(f"{' '.join(command)}: {last}")
    return done
