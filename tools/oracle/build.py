"""Build the oracle: ggml-cuda's own host code on a CUDA runtime without a GPU (bindings/cuda_runtime/cudart.cpp).

Needs a CUDA toolkit's ``cudafe++`` and headers, and a C++ compiler; no GPU, no driver, no cuBLAS. ``cudafe++``
splits each source, and only the host's side is compiled.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "libggml-cuda.so"

# What ggml-cuda runs while memory is planned. All else becomes a trap that names itself.
SOURCES = ("ggml-cuda", "fattn", "fwht", "lightning-indexer", "topk-moe")

_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra")


class MissingError(Exception):
    """Something that the oracle is made of is not on this machine."""


def build(source: Path, directory: Path, ggml_base: Path, jobs: int = 2) -> Path:
    """Compile the oracle from the llama.cpp tree ``source`` into ``directory``, against the given ``libggml-base``.

    Raises ``MissingError``, and ``subprocess.CalledProcessError`` if a compiler fails.
    """
    cudafe = _find_cudafe()
    include = _find_headers(cudafe)
    directory.mkdir(parents=True, exist_ok=True)
    compile_one = _Compiler(source, directory, cudafe, include).compile
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, _sources(source)))
    objects.append(_compile_allreduce(directory))
    runtime = _build_runtime(directory, _cuda_version(include)[0])
    objects.append(compile_traps(directory, objects, (ggml_base, runtime)))
    library = directory / NAME
    run(compiler(), "-shared", "-o", library, *objects, runtime, "-Wl,-rpath,$ORIGIN")
    return library


def _sources(source: Path) -> list[str]:
    """Those of ``SOURCES`` that there are: older versions have fewer."""
    return [name for name in SOURCES if (source / "ggml" / "src" / "ggml-cuda" / f"{name}.cu").is_file()]


class _Compiler:
    def __init__(self, source: Path, directory: Path, cudafe: Path, include: Path) -> None:
        self._cuda = source / "ggml" / "src" / "ggml-cuda"
        if not (self._cuda / "ggml-cuda.cu").is_file():
            raise MissingError(f"{source} is no llama.cpp source tree")
        self._directory = directory
        self._cudafe = cudafe
        self._defines = defines(source)
        ggml = source / "ggml"
        self._includes = [f"-I{path}" for path in (ggml / "include", ggml / "src", HERE / "include", include)]
        if (include / "cccl").is_dir():
            self._includes.append(f"-isystem{include / 'cccl'}")
        major, minor = _cuda_version(include)
        self._versions = [
            f"-D__CUDACC_VER_MAJOR__={major}",
            f"-D__CUDACC_VER_MINOR__={minor}",
            "-D__CUDACC_VER_BUILD__=0",
            f"-D__CUDA_API_VER_MAJOR__={major}",
            f"-D__CUDA_API_VER_MINOR__={minor}",
        ]

    def compile(self, name: str) -> Path:
        """Preprocess, keep the host's side, compile."""
        source = self._cuda / f"{name}.cu"
        stem = self._directory / name
        preprocessed, host, stub, out = (stem.with_suffix(end) for end in (".ii", ".host.cpp", ".stub.c", ".o"))
        # Where nvcc would put the code that launches kernels.
        stub.write_text("")
        cuda = ["-D__CUDACC__", "-D__NVCC__", "-D__CUDACC_EXTENDED_LAMBDA__", "-D__NVCC_DIAG_PRAGMA_SUPPORT__=1"]
        run(
            *(compiler(), "-std=c++17", "-E", "-x", "c++", *cuda, *self._versions, *self._defines, *self._includes),
            *("-include", "cuda_runtime.h", "-w", source, "-o", preprocessed),
        )
        run(
            *(self._cudafe, "--c++17", f"--gnu_version={_gnu_version()}", "--m64", "--parse_templates"),
            *("--allow_managed", "--extended-lambda", "--orig_src_file_name", source, "--orig_src_path_name", source),
            *("--gen_c_file_name", host, "--stub_file_name", stub.name),
            *("--gen_module_id_file", "--module_id_file_name", stem.with_suffix(".id"), preprocessed),
        )
        run(
            *(compiler(), "-std=c++17", "-O1", "-fPIC", "-w", f"-I{self._directory}", *self._includes),
            *("-c", host, "-o", out),
        )
        return out


