"""Windows."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import os
import sys
import sysconfig

from fitter.errors import LibraryError
from fitter.llama.build import pe

assert sys.platform == "win32"

from ctypes import wintypes  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

binaries = pe
LIBRARY = "{}.dll"
OWN_LIBRARY = LIBRARY
EXECUTABLE = ".exe"
CUDA_DRIVER = "nvcuda.dll"
SEARCH_PATH = "PATH"
# with MinGW they begin with lib
SOUGHT = ("llama", "ggml", "mtmd", "libllama", "libggml", "libmtmd")
SYSTEM = ("api-ms-", "KERNEL32", "ADVAPI32", "MSVCP", "VCRUNTIME", "USER32", "WS2_32", "ntdll", "ucrtbase")

_FROM_ADDRESS, _UNCHANGED = 4, 2
_MOST_CHARACTERS = 1 << 15

_kernel = ctypes.WinDLL("kernel32", use_last_error=True)
_kernel.GetModuleHandleExW.argtypes = [wintypes.DWORD, ctypes.c_void_p, ctypes.POINTER(wintypes.HMODULE)]
_kernel.GetModuleFileNameW.argtypes = [wintypes.HMODULE, wintypes.LPWSTR, wintypes.DWORD]


def machine() -> str:
    # of this Python: its libraries have to be the same
    name = sysconfig.get_platform().removeprefix("win-")
    return "x86_64" if name == "amd64" else name


def part_of(name: str) -> str:
    lower = name.lower()
    return lower.removesuffix(".dll").removeprefix("lib") if lower.endswith(".dll") else ""


def environment_places() -> tuple[str, ...]:
    return ()


def system_path(name: str) -> str:
    return next((path for place in _path_folders() if os.path.isfile(path := os.path.join(place, name))), "")


def _path_folders() -> list[str]:
    return [place for place in os.environ.get(SEARCH_PATH, "").split(os.pathsep) if os.path.isabs(place)]


def open_library(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError:
        # a driver's libraries, such as CUDA's, are where the PATH says
        with contextlib.ExitStack() as stack:
            for place in _path_folders():
                if os.path.isdir(place):
                    stack.enter_context(os.add_dll_directory(place))
            return ctypes.CDLL(path)


class _Libraries(ctypes.CDLL):
    """A library with the functions of others: a handle has only its own on Windows."""

    def __init__(self, path: str, others: Sequence[ctypes.CDLL]) -> None:
        super().__init__(path)
        self._others = others

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function: Any
        try:
            function = super().__getattr__(name)
        except AttributeError:
            function = next((found for each in self._others if (found := getattr(each, name, None))), None)
            if function is None:
                raise
        setattr(self, name, function)
        return function


def library_of_build(path: str, libraries: Sequence[str]) -> ctypes.CDLL:
    return _Libraries(path, [open_library(each) for each in libraries])


def address_for(library: ctypes.CDLL, symbol: str) -> int | None:
    # a library that is loaded is not searched for again, wherever it is
    names = (name for name in binaries.linking_of(library._name).needed if name.startswith(SOUGHT))
    for each in (library, *map(ctypes.CDLL, names)):
        if (function := getattr(each, symbol, None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def preload(path: str) -> None:
    # ggml looks for what a backend needs beside the program, which is Python
    with contextlib.suppress(OSError):
        open_library(path)


def close_library(library: ctypes.CDLL) -> None:
    _ctypes.FreeLibrary(library._handle)


def file_of(function: object, symbol: str) -> str:
    handle = wintypes.HMODULE()
    name = ctypes.create_unicode_buffer(_MOST_CHARACTERS)
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
    if not _kernel.GetModuleHandleExW(
        _FROM_ADDRESS | _UNCHANGED, address, ctypes.byref(handle)
    ) or not _kernel.GetModuleFileNameW(handle, name, len(name)):
        raise LibraryError(f"Windows cannot tell which file {symbol} of libllama is in")
    return name.value


def make_global(path: str) -> None:
    """Do nothing: fitter's libraries look for symbols in all."""
