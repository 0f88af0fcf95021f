"""Reading a shared library: the libraries that it is linked to, and the symbols that it needs and defines."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from fitter.errors import LibraryError

_DYNAMIC, _DYNSYM = 6, 11
_NEEDED = 1


@dataclass(frozen=True)
class SharedLibrary:
    """``needed``: names of the libraries it is linked to, in order. ``defined`` and ``undefined``: its symbols."""

    needed: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read(path: str | os.PathLike[str]) -> SharedLibrary:
    """Read a 64-bit little-endian ELF library. Raises ``LibraryError`` for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        return _parse(data)
    except OSError as error:
        raise LibraryError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError) as error:
        raise LibraryError(f"{os.fspath(path)} is not a shared library for 64-bit Linux: use another one") from error


def _parse(data: bytes) -> SharedLibrary:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # type, offset, size, linked section
    sections = [struct.unpack_from("<4xI16xQQI", data, start + i * size) for i in range(count)]
    needed: list[str] = []
    defined: set[str] = set()
    undefined: set[str] = set()
    for kind, offset, length, link in sections:
        if kind == _DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length]):
                if tag == _NEEDED:
                    needed.append(_string(data, sections[link][1] + value))
        elif kind == _DYNSYM:
            for name, section in struct.iter_unpack("<I2xH16x", data[offset : offset + length]):
                if name:
                    (defined if section else undefined).add(_string(data, sections[link][1] + name))
    return SharedLibrary(tuple(needed), frozenset(defined), frozenset(undefined))


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
