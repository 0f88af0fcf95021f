"""Load a build of llama.cpp into this process: its libraries, and the backends that ggml loads itself.

Only for workers, and processes that run models themselves.
"""

from __future__ import annotations

import ctypes
import os

from fitter.errors import LibraryError
from fitter.llama.build import linking
from fitter.llama.build.functions import Functions, epoch_of, ggml_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fitter.llama.build.build_folder import Build


def open_build(build: Build) -> Functions:
    """Load a build's libllama after the libraries that it needs; its parameter structs have no layout yet.

    Raises ``LibraryError`` if it is too old or lacks a function, ``OSError`` if it cannot be loaded.
    """
    for path in build.libraries:
        linking.open_library(path)
    library = linking.library_of_build(build.libllama, build.libraries)
    ggml, commit = ggml_version(library)
    try:
        epoch_of(ggml)
    except LibraryError as error:
        raise LibraryError(f"{build.libllama} (commit {commit or 'unknown'}) is too old for fitter: {error}") from None
    return Functions(build.libllama, library)


_OF_THE_HOST = ("ggml-blas", "ggml-rpc", "ggml-zendnn")
"""Beginnings of the names of backends without devices of their own."""


def load_plugins(llama: Functions, build: Build, wanted: str = "") -> str:
    """Load the CPU backend that ggml would choose on this machine, and others without devices.

    Call it before anything asks for devices.

    Args:
        llama: The functions of libllama.
        build: The build.
        wanted: File name of another CPU backend, loaded instead if it exists and can run here.

    Returns:
        File name of the CPU backend; '' if libllama is linked to its own.

    Raises:
        LibraryError: There is none for this processor.
    """
    asked = [path for path in build.cpu_plugins if os.path.basename(path) == wanted and _score(path) > 0]
    chosen = asked[0] if asked else best_of(build.cpu_plugins) if build.cpu_plugins else ""
    for path in (*filter(_is_of_the_host, build.plugins), *filter(None, [chosen])):
        # ggml logs the reason
        if not _load(llama, path) and path == chosen:
            raise LibraryError(f"ggml does not load its CPU backend {path}: install that llama.cpp again")
    return os.path.basename(chosen)


def load_devices(llama: Functions, build: Build) -> None:
    """Load a build's backends with devices; those without a driver fail, as in llama.cpp's programs."""
    for path in build.plugins:
        if path not in build.cpu_plugins and not _is_of_the_host(path):
            _load(llama, path)


def _is_of_the_host(path: str) -> bool:
    return linking.is_library(path, _OF_THE_HOST)


def _load(llama: Functions, path: str) -> bool:
    load = llama.library.ggml_backend_load
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    linking.preload(path)
    return bool(load(os.fsencode(path)))


def best_of(plugins: Sequence[str]) -> str:
    """Return the plugin that ggml would choose on this machine: the one with the highest score of its own.

    ggml's libraries must be loaded. Raises ``LibraryError`` if none can run here.
    """
    scores = {path: _score(path) for path in plugins}
    best = max(scores, key=lambda path: scores[path])
    if scores[best] > 0:
        return best
    if plain := [path for path in plugins if "-cpu." in os.path.basename(path)]:
        return plain[0]
    raise LibraryError(
        f"no CPU backend in {os.path.dirname(best)} can run on this processor: name a llama.cpp that was built for it"
    )


def _score(path: str) -> int:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return 0
    try:
        score = getattr(library, "ggml_backend_score", None)
        return int(score()) if score else 0
    finally:
        linking.close_library(library)
