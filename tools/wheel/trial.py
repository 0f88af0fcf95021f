"""A wheel in an environment of its own, where no compiler is on PATH: installed, and asked for a plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools import shapes

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "ld", "nvcc")


class TrialError(Exception):
    """What does not work with the wheel, in one line."""


def try_out(wheel: Path, directory: Path, llama_cpp: Path | None) -> str:
    """Install the wheel into a new environment in ``directory``, without llama-cpp-python, and fit a made-up model.

    ``llama_cpp`` is the directory of a prebuilt llama.cpp to plan with; without one, fitter has to say what is missing.
    What was seen, in one line. Raises ``TrialError``.
    """
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)], os.environ)
    environment = _without_compilers(directory)
    python = str(directory / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel)], environment)
    there = _run([python, "-m", "pip", "list", "--format", "json"], environment).stdout
    if any(entry["name"].replace("_", "-") == "llama-cpp-python" for entry in json.loads(there)):
        raise TrialError("llama-cpp-python was installed with the wheel, which should not need it")
    model = shapes.write("llama-3.1-8b", directory, vocab=False)
    fit = [str(directory / "bin" / "fitter"), str(model), "--gpu", "rtx-4090", "-c", "8192", "--json"]
    if llama_cpp is None:
        done = subprocess.run(fit, env=environment, capture_output=True, text=True, check=False, cwd=directory)
        if done.returncode != 3 or "pip install" not in done.stderr:
            raise TrialError(f"without a llama.cpp fitter says: {done.stderr.strip() or done.stdout.strip()}")
        return "installed without a compiler and without llama-cpp-python; fitter says how to get a llama.cpp"
    plan = json.loads(_run([*fit, "--llama-cpp", str(llama_cpp)], environment).stdout)
    device = plan["devices"][0]
    return f"installed without a compiler and planned with {llama_cpp}: {device['used']} bytes on {device['name']}"


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
