"""Read libraries and programs for Windows: their links, identities and symbols."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

from fitter.errors import LibraryError
from fitter.llama.build.elf import Linking, SharedLibrary, begins_so, mapped, text_at

_SYSTEM = "Windows"
_BEGINNINGS = (b"MZ",)
_X86_64 = 0x8664
_EXPORTS, _IMPORTS, _DEBUG = 0, 1, 6
"""Places of parts in the header's table."""
_CODEVIEW = 2
_BESIDE = ("$ORIGIN",)
"""Where Windows looks for a library first."""


def read(path: str | os.PathLike[str]) -> SharedLibrary:
    """Read the links and symbols of a library. Raises ``LibraryError``."""
    with mapped(path, _SYSTEM, _BEGINNINGS) as data:
        image = _Image(data)
        return SharedLibrary(tuple(image.imports()), frozenset(image.exports()), frozenset())


def is_binary(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a library or program for Windows."""
    return begins_so(path, _BEGINNINGS)


def linking_of(path: str | os.PathLike[str]) -> Linking:
    """Read the links of a library or program. Raises ``LibraryError`` if it is for another machine, or damaged."""
    with mapped(path, _SYSTEM, _BEGINNINGS) as data:
        image = _Image(data)
        if image.machine != _X86_64:
            raise LibraryError(f"{os.fspath(path)} is not for x86-64: name a llama.cpp that was built for it")
        return Linking(image.name(), tuple(image.imports()), _BESIDE, (), image.identity())


class _Image:
    """A file for 64-bit Windows. Raises ``ValueError`` for anything else, ``struct.error`` if it is truncated.

    Attributes:
        machine: The number of the machine that it is for.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        (start,) = struct.unpack_from("<I", data, 0x3C)
        if data[start : start + 4] != b"PE\0\0":
            raise ValueError("no header of a file for Windows")
        self.machine, n_sections, optional_bytes = struct.unpack_from("<HH12xH", data, start + 4)
        (magic,) = struct.unpack_from("<H", data, start + 24)
        if magic != 0x20B:
            raise ValueError("not for 64-bit machines")
        self._parts = start + 24 + 112
        (self._n_parts,) = struct.unpack_from("<I", data, self._parts - 4)
        table = start + 24 + optional_bytes
        self._sections: list[tuple[int, int, int]] = []
        """Address, bytes and offset in the file of each section."""
        for at in range(table, table + 40 * n_sections, 40):
            size, address, in_file, offset = struct.unpack_from("<IIII", data, at + 8)
            if offset + in_file > len(data):
                raise ValueError("a section ends behind the end of the file")
            self._sections.append((address, max(size, in_file), offset))

    def imports(self) -> Iterator[str]:
        """Yield the names of the libraries that it is linked to."""
        at = self._part(_IMPORTS)[0]
        while at and any(entry := struct.unpack_from("<5I", self._data, at)):
            yield self._text(entry[3])
            at += 20

    def name(self) -> str:
        """Return a library's own name; '' without one."""
        at, _ = self._part(_EXPORTS)
        return self._text(struct.unpack_from("<I", self._data, at + 12)[0]) if at else ""

    def exports(self) -> Iterator[str]:
        """Yield the names of its symbols."""
        at, _ = self._part(_EXPORTS)
        if at:
            count, names = struct.unpack_from("<I4xI", self._data, at + 24)
            for (address,) in struct.iter_unpack("<I", self._bytes(self._offset(names) if count else 0, 4 * count)):
                yield self._text(address)

    def identity(self) -> str:
        """Return the hexadecimal identity that the linker gave it; '' without one."""
        at, size = self._part(_DEBUG)
        for entry in range(at, at + size, 28):
            kind, _, _, offset = struct.unpack_from("<IIII", self._data, entry + 12)
            if kind == _CODEVIEW and self._data[offset : offset + 4] == b"RSDS":
                return self._bytes(offset + 4, 20).hex()
        return ""

    def _part(self, number: int) -> tuple[int, int]:
        """Return offset and bytes of a part; (0, 0) without it."""
        address, size = (
            struct.unpack_from("<II", self._data, self._parts + 8 * number) if number < self._n_parts else (0, 0)
        )
        return (self._offset(address), size) if address else (0, 0)

    def _offset(self, address: int) -> int:
        for begin, size, offset in self._sections:
            if begin <= address < begin + size:
                return offset + address - begin
        raise ValueError("an address of no section")

    def _bytes(self, offset: int, size: int) -> bytes:
        data = self._data[offset : offset + size]
        if len(data) != size:
            raise ValueError("behind the end of the file")
        return data

    def _text(self, address: int) -> str:
        return text_at(self._data, self._offset(address))
