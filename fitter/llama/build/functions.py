"""Open a build of llama.cpp: its libraries and backends, its C functions and structs, and what differs between builds.

llama-cpp-python's bindings need every symbol of one version, so planning does not use them. ``layouts.json`` has the
differences that no build tells itself, by its version of ggml. Builds are opened only by workers, and by processes that
run models themselves.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import NamedTuple

from fitter.errors import LibraryError
from fitter.llama.build import linking
from fitter.llama.build.layouts import data, layout_of, structs_of
from fitter.version import numbers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from fitter.llama.build.build_folder import Build

ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
"""``llama_progress_callback``: false cancels the load."""


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.c_void_p),
    )


_MODEL_PARAMS, _CONTEXT_PARAMS = "llama_model_params", "llama_context_params"
_POINTER, _TEXT, _FLAG = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_INT, _UINT, _SIZE = ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_version": (_TEXT,),
    "llama_max_devices": (_SIZE,),
    "llama_model_default_params": (_MODEL_PARAMS,),
    "llama_context_default_params": (_CONTEXT_PARAMS,),
    "llama_model_load_from_file": (_POINTER, _TEXT, _MODEL_PARAMS),
    "llama_model_free": (None, _POINTER),
    "llama_model_n_ctx_train": (_INT, _POINTER),
    "llama_model_has_encoder": (_FLAG, _POINTER),
    "llama_model_has_decoder": (_FLAG, _POINTER),
    "llama_model_rope_type": (_INT, _POINTER),
    "llama_model_meta_val_str": (_INT, _POINTER, _TEXT, _TEXT, _SIZE),
    "llama_init_from_model": (_POINTER, _POINTER, _CONTEXT_PARAMS),
    "llama_free": (None, _POINTER),
    "llama_get_model": (_POINTER, _POINTER),
    "llama_get_memory": (_POINTER, _POINTER),
    "llama_memory_clear": (None, _POINTER, _FLAG),
    "llama_n_ctx": (_UINT, _POINTER),
    "llama_n_ctx_seq": (_UINT, _POINTER),
    "llama_n_ubatch": (_UINT, _POINTER),
    "llama_n_seq_max": (_UINT, _POINTER),
    "llama_n_rs_seq": (_UINT, _POINTER),
    "llama_state_seq_get_size_ext": (_SIZE, _POINTER, _INT, _UINT),
    "llama_encode": (_INT, _POINTER, Batch),
    "llama_decode": (_INT, _POINTER, Batch),
    "llama_synchronize": (None, _POINTER),
    "llama_adapter_lora_init": (_POINTER, _POINTER, _TEXT),
    "llama_adapter_lora_free": (None, _POINTER),
    "llama_set_adapters_lora": (
        _INT,
        _POINTER,
        ctypes.POINTER(_POINTER),
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_float),
    ),
}
"""Result and arguments of each function; structs by name."""


_STRUCTS = frozenset({_MODEL_PARAMS, _CONTEXT_PARAMS})
_ABSENT = frozenset({"llama_version", "llama_n_rs_seq", "llama_state_seq_get_size_ext"})
"""Functions that a usable llama.cpp may lack."""
REQUIRED = frozenset(_SIGNATURES) - _ABSENT
"""Functions that a usable llama.cpp has."""


class Functions:
    """The functions of a libllama, called as in C; models, contexts and adapters are addresses.

    A missing function is ``None``. Functions with parameter structs can be called after ``lay_out``. Raises
    ``LibraryError`` if fitter cannot use this llama.cpp.

    Args:
        path: Its path.
        library: The loaded library, with the functions of ggml.
    """

    layout = ""
    """Name of the layout of its parameter structs."""

    def __init__(self, path: str, library: ctypes.CDLL) -> None:
        self.path = path
        self.library = library
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self.library, name, None)
            if function is None and name in REQUIRED:
                raise LibraryError(f"{path} is not a llama.cpp that fitter can use: it has no {name}")
            if function is not None and _STRUCTS.isdisjoint((result, *arguments)):
                function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def lay_out(self, probe: Callable[[int, Any], None], headers: Iterable[str] = ()) -> None:
        """Find the layout of the parameter structs.

        Args:
            probe: Calls the function at an address, which returns a struct, into the given memory.
            headers: Paths of ``llama.h``; if no known layout agrees, the layout of the one that agrees is used.

        Raises:
            LibraryError: No layout agrees.
        """

        def ask(name: str, memory: Any) -> None:
            address = ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
            probe(address or 0, memory)

        try:
            self.layout, layout = layout_of(ask, headers)
        except LibraryError as error:
            commit = ggml_version(self.library)[1] or "unknown"
            raise LibraryError(
                f"{self.path} (commit {commit}) is not a llama.cpp that fitter can use: {error}; put its llama.h into "
                f"{os.path.join(os.path.dirname(self.path), 'include')}, or plan with another one"
            ) from None
        structs = structs_of(layout)
        for name, (result, *arguments) in _SIGNATURES.items():
            if not _STRUCTS.isdisjoint((result, *arguments)):
                function = getattr(self, name)
                function.restype = structs.get(result, result)
                function.argtypes = [structs.get(kind, kind) for kind in arguments]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def backend_api(library: ctypes.CDLL) -> int:
    """Return the version of ggml's interface of backends (``GGML_BACKEND_API_VERSION``), by what came with it.

    It changed within ggml 0.25.3: llama-cpp-python 0.3.36 has version 2, b11413 version 3.
    """
    return 3 if hasattr(library, "ggml_backend_buft_alloc_buffer_n") else 2


def ggml_version(library: ctypes.CDLL) -> tuple[str, str]:
    """Return the version of ggml and the commit of llama.cpp of a loaded library."""
    texts = []
    for name in ("ggml_version", "ggml_commit"):
        function = getattr(library, name, None)
        if function is not None:
            function.restype = ctypes.c_char_p
        texts.append(((function and function()) or b"").decode("utf-8", "replace"))
    return texts[0], texts[1]


def same_commit(a: str, b: str) -> bool | None:
    """Return whether two builds say the same commit; ``None`` if one is unknown.

    A build outside of a git checkout does not know its commit; some say a shorter one, or end with "-dirty".
    """
    a, b = (commit.removesuffix("-dirty") for commit in (a, b))
    if not a or not b or "unknown" in (a, b):
        return None
    return a.startswith(b) or b.startswith(a)


_MOST_OPERATIONS = 256


class Epoch(NamedTuple):
    """Builds from one version of ggml on.

    Attributes:
        ggml: The first version of ggml.
        last_op: ``ggml_op_name`` of the last operation.
        graph_optimize_has_params: Whether a backend's ``graph_optimize`` can say which tensors stay allocated; ``None``
            if that changed within this version.
        larger_alone: Architectures whose last graph is reserved with one sequence, however many there are.
    """

    ggml: str
    last_op: str
    graph_optimize_has_params: bool | None
    larger_alone: tuple[str, ...]

    @property
    def larger_alone_text(self) -> str:
        """``larger_alone`` for libfitter."""
        return "".join(f"{each} " for each in self.larger_alone)

    def n_operations(self, name_of: Callable[[int], str]) -> int:
        """Count ggml's operations by their names (``name_of``). Raises ``LibraryError`` if the count is unclear."""
        for i in range(_MOST_OPERATIONS):
            name = name_of(i)
            if name == self.last_op:
                return i + 1
            if not re.fullmatch("[A-Z0-9_]+", name):
                break
        raise LibraryError(
            f"ggml's operations do not end with {self.last_op}, as those of every version that fitter knows"
        )


