"""Build ggml-metal's own C++ (sizes, what is supported, fusion, order of a graph) on a GPU that is not there.

Needs a C++ compiler, and no Mac: the Objective-C part, which talks to the GPU, is replaced by device.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools.oracle import build as oracle

HERE = Path(__file__).resolve().parent
NAME = "libggml-metal.so"
SOURCES = (
    "ggml-metal",
    "ggml-metal-common",
    "ggml-metal-device",
    "ggml-metal-fusion",
    "ggml-metal-ops",
    "ggml-metal-tuning",
)

_DEFINES = (
    *("-DNDEBUG", "-D_GNU_SOURCE", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD"),
    "-DGGML_BACKEND_DL",
)
# What Apple's headers bring along.
_ASSUMED = ("-include", "memory", "-include", "vector")
_CUT = re.compile(
    r"^static bool ggml_metal_supports_mul_mat_op\(.*?^\}\n\n^bool ggml_metal_device_supports_op\(.*?^\}\n", re.M | re.S
)


def build(source: Path, directory: Path, ggml_base: Path) -> Path:
    """Compile the library from the llama.cpp tree ``source`` into ``directory``, against the given ``libggml-base``.

    Raises ``oracle.MissingError``, and ``subprocess.CalledProcessError`` if the compiler fails.
    """
    metal = source / "ggml" / "src" / "ggml-metal"
    directory.mkdir(parents=True, exist_ok=True)
    found = _CUT.search((metal / "ggml-metal-device.m").read_text())
    if found is None:
        raise oracle.MissingError("ggml-metal-device.m has no ggml_metal_device_supports_op")
    (directory / "supports_op.inc").write_text(found[0])
    includes = [f"-isystem{path}" for path in (metal, source / "ggml" / "include", source / "ggml" / "src", directory)]
    objects = []
    for path in (*(metal / f"{name}.cpp" for name in SOURCES), HERE / "device.cpp"):
        out = directory / f"{path.stem}.o"
        warnings = ("-Wall", "-Wextra") if path.parent == HERE else ("-w",)
        oracle.run(
            *(oracle.compiler(), "-std=c++17", "-O1", "-fPIC", *warnings, *_DEFINES, *includes, *_ASSUMED),
            *("-c", path, "-o", out),
        )
        objects.append(out)
    objects.append(oracle.compile_traps(directory, objects, (ggml_base,)))
    library = directory / NAME
    oracle.run(oracle.compiler(), "-shared", "-o", library, *objects)
    return library
