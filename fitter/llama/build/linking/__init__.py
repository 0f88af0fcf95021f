# ruff: noqa: F403, F405
"""Libraries of this system: their names and files, how they are found, opened and closed, and what they are linked to.

``posix`` and ``windows`` offer the same names; nothing else in fitter asks which system it is about libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from fitter.llama.build.elf import Linking

if sys.platform == "win32":
    from fitter.llama.build.linking.windows import *
else:
    from fitter.llama.build.linking.posix import *

LIBLLAMA = LIBRARY.format("llama")
"""The usual name of libllama's file."""


def own_name(name: str) -> str:
    """Return the file name of one of fitter's libraries."""
    return OWN_LIBRARY.format(name)


def is_library(path: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a path is a library of this system whose name begins so, without what all names begin with.

    ``llama.`` is the beginning of libllama.so, libllama.so.0 and libllama.v0.5.0.so, and of llama.dll.
    """
    return f"{part_of(os.path.basename(path))}.".startswith(beginnings)


class Linked(NamedTuple):
    """A library that another one needs by ``name``.

    ``path`` is '' if the linker would not find it. Among the system's libraries, only llama.cpp's are looked up.
    """

    name: str
    path: str
    linking: Linking | None


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
    waiting: list[tuple[str, Linking, tuple[str, ...]]] = [(program, binaries.linking_of(path), ())]
    for file, linking, inherited in waiting:
        # The origin of a program is where its file is, that of a library where it was found, be that a link.
        origin = os.path.dirname(os.path.realpath(file) if file == program and not linking.name else file)
        rpath = inherited if linking.runpath else (*_expand_origin(origin, linking.rpath), *inherited)
        places = (
            before,
            *(() if linking.runpath else rpath),
            *environment_places(),
            *_expand_origin(origin, linking.runpath),
        )
        for name in linking.needed:
            if name in libraries or name.startswith(SYSTEM):
                continue
            place = _search(name, places)
            read = binaries.linking_of(place) if place else None
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


def _search(name: str, places: tuple[str, ...]) -> str:
    """Return the path of a library, '' without one; ignore entries that depend on the current directory."""
    if os.path.basename(name) != name:
        return name if os.path.isabs(name) and os.path.isfile(name) else ""
    for place in filter(os.path.isabs, places):
        path = os.path.join(place, name)
        if os.path.isfile(path):
            return path
    return system_path(name) if name.startswith(SOUGHT) else ""


def missing_libraries(libraries: dict[str, Linked]) -> list[str]:
    """Return the names of llama.cpp's libraries that the linker would not find."""
    return [
        each.name for each in libraries.values() if not each.path and os.path.basename(each.name).startswith(SOUGHT)
    ]
