"""The native libraries of this process: the libllama to plan with, and fitter's own.

They run in the calling process, so only workers, and processes that run models themselves, may load them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fitter.llama
from fitter.errors import LibraryError, UsageError
from fitter.installation import install_command
from fitter.llama.build import functions, linking
from fitter.llama.build.build_folder import PYTHON, Build, find
from fitter.llama.build.functions import Functions, backend_api, backend_rules, epoch_of, ggml_version, same_commit
from fitter.llama.processes import interpreter

if TYPE_CHECKING:
    from fitter.llama.types import LlamaCpp

_LIBFITTER = linking.own_name("fitter")
_BACKEND = linking.own_name("ggml-fitter")
_CUDART = linking.own_name("fitter-cudart")
_CELLS = linking.own_name("fitter-cells")
_PRELOAD = linking.own_name("fitter-preload")
DECLARATIONS = "fitter.llama._declarations"
FIX = "pip install -U llama-cpp-python, or name another llama.cpp with --llama-cpp"
"""What to do about an unusable llama.cpp."""


# Named tuples, since an early load waits for these imports and dataclasses would double them.
class Library(NamedTuple):
    """The loaded libraries: llama.cpp's functions, cffi's ``ffi``, and libfitter's functions."""

    llama: Functions
    ffi: Any
    fitter: Any

    def last_error(self) -> str:
        """Message of libfitter's last failure in this thread."""
        return str(self.text(self.fitter.fitter_last_error()))

    def text(self, pointer: Any, most: int = -1) -> str | None:
        """Return the C string at ``pointer``, or its first ``most`` bytes; ``None`` for NULL."""
        if pointer == self.ffi.NULL:
            return None
        return bytes(self.ffi.string(pointer, most)).decode("utf-8", "replace") if most else ""

    def pointer(self, address: Any) -> Any:
        """Convert a ctypes pointer or an address to cffi's ``void *``."""
        value = ctypes.cast(address, ctypes.c_void_p).value if not isinstance(address, int) else address
        return self.ffi.cast("void *", value or 0)

    def address(self, pointer: Any) -> int:
        """Return the address in cffi's ``pointer``."""
        return int(self.ffi.cast("uintptr_t", pointer))

    def columns(self, out: Any, n_texts: int, n_numbers: int) -> tuple[list[list[str]], list[list[int]]]:
        """Return the columns of a ``fitter_columns_t`` with so many texts and numbers per record."""
        joined = bytes(self.ffi.buffer(out.texts, out.texts_size)).decode("utf-8", "replace")
        texts = joined.split("\0")[:-1]
        numbers = self.ffi.unpack(out.numbers, out.n_numbers) if out.n_numbers else []
        return [texts[i::n_texts] for i in range(n_texts)], [numbers[i::n_numbers] for i in range(n_numbers)]


class Versions(NamedTuple):
    """The versions of llama.cpp ('' if it has none) and ggml, and the commit of llama.cpp ('' if unknown)."""

    llama: str
    ggml: str
    commit: str

    def __str__(self) -> str:
        commit = f"commit {self.commit}" if self.commit else "commit unknown"
        return f"{self.llama} (ggml {self.ggml}, {commit})" if self.llama else f"{commit} (ggml {self.ggml})"


def is_same_version(loaded: Versions, built: Versions, *, is_python: bool) -> bool:
    """Return whether the ``loaded`` llama.cpp is the one that fitter's libraries were ``built`` with.

    Without a commit, llama-cpp-python's (``is_python``) is recognized by its versions, no other.
    """
    same = same_commit(loaded.commit, built.commit)
    is_released = loaded.llama.split("-")[0] == built.llama and loaded.ggml == built.ggml
    return is_released and (is_python if same is None else same)


def _is_built_for(library: Library) -> bool:
    is_python = loaded_build().where == PYTHON
    return is_same_version(loaded_versions(library), built_versions(library), is_python=is_python)


def backend_path() -> Path:
    """Return the path of the virtual-device backend, for ``GGML_BACKEND_PATH``. Raises ``LibraryError``."""
    return _find(_BACKEND)


def cudart_path() -> Path:
    """Return the path of the CUDA runtime that needs no GPU. Raises ``LibraryError``."""
    return _find(_CUDART)


def preload_path() -> Path:
    """Return the path of the library that has a program load the backend. Raises ``LibraryError``."""
    return _find(_PRELOAD)


def own_libraries() -> tuple[str, ...]:
    """Return the paths of fitter's libraries for use beside a libllama. Raises ``LibraryError``."""
    return str(_find(_LIBFITTER)), str(_find(_BACKEND))


def llama_cpp_version() -> str:
    """Return version and commit of the loaded llama.cpp, equal for every build of it. Raises ``LibraryError``."""
    library = libraries()
    # A build outside of a git checkout does not know its commit.
    return str(built_versions(library) if _is_built_for(library) else loaded_versions(library))