@functools.cache
def epochs() -> tuple[Epoch, ...]:
    """Return all known epochs, the oldest first."""
    return tuple(Epoch(**{**each, "larger_alone": tuple(each["larger_alone"])}) for each in data()["epochs"])


def epoch_of(ggml: str) -> Epoch:
    """Return the epoch of a version of ggml. Raises ``LibraryError`` if it is too old, or no version."""
    version = numbers_of(ggml)
    older = [each for each in epochs() if numbers_of(each.ggml) <= version]
    if not version or not older:
        raise LibraryError(
            f"its ggml is {ggml or 'of no version'}, and {epochs()[0].ggml} is needed: take llama.cpp b9842 or newer, "
            "or llama-cpp-python 0.3.25 or newer"
        )
    return older[-1]


def backend_rules(ggml: str) -> dict[str, bool]:
    """Return the rules of ggml-cuda and ggml-metal in this version, of those that some versions lack, by their names in
    ``fitter_build_t``.
    """
    version = numbers_of(ggml)
    return {
        f"{backend}_{name}": version >= numbers_of(since)
        for backend in ("cuda", "metal")
        for name, since in data()[backend].items()
    }


def position_bytes(ggml: str) -> int:
    """Return the further bytes of a cell in a state if positions have several dimensions (``llama_kv_cell_ext``)."""
    version, sizes = numbers_of(ggml), data()["states"]["position_bytes"]
    return int(next((sizes[since] for since in reversed(sizes) if version >= numbers_of(since)), 0))


def leaves_out_what_is_masked(ggml: str) -> bool:
    """Return whether a sequence's state has only the cells that sliding-window attention still sees."""
    return numbers_of(ggml) >= numbers_of(data()["states"]["leaves_out_what_is_masked"])


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
        if not _load_backend(llama, path) and path == chosen:
            raise LibraryError(f"ggml does not load its CPU backend {path}: install that llama.cpp again")
    return os.path.basename(chosen)


def load_devices(llama: Functions, build: Build) -> None:
    """Load a build's backends with devices; those without a driver fail, as in llama.cpp's programs."""
    for path in build.plugins:
        if path not in build.cpu_plugins and not _is_of_the_host(path):
            _load_backend(llama, path)


def _is_of_the_host(path: str) -> bool:
    return linking.is_library(path, _OF_THE_HOST)


def _load_backend(llama: Functions, path: str) -> bool:
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
