"""The native libraries: libllama as llama-cpp-python loaded it, and fitter's own two beside it.

Everything here runs in the calling process, so only the worker and a process that runs models itself import it for use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import fitter.llama
from fitter.errors import LibraryError, UsageError

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
"""The llama-cpp-python whose parameter structs fitter fills in."""

_LIBFITTER = "libfitter.so"
_BACKEND = "libggml-fitter.so"
_CUDART = "libfitter-cudart.so"
_CELLS = "libfitter-cells.so"
_DECLARATIONS = "fitter.llama._declarations"


# Named tuples: a load that begins early waits for what is imported here, and dataclasses are half of that.
class Library(NamedTuple):
    """Handles of what is loaded: the ``llama_cpp`` module, cffi's ``ffi``, and libfitter's functions."""

    llama_cpp: Any
    ffi: Any
    fitter: Any

    def last_error(self) -> str:
        """Message of libfitter's last failure in this thread."""
        return str(self.text(self.fitter.fitter_last_error()))

    def text(self, pointer: Any) -> str | None:
        """The C string at ``pointer``, ``None`` for NULL."""
        if pointer == self.ffi.NULL:
            return None
        return bytes(self.ffi.string(pointer)).decode("utf-8", "replace")

    def pointer(self, address: Any) -> Any:
        """A ctypes pointer or address as cffi's ``void *``."""
        value = ctypes.cast(address, ctypes.c_void_p).value if not isinstance(address, int) else address
        return self.ffi.cast("void *", value or 0)

    def address(self, pointer: Any) -> int:
        """The address that cffi's ``pointer`` holds."""
        return int(self.ffi.cast("uintptr_t", pointer))

    def columns(self, out: Any, n_texts: int, n_numbers: int) -> tuple[list[list[str]], list[list[int]]]:
        """What a ``fitter_columns_t`` holds, by column: so many texts and so many numbers per record."""
        joined = bytes(self.ffi.buffer(out.texts, out.texts_size)).decode("utf-8", "replace")
        texts = joined.split("\0")[:-1]
        numbers = self.ffi.unpack(out.numbers, out.n_numbers) if out.n_numbers else []
        return [texts[i::n_texts] for i in range(n_texts)], [numbers[i::n_numbers] for i in range(n_numbers)]


class Versions(NamedTuple):
    """What one side of the native libraries is: versions, the llama.cpp commit ('' if unknown), ggml's backend API."""

    llama: str
    ggml: str
    commit: str
    backend_api: int | None = None

    def __str__(self) -> str:
        commit = f", commit {self.commit}" if self.commit else ""
        api = f", backend API {self.backend_api}" if self.backend_api is not None else ""
        return f"llama.cpp {self.llama} (ggml {self.ggml}{commit}{api})"


