"""Read libraries and programs for macOS: their links, identities and symbols."""

from __future__ import annotations

import mmap
import os
import platform
import struct
from collections.abc import Iterator

from fitter.errors import LibraryError
from fitter.llama.build.elf import Linking, SharedLibrary, begins_so, mapped, text_at

_SYSTEM = "macOS"
_BEGINNINGS = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""Of a file for one 64-bit machine, and of one that holds files for several."""
_MACHINES = {0x0100_0007: "x86_64", 0x0100_000C: "arm64"}
_LINKS = frozenset({0xC, 0x8000_0018, 0x8000_001F})
"""Commands that name a library that is needed: the usual one, a weak one, and one that is offered again."""
_NAME, _SYMBOLS, _IDENTITY, _PLACE = 0xD, 0x2, 0x1B, 0x8000_001C
_UNDEFINED, _TYPE, _DEBUG, _EXTERNAL = 0, 0x0E, 0xE0, 0x01


def read(path: str | os.PathLike[str], machine: str | None = None) -> SharedLibrary:
    """Read the links and symbols of a library, for ``machine`` or this one. Raises ``LibraryError``."""
    with mapped(path, _SYSTEM, _BEGINNINGS) as data:
        file = _File(data, os.fspath(path), machine)
        defined = frozenset(name for name, is_defined in file.symbols() if is_defined)
        undefined = frozenset(name for name, is_defined in file.symbols() if not is_defined)
        return SharedLibrary(file.needed(), defined, undefined)


def is_binary(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a library or program for macOS."""
    return begins_so(path, _BEGINNINGS)


def linking_of(path: str | os.PathLike[str], machine: str | None = None) -> Linking:
    """Read the links of a library or program. Raises ``LibraryError`` if it is for another machine, or damaged."""
    with mapped(path, _SYSTEM, _BEGINNINGS) as data:
        file = _File(data, os.fspath(path), machine)
        identity = next((data[at + 8 : at + 24].hex() for at in file.commands(_IDENTITY)), "")
        name = next((_short(file.text(at)) for at in file.commands(_NAME)), "")
        places = tuple(dict.fromkeys(("$ORIGIN", *(_expandable(file.text(at)) for at in file.commands(_PLACE)))))
        return Linking(name, file.needed(), places, (), identity)


class _File:
    """The part of a file that is for one machine."""

    def __init__(self, data: mmap.mmap, path: str, machine: str | None) -> None:
        self._data = data
        wanted = machine or platform.machine()
        starts = {0}
        if data[:4] == _BEGINNINGS[1]:
            (count,) = struct.unpack_from(">I", data, 4)
            starts = {struct.unpack_from(">8xI", data, 8 + 20 * i)[0] for i in range(count)}
        machines = {struct.unpack_from("<4xI", data, start)[0]: start for start in starts}
        start = next((at for number, at in machines.items() if _MACHINES.get(number) == wanted), None)
        if start is None:
            raise LibraryError(f"{path} is not for {wanted}: name a llama.cpp that was built for it")
        self._start = start

    def commands(self, *wanted: int) -> Iterator[int]:
        """Yield the offsets of the commands of these kinds."""
        (count,) = struct.unpack_from("<I", self._data, self._start + 16)
        at = self._start + 32
        for _ in range(count):
            kind, size = struct.unpack_from("<II", self._data, at)
            if size < 8:
                raise ValueError("a command without a size")
            if kind in wanted:
                yield at
            at += size

    def text(self, command: int) -> str:
        """Return the text of a command."""
        return text_at(self._data, command + struct.unpack_from("<8xI", self._data, command)[0])

    def needed(self) -> tuple[str, ...]:
        """Return the names of the libraries that it is linked to."""
        return tuple(_short(self.text(at)) for at in self.commands(*_LINKS))

    def symbols(self) -> Iterator[tuple[str, bool]]:
        """Yield its symbols for others and of others, and whether it defines each; without the first underscore."""
        for command in self.commands(_SYMBOLS):
            symbols, count, texts, _ = struct.unpack_from("<8xIIII", self._data, command)
            table = self._data[self._start + symbols : self._start + symbols + 16 * count]
            for name, kind in struct.iter_unpack("<IB11x", table):
                if kind & _EXTERNAL and not kind & _DEBUG:
                    yield text_at(self._data, self._start + texts + name)[1:], kind & _TYPE != _UNDEFINED


def _short(name: str) -> str:
    """Return the name of a library that the linker searches for, else its path."""
    return os.path.basename(name) if name.startswith("@") else name


def _expandable(place: str) -> str:
    return place.replace("@loader_path", "$ORIGIN").replace("@executable_path", "$ORIGIN")
