"""Measure with upstream's own code the memory of llama-server for its arguments: a second opinion about drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fitter.llama.types import VirtualDevice
from tests.support.upstream_program import compile_program
from tools.comparisons import upstream

_SOURCE = Path(__file__).with_name("server.cpp")

Rows = dict[str, tuple[int, int, int]]
"""Bytes of model, context and compute buffers by device, and of ``host``."""


def build(directory: Path) -> Path:
    """Compile the program that measures a main model and its draft."""
    return compile_program(_SOURCE, directory)


def takes(program: Path, model: Path, devices: Sequence[VirtualDevice], words: Sequence[str]) -> tuple[Rows, Rows]:
    """Measure the main model and its draft."""
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
