"""What a backend says about random operations (ops.cpp), on devices from Pascal to Blackwell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import llama_cpp

from fitter.llama.client import describe
from fitter.llama.types import VirtualDevice

HERE = Path(__file__).resolve().parent
ANSWERS = HERE.parent / "data" / "cuda" / "operations.txt"
LIBRARIES = Path(llama_cpp.__file__).parent / "lib"

_CAPABILITIES = (600, 610, 700, 720, 750, 800, 860, 890, 900, 1000, 1200, 1210)
_COUNT, _SEED = 300_000, 1


def build_ops(ggml_headers: Path, directory: Path) -> Path:
    """Compile ops.cpp against the ggml that llama-cpp-python brought."""
    program = directory / "ops"
    libraries = [str(LIBRARIES / name) for name in ("libggml.so.0", "libggml-base.so.0")]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", f"-isystem{ggml_headers}"]
    link = [*libraries, f"-Wl,-rpath,{LIBRARIES}", f"-Wl,-rpath-link,{LIBRARIES}"]
    subprocess.run([*command, str(HERE / "ops.cpp"), "-o", str(program), *link], check=True)
    return program


def answers(program: Path, backend: Path) -> str:
    """A line per operation: how often it was asked about, how often the answer was yes, a digest of all answers."""
    return _run(program, backend)


def disagreements(program: Path, one: Path, other: Path) -> str:
    """The questions that two backends answer differently, and how many there are."""
    return _run(program, one, other)


def _run(program: Path, *backends: Path) -> str:
    cards = [VirtualDevice(f"CUDA{i}", "Card", "cuda", cc, 2**40, 2**40) for i, cc in enumerate(_CAPABILITIES)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GGML_")}
    variables |= {"ORACLE_DEVICES": describe(cards), "FITTER_DEVICES": describe(cards)}
    command = [str(program), str(_COUNT), str(_SEED), *map(str, backends)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout
