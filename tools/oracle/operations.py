"""What a backend says about random operations (ops.cpp), on devices from Pascal to Blackwell, or of AMD."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

from fitter.llama.types import VirtualDevice, describe
from tools.comparisons.cuda_reference import card
from tools.oracle.draw import ARCHITECTURES

HERE = Path(__file__).resolve().parent
ANSWERS = HERE.parents[1] / "tests" / "data" / "cuda" / "operations.txt"
ROCM_ANSWERS = HERE.parents[1] / "tests" / "data" / "rocm" / "operations.txt"
LIBRARIES = Path(llama_cpp.__file__).parent / "lib"

_CAPABILITIES = (60, 61, 70, 72, 75, 80, 86, 89, 90, 100, 120, 121)
CUDA_CARDS = tuple(card(i, str(number)) for i, number in enumerate(_CAPABILITIES))
ROCM_CARDS = tuple(card(i, text) for i, text in enumerate(ARCHITECTURES))
_COUNT, _SEED = 300_000, 1


def build_ops(ggml_headers: Path, directory: Path) -> Path:
    """Compile ops.cpp against the ggml that llama-cpp-python brought."""
    program = directory / "ops"
    libraries = [str(LIBRARIES / name) for name in ("libggml.so.0", "libggml-base.so.0")]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", f"-isystem{ggml_headers}"]
    link = [*libraries, f"-Wl,-rpath,{LIBRARIES}", f"-Wl,-rpath-link,{LIBRARIES}"]
    subprocess.run([*command, str(HERE / "ops.cpp"), "-o", str(program), *link], check=True)
    return program


def answers(program: Path, backend: Path, cards: Sequence[VirtualDevice] = CUDA_CARDS) -> str:
    """A line per operation: how often it was asked about, how often the answer was yes, a digest of all answers."""
    return _run(program, cards, backend)


def disagreements(program: Path, one: Path, other: Path, cards: Sequence[VirtualDevice] = CUDA_CARDS) -> str:
    """The questions that two backends answer differently, and how many there are."""
    return _run(program, cards, one, other)


def _run(program: Path, cards: Sequence[VirtualDevice], *backends: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GGML_")}
    variables |= {"FITTER_CUDART_DEVICES": describe(cards), "FITTER_DEVICES": describe(cards)}
    command = [str(program), str(_COUNT), str(_SEED), *map(str, backends)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout
