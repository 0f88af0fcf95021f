"""Small shared libraries, and CUDA backends made of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fitter.llama.build import virtual_backends


def compile_library(path: Path, code: str, *options: str | Path) -> Path:
    """A small shared library."""
    words = [os.environ.get("CC", "cc"), "-x", "c", "-shared", "-fPIC", "-w", "-", "-x", "none", "-o", path, *options]
    subprocess.run(list(map(str, words)), input=code, text=True, check=True)
    return path


def cuda_build(directory: Path, code: str, soname: str | None = "libcudart.so.12") -> Path:
    """A libggml-cuda.so of ``code``, linked to a runtime of that name."""
    directory.mkdir(exist_ok=True)
    link: list[str | Path] = []
    if soname is not None:
        runtime = compile_library(directory / soname, "void cudaMalloc(void) {}", f"-Wl,-soname,{soname}")
        link = ["-Wl,--no-as-needed", runtime]
    return compile_library(directory / virtual_backends.CUDA_BACKEND, code, *link)