def defines(source: Path) -> list[str]:
    """The options of a default build."""
    instances = source / "ggml" / "src" / "ggml-cuda" / "template-instances"
    prefix = "fattn-vec-instance-"
    pairs = [path.stem.removeprefix(prefix) for path in sorted(instances.glob(f"{prefix}*.cu"))]
    text = (source / "ggml" / "CMakeLists.txt").read_text()
    chosen = re.search(r'set\s*\(GGML_CUDA_FA_QUANTS\s+"([^"]+)"', text)
    # Before v0.5.0 there is no such option, and no macro for each pair.
    compiled = {"f16-f16", *chosen[1].split(";")} if chosen else set()
    return [
        *("-DNDEBUG", "-D_GNU_SOURCE", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD"),
        *("-DGGML_BACKEND_DL", "-DGGML_CUDA_USE_GRAPHS"),
        *(f"-DGGML_CUDA_FA_{pair.replace('-', '_').upper()}={int(pair in compiled)}" for pair in pairs if chosen),
    ]


def _compile_allreduce(directory: Path) -> Path:
    out = directory / "allreduce.o"
    run(compiler(), *_OPTIONS, "-c", HERE / "allreduce.cpp", "-o", out)
    return out


def _build_runtime(directory: Path, major: int) -> Path:
    """The runtime under the name that a libggml-cuda.so of this toolkit asks for."""
    name = f"libcudart.so.{'11.0' if major == 11 else major}"
    version = f"-DFITTER_CUDART_DEFAULT_VERSION={major}"
    source = ROOT / "bindings" / "cuda_runtime" / "cudart.cpp"
    run(compiler(), *_OPTIONS, version, "-shared", f"-Wl,-soname,{name}", source, "-o", directory / name)
    return directory / name


def compile_traps(directory: Path, objects: Sequence[Path], there: Sequence[Path]) -> Path:
    """Everything that is called but nowhere: a function that says its name and ends the process."""
    # Symbols of ggml and the runtime, and of the C and C++ libraries that they use.
    libraries = [ctypes.CDLL(str(library)) for library in there]
    linker = {"_GLOBAL_OFFSET_TABLE_", "__dso_handle", "atexit"}
    defined = symbols(objects, "--defined-only")
    missing = sorted(
        symbol
        for symbol in symbols(objects, "--undefined-only") - defined - linker
        if not any(hasattr(library, symbol) for library in libraries)
    )
    return write_traps(directory, missing)


def write_traps(directory: Path, missing: Iterable[str]) -> Path:
    """Functions that say their name and end the process."""
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    for symbol in missing:
        lines.append(f'void {symbol}(void) {{ fputs("oracle: {symbol} is not there\\n", stderr); abort(); }}')
    code, out = directory / "traps.c", directory / "traps.o"
    code.write_text("\n".join(lines) + "\n")
    run(os.environ.get("CC", "cc"), "-O1", "-fPIC", "-w", "-c", code, "-o", out)
    return out


def symbols(objects: Iterable[Path], *kind: str) -> set[str]:
    """The symbols of objects or libraries, of a kind that nm's options say."""
    listed = run("nm", *kind, "--format=posix", *objects)
    return {line.split()[0] for line in listed.splitlines() if len(line.split()) > 1}


def _toolkits() -> list[Path]:
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return [*named, Path("/usr/local/cuda"), Path("/usr/lib/nvidia-cuda-toolkit"), Path("/usr")]


def _find_cudafe() -> Path:
    for root in _toolkits():
        if (root / "bin" / "cudafe++").is_file():
            return root / "bin" / "cudafe++"
    if found := shutil.which("cudafe++"):
        return Path(found)
    raise MissingError("no cudafe++: install a CUDA toolkit (Debian: nvidia-cuda-toolkit) or set CUDA_HOME")


def _find_headers(cudafe: Path) -> Path:
    roots = [cudafe.resolve().parent.parent, *_toolkits()]
    places = [place for root in roots for place in (root / "include", *sorted(root.glob("targets/*/include")))]
    for place in places:
        if (place / "cuda_runtime.h").is_file():
            return place
    raise MissingError("no cuda_runtime.h: install the headers of the CUDA runtime, or set CUDA_HOME")


def _cuda_version(include: Path) -> tuple[int, int]:
    found = re.search(r"#define CUDA_VERSION (\d+)", (include / "cuda.h").read_text())
    if found is None:
        raise MissingError(f"{include}/cuda.h names no version")
    return int(found[1]) // 1000, int(found[1]) % 1000 // 10


def compiler() -> str:
    """The C++ compiler. Raises ``MissingError``."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise MissingError(f"no C++ compiler ({compiler}): install one (Debian: g++) or set CXX")
    return compiler


def _gnu_version() -> str:
    parts = run(compiler(), "-dumpfullversion", "-dumpversion").split()[0].split(".")
    major, minor, patch = ([*map(int, parts), 0, 0])[:3]
    return str(major * 10000 + minor * 100 + patch)


def run(*command: str | Path) -> str:
    """The output of a command; one that fails is shown with all that it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        print(shlex.join(words), done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    return done.stdout
