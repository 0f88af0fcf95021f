"""Compiles the declarations of ``fitter.h`` into the Python module that fitter imports: no C is parsed at run time.

``python bindings/declarations.py bindings/fitter.h fitter/llama/_declarations.py``; the build does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi


def write(header: Path, module: Path) -> None:
    """Write ``module`` for what stands between the two ``cdef`` lines of ``header``."""
    text = header.read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(text.split("// cdef: begin", 1)[1].split("// cdef: end", 1)[0])
    ffi.set_source("fitter.llama._declarations", None)
    ffi.emit_python_code(str(module))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
