"""What upstream's own code says that llama-server takes, with its arguments: the second opinion about drafting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fitter.llama.types import VirtualDevice
from tools import upstream

_SOURCE = Path(__file__).with_name("server.cpp")

Rows = dict[str, tuple[int, int, int]]
"""Bytes of model, context and compute buffers by device, and of ``host``."""


def build(directory: Path) -> Path:
    """Compile the program against the libraries of ``make tools``."""
    fetch = upstream.ROOT / "vendor" / "llama.cpp" / "fetch.py"
    source = Path(subprocess.run([sys.executable, fetch], capture_output=True, text=True, check=True).stdout.strip())
    libraries = upstream.tool("llama-fit-params").resolve().parent
    program = directory / "server"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", str(_SOURCE), "-o", str(program)]
    command += [f"-isystem{source / part}" for part in ("common", "include", "ggml/include", "vendor")]
    command += [f"-L{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return program


def takes(program: Path, model: Path, devices: Sequence[VirtualDevice], words: Sequence[str]) -> tuple[Rows, Rows]:
    """What the main model takes, and what drafts for it."""
    done = upstream.run([str(program), "-m", str(model), *words], devices)
    assert done.returncode == 0, done.stderr + done.stdout
    main, _, drafting = done.stdout.partition("\n\n")
    return _rows(main), _rows(drafting)


def _rows(text: str) -> Rows:
    rows = {}
    for line in text.splitlines():
        name, *sizes = line.split()
        model, context, compute = map(int, sizes)
        rows[name] = (model, context, compute)
    return rows
