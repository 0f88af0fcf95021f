"""Build the oracle for AMD's cards: ggml-cuda's host code as HIP compiles it, on a HIP runtime without a GPU.

Needs clang++ (16 or later) and HIP's headers (Debian: clang-16, libamdhip64-dev); no GPU, no driver, no ROCm. What old
headers lack, and hipBLAS, is declared in ``tools/oracle/hip``. Device code is checked by clang and left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.oracle.build import (
    HERE,
    ROOT,
    SOURCES,
    MissingError,
    compile_traps,
    compiler,
    defines,
    run,
    symbols,
    write_traps,
)

NAME = "libggml-hip.so"

OLDEST_CLANG = 16
_LIBRARIES = ("libamdhip64.so.6", "libhipblas.so.2", "librocblas.so.4")
_PREFIXES = ("hip", "__hip", "rocblas")
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-D__HIP_PLATFORM_AMD__", f"-idirafter{HERE / 'hip'}")
_RUNTIME = (f"-I{ROOT / 'bindings' / 'cuda_runtime'}", "-Wall", "-Wextra", "-c", HERE / "runtime_hip.cpp", "-o")


def build(source: Path, directory: Path, ggml_base: Path, jobs: int = 2) -> Path:
    """Compile the oracle from the llama.cpp tree ``source`` into ``directory``, against the given ``libggml-base``.

    Raises ``MissingError``, and ``subprocess.CalledProcessError`` if the compiler fails.
    """
    cuda = source / "ggml" / "src" / "ggml-cuda"
    if not (cuda / "ggml-cuda.cu").is_file():
        raise MissingError(f"{source} is no llama.cpp source tree")
    clang, headers = _find_clang(), _find_headers()
    directory.mkdir(parents=True, exist_ok=True)
    # HIP's headers include clang's own by their directory's name.
    resources = run(clang, "-print-resource-dir").strip()
    includes = [f"-isystem{resources}", *(f"-I{source / 'ggml' / part}" for part in ("include", "src"))]
    common = [*_OPTIONS]
    if headers != Path("/usr/include"):  # which is searched anyway, and must stay the last one
        common.append(f"-isystem{headers}")
    # The options of ggml/src/ggml-hip that are on by default.
    hip = ["-DGGML_USE_HIP", "-DGGML_HIP_NO_VMM", "-DGGML_HIP_GRAPHS"]
    options = [*(define for define in defines(source) if define != "-DGGML_CUDA_USE_GRAPHS"), *hip]

    def compile_one(name: str) -> Path:
        out = directory / f"{name}.o"
        only_host = ("-x", "hip", "--offload-host-only", "-nogpuinc", "-nogpulib")
        run(clang, *only_host, *common, *options, *includes, "-w", "-c", cuda / f"{name}.cu", "-o", out)
        return out

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    runtime = directory / "runtime_hip.o"
    run(clang, *common, *_RUNTIME, runtime)
    objects.append(runtime)
    objects.append(compile_traps(directory, objects, (ggml_base,)))
    library = directory / NAME
    run(clang, "-shared", "-o", library, *objects)
    return library


def build_runtime(library: Path, headers: Path, directory: Path) -> None:
    """Put the libraries of ROCm that a prebuilt libggml-hip.so needs into ``directory``: the runtime without a GPU.

    ``headers`` are HIP's of the version that it was compiled with. Raises ``subprocess.CalledProcessError`` if a
    compiler fails.
    """
    runtime, out = directory / "runtime_hip.o", directory / _LIBRARIES[0]
    run(compiler(), *_OPTIONS, f"-isystem{headers}", *_RUNTIME, runtime)
    of_version: dict[str, list[str]] = defaultdict(list)
    for symbol in symbols([library], "-D", "--undefined-only"):
        name, _, version = symbol.partition("@")
        if name.startswith(_PREFIXES):
            of_version[version].append(name)
    missing = {name for names in of_version.values() for name in names} - symbols([runtime], "--defined-only")
    versions = directory / "versions.map"
    nodes = (f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in of_version.items() if version)
    versions.write_text("".join(nodes))
    traps = write_traps(directory, sorted(missing))
    run(compiler(), "-shared", "-o", out, runtime, traps, f"-Wl,-soname,{out.name},--version-script={versions}")
    for name in _LIBRARIES[1:]:
        (directory / name).symlink_to(out.name)


def _find_clang() -> str:
    named = [os.environ["HIPCXX"]] if "HIPCXX" in os.environ else []
    for name in [*named, "clang++", *(f"clang++-{version}" for version in range(30, OLDEST_CLANG - 1, -1))]:
        if (found := shutil.which(name)) and _version(found) >= OLDEST_CLANG:
            return found
    raise MissingError(f"no clang++ {OLDEST_CLANG} or later: install one (Debian: clang-16) or set HIPCXX")


def _version(compiler: str) -> int:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    found = re.search(r"clang version ([0-9]+)", done.stdout)
    return int(found[1]) if found else 0


def _find_headers() -> Path:
    named = [Path(os.environ["ROCM_PATH"])] if "ROCM_PATH" in os.environ else []
    for root in (*named, Path("/opt/rocm"), Path("/usr")):
        if (root / "include" / "hip" / "hip_runtime.h").is_file():
            return root / "include"
    raise MissingError("no HIP headers: install them (Debian: libamdhip64-dev) or set ROCM_PATH")
