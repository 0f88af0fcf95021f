"""Linux and macOS."""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import os
import struct
import sys

from fitter.errors import LibraryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

assert sys.platform != "win32"


if sys.platform == "darwin":
    from fitter.llama.build import macho

    binaries = macho
    _SUFFIX = ".dylib"
else:
    from fitter.llama.build import elf

    binaries = elf
    _SUFFIX = ".so"

LIBRARY = f"lib{{}}{_SUFFIX}"
"""How the name of a library is written."""

OWN_LIBRARY = "lib{}.so"
"""The same of fitter's own libraries."""

EXECUTABLE = ""
"""The end of the name of a program."""

CUDA_DRIVER = "libcuda.so.1"
"""The driver of NVIDIA's cards."""

SEARCH_PATH = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
"""Environment variable with directories of libraries."""

SOUGHT = ("libllama", "libggml", "libmtmd")
"""Beginnings of the names of libraries to look up among the system's."""

SYSTEM = (
    "libc.so.",
    "libm.so.",
    "libdl.so.",
    "librt.so.",
    "libpthread.so.",
    "libgcc_s.so.",
    "libstdc++.so.",
    "ld-linux",
    "libSystem.",
    "libc++.",
)
"""Beginnings of the names of system libraries that need nothing of llama.cpp."""


def machine() -> str:
    """Return Python's name for this machine's processor."""
    return os.uname().machine


def part_of(name: str) -> str:
    """Return a library's file name without ``lib``, end and version; '' for another file.

    A plugin ends with .so on macOS too.
    """
    before, dot, version = name.partition(".so.")
    if dot and version.replace(".", "").isdigit():
        name = before
    else:
        end = next((end for end in {_SUFFIX, ".so"} if name.endswith(end)), "")
        if not end:
            return ""
        name = name.removesuffix(end)
    return name.removeprefix("lib") if name.startswith("lib") else ""


def environment_places() -> tuple[str, ...]:
    """Return the directories that the environment names for libraries."""
    return tuple(os.environ.get(SEARCH_PATH, "").replace(";", ":").split(":"))


def system_path(name: str) -> str:
    """Return the path of a library of the system as Linux's dynamic linker finds it, '' without one.

    It looks in its cache, and where libraries usually are.
    """
    cached = _cache().get(name, "")
    if cached and os.path.isfile(cached):
        return cached
    return next((path for place in _default_places() if os.path.isfile(path := os.path.join(place, name))), "")


def open_library(path: str) -> ctypes.CDLL:
    """Load a library, with its symbols for all. Raises ``OSError``."""
    return ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)


def library_of_build(path: str, libraries: Sequence[str]) -> ctypes.CDLL:
    """Load a libllama: an object with its functions and those of ``libraries`` that it needs. Raises ``OSError``."""
    return ctypes.CDLL(path)


def address_for(library: ctypes.CDLL, symbol: str) -> int | None:
    """Return the address of a function of a loaded library, or of one that it is linked to; ``None`` without one."""
    function = getattr(library, symbol, None)
    return ctypes.cast(function, ctypes.c_void_p).value if function is not None else None


def preload(path: str) -> None:
    """Do nothing: whoever loads the library finds what is beside it."""


def close_library(library: ctypes.CDLL) -> None:
    """Close a library."""
    _ctypes.dlclose(library._handle)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def file_of(function: object, symbol: str) -> str:
    """Return the file that a function of this process, called ``symbol``, is in. Raises ``LibraryError``."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or not info.dli_fname:  # type: ignore[arg-type]
        raise LibraryError(f"the dynamic linker cannot tell which file {symbol} of libllama is in")
    return os.fsdecode(info.dli_fname)


def make_global(path: str) -> None:
    """Make the symbols of a loaded library visible to those that are opened later. Raises ``OSError``."""
    ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_NOW)


_CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"


def _default_places() -> tuple[str, ...]:
    own = f"{machine()}-linux-gnu"
    return f"/lib/{own}", f"/usr/lib/{own}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"


@functools.cache
def _cache() -> dict[str, str]:
    try:
        with open(_CACHE, "rb") as file:
            return read_cache(file.read())
    except OSError:
        return {}


def read_cache(data: bytes) -> dict[str, str]:
    """Read an ``ld.so.cache``: paths of this machine's libraries by name; empty for an unknown format."""
    begin = data.find(_MAGIC)
    if begin < 0:
        return {}
    paths: dict[str, str] = {}
    try:
        (count,) = struct.unpack_from("<I", data, begin + len(_MAGIC))
        for i in range(count):
            _, name, path = struct.unpack_from("<iII", data, begin + 48 + 24 * i)
            key, value = (_text(data, begin + at) for at in (name, path))
            # the first of a name is the best; libraries of other machines are between them
            if key not in paths and _is_own(value):
                paths[key] = value
    except (struct.error, ValueError):
        return paths
    return paths


def _text(data: bytes, start: int) -> str:
    return os.fsdecode(data[start : data.index(b"\0", start)])


def _is_own(path: str) -> bool:
    return "/lib32/" not in path and "/libx32/" not in path and "/i386-linux-gnu/" not in path
