"""The profile ``library``: virtual NVIDIA cards on the user's own ``libggml-cuda.so``.

The worker's process gets ``libfitter-cudart.so`` in place of the CUDA libraries that ``libggml-cuda.so`` is linked to.
It describes the cards and computes nothing, so the very backend that will run says what it takes, without a GPU or a
driver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import LibraryError
from fitter.llama import elf
from fitter.llama.library import cudart_path

NAME = "libggml-cuda.so"

_CUDA_SYMBOL = re.compile(r"(__)?cuda[A-Z]|cu[A-Z]|cublas[A-Z]|nccl[A-Z]")
_CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|cuda|nccl)\.so(\.|$)")
_RUNTIME = re.compile(r"libcudart\.so\.([0-9]+)")
_FIX = (
    'install llama-cpp-python with CMAKE_ARGS="-DGGML_CUDA=on", or name a directory that holds one: '
    "--profile library:DIRECTORY"
)


@dataclass(frozen=True)
class CudaLibrary:
    """A ``libggml-cuda.so``: ``stands_in_for`` are the names of CUDA's libraries that it is linked to.

    ``version`` is the major version of its CUDA runtime. A ``plugin`` is loaded by ``ggml_backend_load``; another one
    comes with libllama, or registers itself by ``ggml_backend_cuda_reg``.
    """

    path: Path
    stands_in_for: tuple[str, ...]
    version: int
    plugin: bool

    def environment(self, links: Path, description: str) -> dict[str, str]:
        """Variables of a process that finds the stand-in under every one of its names, in the directory ``links``.

        ``description`` is of the cards, in the format of ``FITTER_DEVICES``. Makes the links.
        """
        for name in self.stands_in_for:
            (links / name).symlink_to(cudart_path())
        # By their bare names: what is asked for by a name that is already loaded is not searched for, whatever
        # search path the library was linked with.
        preload = [*self.stands_in_for, os.environ.get("LD_PRELOAD", "")]
        search = [str(links), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_PRELOAD": ":".join(filter(None, preload)),
            "LD_LIBRARY_PATH": ":".join(filter(None, search)),
            "FITTER_CUDART_DEVICES": description,
            "FITTER_CUDART_VERSION": str(self.version),
        }


def find_cuda_library(place: str | os.PathLike[str] | None = None) -> CudaLibrary:
    """The ``libggml-cuda.so`` at ``place`` (a file, or a directory with one), by default llama-cpp-python's own.

    Raises ``LibraryError`` where there is none, or none that can be planned with.
    """
    if not sys.platform.startswith("linux"):
        raise LibraryError("the profile 'library' needs Linux: describe the GPU without it, such as --gpu rtx-4090")
    path = _find(Path(place)) if place else _find_own()
    library = elf.read(path)
    runtime = [found for name in library.needed if (found := _RUNTIME.match(name))]
    if "ggml_backend_cuda_reg" not in library.defined and "ggml_backend_init" not in library.defined:
        raise LibraryError(f"{path} is no CUDA backend of ggml: {_FIX}")
    if not runtime:
        raise LibraryError(
            f"{path} holds the CUDA runtime itself (GGML_STATIC), which cannot be replaced: build it without that"
        )
    asked = {symbol for symbol in library.undefined if _CUDA_SYMBOL.match(symbol)}
    missing = sorted(asked - elf.read(cudart_path()).defined)
    if missing:
        raise LibraryError(
            f"{path} asks CUDA for what fitter does not know ({', '.join(missing[:5])}): build it with CUDA 12 or 13, "
            "or plan without --profile library"
        )
    return CudaLibrary(
        path,
        tuple(name for name in library.needed if _CUDA_LIBRARY.match(name)),
        int(runtime[0][1]),
        "ggml_backend_init" in library.defined,
    )


def _find(place: Path) -> Path:
    if place.is_file():
        return place.resolve()
    if (place / NAME).is_file():
        return (place / NAME).resolve()
    raise LibraryError(f"there is no {NAME} in {place}: {_FIX}" if place.is_dir() else f"{place} is not there: {_FIX}")


def _find_own() -> Path:
    backend = os.environ.get("GGML_BACKEND_PATH", "")
    if os.path.basename(backend).startswith("libggml-cuda."):
        return _find(Path(backend))
    if directory := os.environ.get("LLAMA_CPP_LIB_PATH"):
        return _find(Path(directory))
    # Not imported: that would load libllama into this process.
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise LibraryError(f"llama-cpp-python is not installed: {_FIX}")
    try:
        return _find(Path(package.origin).parent / "lib")
    except LibraryError:
        raise LibraryError(f"the llama-cpp-python that is installed has no CUDA backend ({NAME}): {_FIX}") from None