def check_versions(loaded: Versions, built: Versions) -> None:
    """Raise ``LibraryError`` if fitter's libraries were ``built`` for another llama.cpp than the one ``loaded``."""
    same = (
        loaded.llama.split("-")[0] == built.llama
        and loaded.ggml == built.ggml
        and _same_commit(loaded.commit, built.commit)
        and (loaded.backend_api is None or loaded.backend_api == built.backend_api)
    )
    if not same:
        raise LibraryError(
            f"fitter was built for {built}, but libllama is {loaded}: reinstall llama-fitter with LLAMA_CPP_SOURCE_DIR "
            f"set to the source of that libllama, or install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        )


def _same_commit(a: str, b: str) -> bool:
    # Builds outside of a git checkout do not know theirs; some say "-dirty".
    a, b = (commit.removesuffix("-dirty") for commit in (a, b))
    if not a or not b or "unknown" in (a, b):
        return True
    return a.startswith(b) or b.startswith(a)


def backend_path() -> Path:
    """Path of the virtual-device backend, as ``GGML_BACKEND_PATH`` wants it. Raises ``LibraryError``."""
    return _find(_BACKEND)


def cudart_path() -> Path:
    """Path of the CUDA runtime without a GPU. Raises ``LibraryError``."""
    return _find(_CUDART)


def llama_cpp_version() -> str:
    """Version and commit of the llama.cpp that is loaded, the same for every build of it. Raises ``LibraryError``."""
    # Not what it says itself: a build outside of a git checkout does not know its commit. No other one is loaded.
    built = built_versions(load())
    return f"{built.llama} (ggml {built.ggml}, commit {built.commit})"


def _find(name: str) -> Path:
    for directory in fitter.llama.__path__:
        path = Path(directory) / name
        if path.is_file():
            return path.resolve()
    raise LibraryError(f"{name} is missing beside fitter's Python files: reinstall llama-fitter (pip install .)")


_lock = threading.Lock()


def load() -> Library:
    """Load everything once per process.

    Raises ``LibraryError`` if a part is missing, or if the parts do not belong together.
    """
    with _lock:
        return _load()


@functools.cache
def _load() -> Library:
    llama_cpp = _import_llama_cpp()
    _make_global(llama_cpp)
    ffi = _declarations()
    library = Library(llama_cpp, ffi, _open(ffi, _LIBFITTER))
    check_versions(_loaded_versions(library), built_versions(library))
    llama_cpp.llama_backend_init()
    return library


@functools.cache
def open_backend() -> Any:
    """The functions of the virtual-device backend (not yet registered with ggml). Raises ``LibraryError``."""
    library = load()
    backend = _open(library.ffi, _BACKEND)
    api = int(backend.fitter_virtual_loaded_api_version())
    loaded = _loaded_versions(library)
    if api >= 0:
        loaded = Versions(loaded.llama, loaded.ggml, loaded.commit, api)
    check_versions(loaded, built_versions(library))
    return backend


@functools.cache
def prepare() -> None:
    """Load all that a worker needs, and capture llama.cpp's log. Raises ``LibraryError``."""
    library = load()
    library.fitter.fitter_log_capture()
    # The backend that llama.cpp's programs would load: llama-cpp-python does not look at the variable.
    path = os.environ.get("GGML_BACKEND_PATH")
    if path and os.path.basename(path) != backend_path().name:
        library.fitter.fitter_backend_load(os.fsencode(path))
    open_backend()


_registered = False


def register_virtual(description: str) -> bool:
    """What ``devices.register_virtual`` does; returns whether ggml takes the backend. Raises ``UsageError``."""
    global _registered
    library = load()
    backend = open_backend()
    text = description.encode("utf-8", "surrogateescape")
    if (description or not _registered) and backend.fitter_virtual_configure(text) < 0:
        raise UsageError(f"virtual devices: {library.text(backend.fitter_virtual_error())}")
    _registered = _registered or bool(library.fitter.fitter_backend_load(os.fsencode(backend_path())))
    return _registered


_cells: Any = None


def cells() -> Any:
    """The functions that keep cells of a KV cache out of memory, ``None`` where this process cannot have that."""
    return _cells


@functools.cache
def load_only_bindings() -> None:
    """Let this process import llama-cpp-python's bindings without what ``Llama`` needs: numpy, jinja2 and more.

    Its package stays empty here, apart from the version: only for a process that nobody else uses. In that one, the
    cells of a KV cache that is only planned take next to no memory.
    """
    global _cells
    with contextlib.suppress(LibraryError, OSError):
        # before libllama, so that it allocates with this
        _cells = ctypes.CDLL(str(_find(_CELLS)), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.submodule_search_locations is None:
        # Loading says so.
        return
    bare = types.ModuleType("llama_cpp")
    bare.__path__ = list(spec.submodule_search_locations)
    version = bare.__dict__["__version__"] = _version_in(bare.__path__)
    sys.modules["llama_cpp"] = bare
    if version == LLAMA_CPP_PYTHON_VERSION and "typing_extensions" not in sys.modules:
        # For one name, which typing has as well, it imports inspect and more.
        extensions = types.ModuleType("typing_extensions")
        extensions.__dict__["TypeAlias"] = TypeAlias
        sys.modules["typing_extensions"] = extensions


def _version_in(package: Iterable[str]) -> str:
    for directory in package:
        with contextlib.suppress(OSError), open(os.path.join(directory, "__init__.py"), encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition("=")
                if name.strip() == "__version__":
                    return value.strip().strip("\"'")
    return "unknown"


def _import_llama_cpp() -> Any:
    try:
        package = importlib.import_module("llama_cpp")
        llama_cpp = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        if error.name not in ("llama_cpp", "llama_cpp.llama_cpp"):
            raise LibraryError(f"llama-cpp-python cannot be imported: {error}") from error
        raise LibraryError(
            f"llama-cpp-python is not installed: pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        path = os.environ.get("LLAMA_CPP_LIB_PATH")
        where = f" from LLAMA_CPP_LIB_PATH={path}" if path else ""
        raise LibraryError(f"libllama cannot be loaded{where}: {_one_line(error)}") from error
    version = getattr(package, "__version__", "unknown")
    if version != LLAMA_CPP_PYTHON_VERSION:
        raise LibraryError(
            f"fitter needs llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, but {version} is installed: "
            f"pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        )
    return llama_cpp


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def _make_global(llama_cpp: Any) -> None:
    """Let libraries that are opened later find the symbols of libllama and of the ggml that it uses.

    Wheels hold several copies of ggml under different names. Asking the linker which file a symbol of libllama's own
    dependencies came from names the right one; opening it again only changes its scope.
    """
    for symbol in ("llama_backend_init", "ggml_backend_dev_count", "ggml_backend_buft_name"):
        try:
            ctypes.CDLL(_file_of(llama_cpp, symbol), mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_NOW)
        except (AttributeError, OSError) as error:
            raise LibraryError(f"libllama is no llama.cpp that fitter can use: {_one_line(error)}") from error


def _file_of(llama_cpp: Any, symbol: str) -> str:
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    function = getattr(llama_cpp._lib, symbol)
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or not info.dli_fname:
        raise LibraryError(f"the dynamic linker does not know where {symbol} of libllama is")
    return os.fsdecode(info.dli_fname)


def directory() -> Path:
    """Where libllama is. Raises ``LibraryError``."""
    return Path(_file_of(load().llama_cpp, "llama_backend_init")).parent


def _declarations() -> Any:
    try:
        return importlib.import_module(_DECLARATIONS).ffi
    except ModuleNotFoundError as error:
        if error.name == _DECLARATIONS:
            raise LibraryError(
                "_declarations.py is missing beside fitter's Python files: reinstall llama-fitter (pip install .)"
            ) from error
        raise LibraryError("cffi is not installed: pip install cffi") from error


def _open(ffi: Any, name: str) -> Any:
    path = _find(name)
    try:
        return ffi.dlopen(str(path), ffi.RTLD_NOW)
    except OSError as error:
        raise LibraryError(
            f"{name} does not fit the libllama that is loaded: {_one_line(error)}; reinstall llama-fitter with "
            "LLAMA_CPP_SOURCE_DIR set to the source of that libllama"
        ) from error


def _loaded_versions(library: Library) -> Versions:
    native = library.llama_cpp._lib
    try:
        native.llama_version.restype = ctypes.c_char_p
        llama = native.llama_version() or b"unknown"
    except AttributeError:
        llama = b"unknown"
    return Versions(
        llama.decode(),
        library.text(library.fitter.fitter_loaded_ggml_version()) or "unknown",
        library.text(library.fitter.fitter_loaded_ggml_commit()) or "",
    )


def built_versions(library: Library) -> Versions:
    """What fitter's own libraries were compiled against."""
    built = library.fitter.fitter_versions()
    return Versions(
        library.text(built.llama_version) or "",
        library.text(built.ggml_version) or "",
        library.text(built.llama_commit) or "",
        int(built.backend_api_version),
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