def loaded() -> LlamaCpp:
    """Return the loaded build. Raises ``LibraryError``."""
    from fitter.llama.types import LlamaCpp

    versions, build = loaded_versions(libraries()), loaded_build()
    # processes other than workers have loaded their own CPU backend
    cpu = cpu_backend() if interpreter.is_worker() else ""
    return LlamaCpp(llama_cpp_version(), versions.ggml, versions.commit, build.libllama, build.key, cpu)


def _find(name: str) -> Path:
    for directory in fitter.llama.__path__:
        path = Path(directory) / name
        if path.is_file():
            return path.resolve()
    raise LibraryError(f"{name} is missing beside fitter's Python files: reinstall llama-fitter ({install_command()})")


_lock = threading.Lock()


def libraries() -> Library:
    """Load the native libraries, once per process.

    Raises ``LibraryError`` if one is missing, or if they do not belong together.
    """
    with _lock:
        return _libraries()


@functools.cache
def _libraries() -> Library:
    with _telling_place():
        llama = functions.open_build(loaded_build())
    _make_global(llama)
    ffi = declarations()
    library = Library(llama, ffi, _open(ffi, _LIBFITTER))
    llama.lay_out(_probe_of(library), loaded_build().headers)
    _configure(library, library.fitter, library.fitter.fitter_last_error)
    _check_trust(library)
    llama.llama_backend_init()
    return library


def _check_trust(library: Library) -> None:
    """Raise ``LibraryError`` if the build is not the one fitter was built for, and behaves differently."""
    if interpreter.is_canary() or loaded_build().is_bundled or _is_built_for(library):
        return
    from fitter.llama.build import verdicts

    verdicts.check(loaded_build(), own_libraries(), loaded_versions(library).commit)


@functools.cache
def loaded_build() -> Build:
    """Return the build of this process: in a worker the environment's, else llama-cpp-python's.

    Raises ``UsageError`` and ``LibraryError``.
    """
    return find(_name_of_build())


def _configure(library: Library, shim: Any, error: Callable[[], Any]) -> None:
    """Tell one of fitter's libraries the differences between the loaded build and the one it was built for."""
    ggml = ggml_version(library.llama.library)[0]
    epoch = epoch_of(ggml)
    has_params = epoch.graph_optimize_has_params
    name_of = library.llama.library.ggml_op_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    n_ops = epoch.n_operations(lambda i: (name_of(i) or b"").decode("ascii", "replace"))
    names = [library.ffi.new("char[]", text.encode()) for text in (epoch.last_op, epoch.larger_alone_text)]
    described = {
        "n_ops": n_ops,
        "last_op": names[0],
        "backend_api": backend_api(library.llama.library),
        "graph_optimize_has_params": -1 if has_params is None else int(has_params),
        "larger_alone": names[1],
        **backend_rules(ggml),
    }
    if shim.fitter_configure_build(library.ffi.new("fitter_build_t *", described)) < 0:
        raise LibraryError(f"{library.llama.path} is not a llama.cpp that fitter can use: {library.text(error())}")


def _probe_of(library: Library) -> Callable[[int, Any], None]:
    """Return libfitter's probe of functions that return a struct."""

    def ask(function: int, memory: Any) -> None:
        library.fitter.fitter_probe(library.pointer(function), library.pointer(ctypes.addressof(memory)), len(memory))

    return ask


@functools.cache
def open_backend() -> Any:
    """Open the virtual-device backend without registering it with ggml. Raises ``LibraryError``."""
    library = libraries()
    backend = _open(library.ffi, _BACKEND)
    _configure(library, backend, backend.fitter_virtual_error)
    return backend


@functools.cache
def prepare() -> None:
    """Load everything for a worker, and capture llama.cpp's log. Raises ``LibraryError``."""
    library = libraries()
    library.fitter.fitter_log_capture()
    library.fitter.fitter_say_faults()
    open_backend()
    cpu_backend()
    # llama.cpp's programs load the backend in this variable, but llama-cpp-python does not.
    path = os.environ.get("GGML_BACKEND_PATH")
    if path and os.path.basename(path) != backend_path().name:
        library.fitter.fitter_backend_load(os.fsencode(path))
    _check_api()


def _check_api() -> None:
    """Raise ``LibraryError`` if fitter does not know this version of ggml's interface of backends."""
    llama = libraries().llama
    loaded = int(open_backend().fitter_virtual_loaded_api_version())
    if loaded not in (-1, backend_api(llama.library)):
        raise LibraryError(
            f"{llama.path} has version {loaded} of ggml's interface of backends, which this fitter does not know: "
            f"install a newer llama-fitter, or {FIX}"
        )


@functools.cache
def load_devices() -> None:
    """Load the backends that llama.cpp's programs would load, without the CPU's. Raises ``LibraryError``."""
    functions.load_devices(libraries().llama, loaded_build())


