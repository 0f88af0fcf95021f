"""Programs of tests that call upstream's own C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.comparisons import upstream


def compile_program(code: Path, directory: Path) -> Path:
    """Compile a file against the libraries of ``make tools``, and return the path of the program."""
    fetch = upstream.ROOT / "vendor" / "llama.cpp" / "fetch.py"
    source = Path(subprocess.run([sys.executable, fetch], capture_output=True, text=True, check=True).stdout.strip())
    libraries = upstream.tool("llama-fit-params").resolve().parent
    program = directory / code.stem
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-Wall", "-Wextra", str(code), "-o", str(program)]
    command += [f"-isystem{source / part}" for part in ("common", "include", "ggml/include", "vendor")]
    command += [f"-L{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return program
