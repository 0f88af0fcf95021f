"""Quantize a model with the installed llama-cpp-python's llama.cpp: what llama-quantize does, for comparisons.

    python -m tests.support.quantize MODEL DIRECTORY TYPE…

Writes ``DIRECTORY/TYPE.gguf`` for each file type, such as ``Q4_K_M``. Without an importance matrix first; where
llama.cpp refuses that, with one of ones for every weight. Prints a line of JSON: each type with ``plain``, ``imatrix``
or ``failed``. With ``dry-run`` in place of the directory nothing is written.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DRY = "dry-run"
"""In place of a directory: nothing is written, and llama.cpp says what it would need."""


def quantized(model: Path, directory: Path | str, types: Sequence[str]) -> dict[str, str]:
    """Quantize to each of ``types`` in a process of its own, and say how each was done."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.quantize", str(model), str(directory), *types],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise RuntimeError(f"{model} cannot be quantized: {done.stderr[-2000:]}")
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


_NEEDED = b"will require an imatrix"
"""The error of llama.cpp for a dry run whose real run would fail."""


def main(model: str, directory: str, *types: str) -> None:
    """Quantize, and print what was done."""
    import llama_cpp
    from gguf import GGUFReader

    log: list[bytes] = []
    kept_log = llama_cpp.llama_log_callback(lambda level, text, data: log.append(text))
    llama_cpp.llama_log_set(kept_log, ctypes.c_void_p())
    matrix = llama_cpp.llama_cpp.llama_model_imatrix_data
    entries, kept = [], []
    for tensor in GGUFReader(model).tensors:
        shape = [int(size) for size in tensor.shape] + [1, 1]
        ones = (ctypes.c_float * (shape[0] * shape[2]))(*([1.0] * (shape[0] * shape[2])))
        kept.append(ones)
        entries.append(matrix(tensor.name.encode(), ones, len(ones)))
    every = (matrix * (len(entries) + 1))(*entries, matrix(None, None, 0))

    def make(name: str, has_imatrix: bool) -> bool:
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread = 1
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        params.dry_run = directory == DRY
        log.clear()
        if has_imatrix:
            params.imatrix = ctypes.cast(every, ctypes.POINTER(matrix))
        path = Path(directory) / f"{name}.gguf"
        refused = llama_cpp.llama_model_quantize(model.encode(), str(path).encode(), ctypes.byref(params))
        return not refused and not any(_NEEDED in line for line in log)

    done = {}
    for name in types:
        done[name] = "plain" if make(name, False) else "imatrix" if make(name, True) else "failed"
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