@functools.cache
def cpu_backend() -> str:
    """Load the CPU backend; return its file name, '' if libllama is linked to its own.

    Raises ``LibraryError``.
    """
    wanted = os.environ.get(interpreter.LLAMA_CPU, "") if interpreter.is_worker() else ""
    return functions.load_plugins(libraries().llama, loaded_build(), wanted)


_registered = False


def register_virtual(description: str) -> bool:
    """Register virtual devices; return whether ggml accepts the backend. Raises ``UsageError``."""
    global _registered
    library = libraries()
    backend = open_backend()
    text = description.encode("utf-8", "surrogateescape")
    if (description or not _registered) and backend.fitter_virtual_configure(text) < 0:
        raise UsageError(f"virtual devices: {library.text(backend.fitter_virtual_error())}")
    _registered = _registered or bool(library.fitter.fitter_backend_load(os.fsencode(backend_path())))
    return _registered


_cells: Any = None


def cells() -> Any:
    """Return the functions that save the memory of a KV cache's cells; ``None`` if they are not loaded."""
    return _cells


@functools.cache
def load_cells() -> None:
    """Let the cells of KV caches take next to no memory in this process's dummy loads.

    Only for a worker, before it loads libllama, which then uses this library's allocator.
    """
    global _cells
    with contextlib.suppress(LibraryError, OSError):
        _cells = linking.open_library(str(_find(_CELLS)))


def _name_of_build() -> str:
    return (interpreter.is_worker() and os.environ.get(interpreter.LLAMA_CPP)) or PYTHON


@contextlib.contextmanager
def _telling_place() -> Iterator[None]:
    """Add to errors the environment variable that named the library."""
    try:
        yield
    except (LibraryError, OSError) as error:
        given = os.environ.get("LLAMA_CPP_LIB_PATH") if _name_of_build() == PYTHON else None
        if given:
            raise LibraryError(
                f"libllama cannot be loaded from LLAMA_CPP_LIB_PATH={given}: {_one_line(error)}"
            ) from error
        if isinstance(error, LibraryError):
            raise
        raise LibraryError(f"{_name_of_build()} cannot be loaded ({_one_line(error)}): {FIX}") from error


def _make_global(llama: Functions) -> None:
    """Make the symbols of libllama and of its ggml visible to libraries that are opened later.

    Wheels contain several copies of ggml under different names. The linker tells which file libllama's own symbols came
    from; opening that file again only changes its scope.
    """
    for symbol in ("llama_backend_init", "ggml_backend_dev_count", "ggml_backend_buft_name"):
        try:
            linking.make_global(_file_of(llama, symbol))
        except (AttributeError, OSError) as error:
            raise LibraryError(
                f"{llama.path} is not a llama.cpp that fitter can use ({_one_line(error)}): {FIX}"
            ) from error


def _file_of(llama: Functions, symbol: str) -> str:
    return linking.file_of(getattr(llama.library, symbol), symbol)


def directory() -> Path:
    """Return the directory of libllama. Raises ``LibraryError``."""
    return Path(_file_of(libraries().llama, "llama_backend_init")).parent


def declarations() -> Any:
    """Return cffi's declarations of ``fitter.h``. Raises ``LibraryError`` if they are missing."""
    try:
        return importlib.import_module(DECLARATIONS).ffi
    except ModuleNotFoundError as error:
        if error.name == DECLARATIONS:
            raise LibraryError(
                "_declarations.py is missing beside fitter's Python files: reinstall llama-fitter "
                f"({install_command()})"
            ) from error
        raise LibraryError("cffi is not installed: pip install cffi") from error


def _open(ffi: Any, name: str) -> Any:
    path = _find(name)
    try:
        return ffi.dlopen(str(path), ffi.RTLD_NOW)
    except OSError as error:
        raise LibraryError(
            f"{name} does not match the loaded libllama ({_one_line(error)}): reinstall llama-fitter with "
            "LLAMA_CPP_SOURCE_DIR set to the source of that libllama"
        ) from error


def loaded_versions(library: Library) -> Versions:
    """Return the versions of the loaded llama.cpp."""
    # missing in builds from before llama.cpp had versions
    llama_version = library.llama.llama_version
    return Versions(
        ((llama_version and llama_version()) or b"").decode("utf-8", "replace"),
        library.text(library.fitter.fitter_loaded_ggml_version()) or "unknown",
        library.text(library.fitter.fitter_loaded_ggml_commit()) or "",
    )


def built_versions(library: Library) -> Versions:
    """Return the versions that fitter's libraries were compiled against."""
    built = library.fitter.fitter_versions()
    return Versions(
        library.text(built.llama_version) or "",
        library.text(built.ggml_version) or "",
        library.text(built.llama_commit) or "",
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
