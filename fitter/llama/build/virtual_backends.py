"""What answers for virtual devices: fitter's own rules, compared with builds, or the user's own ``libggml-cuda.so``.

``compared.json`` has the figures of the comparisons: loads drawn at random, with the answers of fitter's rules and of
the build's backend. ``python -m tools.comparisons.cuda_rules --update`` writes it.

With the profile ``library``, and if the planned llama.cpp has a CUDA backend, ``libfitter-cudart.so`` replaces in the
worker the CUDA libraries that ``libggml-cuda.so`` is linked to. It describes the cards and computes nothing, so the
backend that will run the model measures its memory without a GPU or a driver.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fitter.errors import FitterError, LibraryError
from fitter.llama.build import elf
from fitter.llama.build.build_folder import PYTHON, find
from fitter.llama.build.functions import same_commit
from fitter.llama.build.library import cudart_path
from fitter.llama.types import VirtualDevice
from fitter.version import numbers_of

CUDA_BACKEND = "libggml-cuda.so"

_CUDA_SYMBOL = re.compile(r"(__)?cuda[A-Z]|cu[A-Z]|cublas[A-Z]|nccl[A-Z]")
_CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|cuda|nccl)\.so(\.|$)")
_RUNTIME = re.compile(r"libcudart\.so\.([0-9]+)")
_FIX = (
    'install llama-cpp-python with CMAKE_ARGS="-DGGML_CUDA=on", or name a directory that holds one: '
    "--profile library:DIRECTORY"
)


@dataclass(frozen=True)
class CudaLibrary:
    """A ``libggml-cuda.so``.

    Attributes:
        path: Its path.
        stands_in_for: Names of the CUDA libraries that it is linked to.
        version: Major version of its CUDA runtime.
        plugin: Whether ``ggml_backend_load`` loads it; else libllama brings it, or ``ggml_backend_cuda_reg`` registers
            it.
    """

    path: Path
    stands_in_for: tuple[str, ...]
    version: int
    plugin: bool

    def environment(self, links: Path, description: str) -> dict[str, str]:
        """Return environment variables for a process with ``libfitter-cudart.so`` in place of the CUDA libraries.

        Args:
            links: A directory, which gets links of their names.
            description: The cards, in the format of ``FITTER_DEVICES``.
        """
        for name in self.stands_in_for:
            (links / name).symlink_to(cudart_path())
        # By their bare names: a library whose name is already loaded is not searched for, whatever search path the
        # other library was linked with.
        preload = [*self.stands_in_for, os.environ.get("LD_PRELOAD", "")]
        search = [str(links), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_PRELOAD": ":".join(filter(None, preload)),
            "LD_LIBRARY_PATH": ":".join(filter(None, search)),
            "FITTER_CUDART_DEVICES": description,
            "FITTER_CUDART_VERSION": str(self.version),
        }


class Answering(NamedTuple):
    """The CUDA backend that answers for virtual devices, or why none does.

    Attributes:
        library: The backend; ``None`` if the one of the planned llama.cpp cannot be asked.
        why: The reason, in one line.
    """

    library: CudaLibrary | None
    why: str = ""


def answering(virtual: Sequence[VirtualDevice], profile: str | None, where: str = PYTHON) -> Answering | None:
    """Choose the CUDA backend that answers for ``virtual`` devices.

    Without a profile it is the backend of the llama.cpp ``where``, if that has a usable one and all devices are NVIDIA
    cards.

    Returns:
        The backend; ``None`` for fitter's own rules.

    Raises:
        LibraryError: The profile names a backend that cannot be used.
    """
    name, _, place = (profile or "").partition(":")
    if name == "library":
        return Answering(find_cuda_library(place or None, where))
    is_cuda = [device.profile == "cuda" for device in virtual]
    if name or not any(is_cuda):
        return None
    try:
        backend = find(where).cuda
    except FitterError:
        # the worker will report it
        return None
    if not backend:
        return None
    if not sys.platform.startswith("linux"):
        return Answering(None, f"{backend} can be asked about cards that are not there on Linux only")
    if not all(is_cuda):
        return Answering(None, f"{backend} answers for NVIDIA cards only")
    try:
        return Answering(find_cuda_library(backend))
    except LibraryError as error:
        return Answering(None, str(error))


def find_cuda_library(place: str | os.PathLike[str] | None = None, llama_cpp: str = PYTHON) -> CudaLibrary:
    """Find the ``libggml-cuda.so`` at ``place`` (a file or a directory), or else the one of a llama.cpp.

    Raises ``LibraryError`` if there is none, or if it cannot be used for planning.
    """
    if not sys.platform.startswith("linux"):
        raise LibraryError("the profile 'library' needs Linux: describe the GPU without it, such as --gpu rtx-4090")
    path = _find(Path(place)) if place else _find_own(llama_cpp)
    library = elf.read(path)
    runtime = [match for name in library.needed if (match := _RUNTIME.match(name))]
    if "ggml_backend_cuda_reg" not in library.defined and "ggml_backend_init" not in library.defined:
        raise LibraryError(f"{path} is not a CUDA backend of ggml: {_FIX}")
    if not runtime:
        raise LibraryError(
            f"{path} contains the CUDA runtime, which then cannot be replaced: build it without GGML_STATIC"
        )
    needed = {symbol for symbol in library.undefined if _CUDA_SYMBOL.match(symbol)}
    missing = sorted(needed - elf.read(cudart_path()).defined)
    if missing:
        raise LibraryError(
            f"{path} needs CUDA functions that fitter does not simulate ({', '.join(missing[:5])}): build it with CUDA "
            "12 or 13, or have fitter's own rules answer with --profile cuda"
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
    if (place / CUDA_BACKEND).is_file():
        return (place / CUDA_BACKEND).resolve()
    why = f"there is no {CUDA_BACKEND} in {place}" if place.is_dir() else f"{place} does not exist"
    raise LibraryError(f"{why}: {_FIX}")


def _find_own(llama_cpp: str) -> Path:
    if llama_cpp != PYTHON:
        if own := find(llama_cpp).cuda:
            return Path(own).resolve()
        raise LibraryError(
            f"{llama_cpp} has no CUDA backend ({CUDA_BACKEND}): name a directory that holds one of the same llama.cpp: "
            "--profile library:DIRECTORY"
        )
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
        raise LibraryError(f"the installed llama-cpp-python has no CUDA backend ({CUDA_BACKEND}): {_FIX}") from None


SIMULATED = "the cards were simulated by"
"""The beginning of a note of a plan."""


@dataclass(frozen=True)
class Compared:
    """A comparison of a profile's rules with a build.

    Attributes:
        llama_cpp: The makers' name for the build.
        ggml: Its version of ggml.
        commit: Its commit; '' if unknown.
        by: What answered for the build.
        rows: Number of compared loads.
        equal: Loads with equal bytes for every buffer and equal graph splits, or refused by both.
        left: A description of the other loads; '' without any.
    """

    llama_cpp: str
    ggml: str
    commit: str
    by: str
    rows: int
    equal: int
    left: str


@functools.cache
def comparisons(profile: str) -> tuple[Compared, ...]:
    """Return all comparisons of a profile (``vulkan`` for every driver), the oldest build first."""
    return tuple(Compared(**each) for each in data().get(profile.partition("-")[0], ()))


@functools.cache
def data() -> dict[str, list[dict[str, Any]]]:
    """Read ``compared.json``: comparisons by profile."""
    with open(os.path.join(os.path.dirname(__file__), "compared.json"), encoding="utf-8") as file:
        document: dict[str, list[dict[str, Any]]] = json.load(file)
    return document


def compared(profile: str, ggml: str, commit: str) -> Compared | None:
    """Return the comparison of a profile's rules with this build; ``None`` without one.

    The llama.cpp in fitter's wheel says its makers' name instead of a commit.
    """
    same_ggml = (each for each in comparisons(profile) if each.ggml == ggml)
    return next((each for each in same_ggml if commit == each.llama_cpp or _is(each.commit, commit)), None)


def around(profile: str, ggml: str) -> tuple[Compared | None, Compared | None]:
    """Return the newest comparison with an older or equal ggml, and the oldest with a newer one."""
    version = numbers_of(ggml)
    older = [each for each in comparisons(profile) if numbers_of(each.ggml) <= version]
    newer = [each for each in comparisons(profile) if numbers_of(each.ggml) > version]
    return (older[-1] if older else None), (newer[0] if newer else None)


def said_of(profile: str, ggml: str, commit: str) -> str:
    """Say for a plan how far a profile's rules were compared with this build; '' if all was equal."""
    comparison = compared(profile, ggml, commit)
    if comparison is None:
        near = [each.llama_cpp for each in around(profile, ggml) if each is not None]
        only = f", only with {' and '.join(near)}" if near else ""
        return f"the rules of the {profile} profile were never compared with this llama.cpp{only}"
    if comparison.equal == comparison.rows:
        return ""
    return (
        f"the rules of the {profile} profile say what this llama.cpp does for {comparison.equal} of {comparison.rows} "
        f"drawn loads; the others are {comparison.left}"
    )


def notes(virtual: Sequence[VirtualDevice], answering: Answering | None, ggml: str, commit: str) -> tuple[str, ...]:
    """List the notes of a plan about the rules or the backend that answered for its virtual devices.

    Args:
        virtual: The devices.
        answering: The CUDA backend that answered, if any.
        ggml: The plan's version of ggml.
        commit: The plan's commit of llama.cpp.
    """
    if answering is not None and answering.library is not None:
        return (f"{SIMULATED} {answering.library.path}, a CUDA backend of llama.cpp",)
    lines = [f"fitter's own rules answered for the cards: {answering.why}"] if answering is not None else []
    profiles = dict.fromkeys(device.profile.partition("-")[0] for device in virtual)
    return (*lines, *filter(None, (said_of(profile, ggml, commit) for profile in profiles)))


def _is(compared_commit: str, commit: str) -> bool:
    """Return whether a build with this ``commit`` may be the compared one."""
    if not compared_commit and commit not in ("", "unknown"):
        # a source without a history takes the commit of the repository around it
        return commit.endswith("-dirty")
    return same_commit(compared_commit, commit) is not False
