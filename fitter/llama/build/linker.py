"""Find the libraries of a library or program as Linux's dynamic linker would, without running it."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from fitter.llama.build import elf

_CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"
_SYSTEM = (
    "libc.so.",
    "libm.so.",
    "libdl.so.",
    "librt.so.",
    "libpthread.so.",
    "libgcc_s.so.",
    "libstdc++.so.",
    "ld-linux",
)
"""Beginnings of the names of system libraries that need nothing of llama.cpp."""

_SOUGHT = ("libllama", "libggml", "libmtmd")
"""Beginnings of the names of libraries to look up among the system's."""


class Linked(NamedTuple):
    """A library that another one needs by ``name``.

    ``path`` is '' if the linker would not find it. Among the system's libraries, only llama.cpp's are looked up.
    """

    name: str
    path: str
    linking: elf.Linking | None


def linked(path: str, before: str = "") -> dict[str, Linked]:
    """Find all libraries that a library or program needs, directly or not, by the names they are needed by.

    System libraries are left out. Each library comes after those that it needs.

    Args:
        path: The library or program.
        before: A directory to search first.

    Raises:
        LibraryError: A file is damaged or for another machine.
    """
    libraries: dict[str, Linked] = {}
    # breadth first, as the linker looks: the first library that needs a name decides where it is searched for
    program = os.path.abspath(path)
    waiting: list[tuple[str, elf.Linking, tuple[str, ...]]] = [(program, elf.linking_of(path), ())]
    for file, linking, inherited in waiting:
        # The origin of a program is where its file is, that of a library where it was found, be that a link.
        origin = os.path.dirname(os.path.realpath(file) if file == program and not linking.name else file)
        rpath = inherited if linking.runpath else (*_expand_origin(origin, linking.rpath), *inherited)
        places = (before, *(() if linking.runpath else rpath), *_environment_places(), *_expand_origin(origin, linking.runpath))
        for name in linking.needed:
            if name in libraries or name.startswith(_SYSTEM):
                continue
            place = _search(name, places)
            read = elf.linking_of(place) if place else None
            libraries[name] = Linked(name, place, read)
            if read is not None:
                waiting.append((place, read, rpath))
    return {each.name: each for each in _in_order(list(libraries), libraries)}


def needed_by(library: Linked, libraries: dict[str, Linked]) -> list[Linked]:
    """Return the ``libraries`` that ``library`` needs, each after those that it needs itself."""
    return _in_order(library.linking.needed if library.linking else (), libraries)


def _in_order(names: Sequence[str], libraries: dict[str, Linked]) -> list[Linked]:
    ordered: dict[str, Linked] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or name not in libraries:
            return
        seen.add(name)
        linking = libraries[name].linking
        for other in linking.needed if linking else ():
            visit(other)
        ordered[name] = libraries[name]

    for name in names:
        visit(name)
    return list(ordered.values())


def _expand_origin(origin: str, places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for place in places)


def _environment_places() -> tuple[str, ...]:
    return tuple(os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"))


def _search(name: str, places: tuple[str, ...]) -> str:
    """Return the path of a library, '' without one; ignore entries that depend on the current directory."""
    if "/" in name:
        return name if os.path.isabs(name) and os.path.isfile(name) else ""
    for place in filter(os.path.isabs, places):
        path = os.path.join(place, name)
        if os.path.isfile(path):
            return path
    if not name.startswith(_SOUGHT):
        return ""
    cached = _cache().get(name, "")
    if cached and os.path.isfile(cached):
        return cached
    return next((path for place in _default_places() if os.path.isfile(path := os.path.join(place, name))), "")


def _default_places() -> tuple[str, ...]:
    machine = os.uname().machine
    return (
        f"/lib/{machine}-linux-gnu",
        f"/usr/lib/{machine}-linux-gnu",
        *("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    )


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


def missing(libraries: dict[str, Linked]) -> list[str]:
    """Return the names of llama.cpp's libraries that the linker would not find."""
    return [each.name for each in libraries.values() if not each.path and os.path.basename(each.name).startswith(_SOUGHT)]
