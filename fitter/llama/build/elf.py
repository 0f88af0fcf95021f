"""Read libraries and programs without loading them: their links, build ids and symbols.

ELF files are those of Linux; ``macho`` and ``pe`` read the others with the same names.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from fitter.errors import LibraryError

_DYNAMIC, _DYNSYM = 6, 11
_LOAD_SEGMENT, _DYNAMIC_SEGMENT, _NOTE_SEGMENT = 1, 2, 4
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_BUILD_ID = 3
_MOST = 1 << 24
"""Limit for the bytes of a part of a file."""

_MACHINES = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64", 21: "ppc64le"}
"""Python's names for the machines of ELF's ``e_machine``."""


class SharedLibrary(NamedTuple):
    """A library: names of the libraries it is linked to, in order, and its symbols."""

    needed: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


class Linking(NamedTuple):
    """The parts of a file that the dynamic linker reads.

    Attributes:
        name: Its own name; '' for a program.
        needed: Names of the libraries it is linked to.
        rpath: Directories to search before ``LD_LIBRARY_PATH``, as written.
        runpath: Directories to search after it.
        build_id: Hexadecimal; '' without one.
    """

    name: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    build_id: str


def read(path: str | os.PathLike[str]) -> SharedLibrary:
    """Read a 64-bit little-endian ELF library. Raises ``LibraryError`` for anything else."""
    try:
        # the symbols are a small part of a file with CUDA kernels
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except OSError as error:
        raise LibraryError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise LibraryError(f"{os.fspath(path)} is not a shared library for 64-bit Linux: use another one") from error


def is_binary(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a library or program for Linux."""
    return begins_so(path, (b"\x7fELF",))


def linking_of(path: str | os.PathLike[str]) -> Linking:
    """Read the links of a library or program.

    Raises ``LibraryError`` if it is for another machine, or truncated.
    """
    with _opened(path) as file:
        return _linking(_Reader(file.fileno()), os.fspath(path))


class _Reader:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def at(self, offset: int, size: int) -> bytes:
        """Read bytes. Raises ``ValueError`` if the file does not have them."""
        if size > _MOST or offset + size > self.size:
            raise ValueError("behind the end of the file")
        os.lseek(self.descriptor, offset, os.SEEK_SET)
        data = os.read(self.descriptor, size)
        if len(data) != size:
            raise ValueError("the file has become shorter")
        return data


def _linking(file: _Reader, path: str) -> Linking:
    header = file.at(0, min(64, file.size))
    if header[:4] != b"\x7fELF":
        raise LibraryError(f"{path} is not a library or a program for Linux: name another one")
    if len(header) < 64:
        raise ValueError("the header is not all there")
    _check_machine(header, path)
    (start,) = struct.unpack_from("<Q", header, 0x20)
    size, count = struct.unpack_from("<HH", header, 0x36)
    table = file.at(start, size * count)
    # type, offset, address, size in the file
    segments = [struct.unpack_from("<I4xQQ8xQ", table, i * size) for i in range(count)]
    if any(offset + length > file.size for kind, offset, _, length in segments if kind == _LOAD_SEGMENT):
        raise ValueError("a segment ends behind the end of the file")
    names: dict[int, list[int]] = {tag: [] for tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH)}
    strings, length = 0, 0
    for kind, offset, _, in_file in segments:
        if kind == _DYNAMIC_SEGMENT:
            data = file.at(offset, in_file - in_file % 16)
            for tag, value in struct.iter_unpack("<QQ", data):
                if tag == 0:
                    break
                if tag in names:
                    names[tag].append(value)
                strings, length = (value if tag == _STRTAB else strings), (value if tag == _STRSZ else length)
    table = file.at(_offset(strings, segments), length) if length else b""
    texts = {tag: [text_at(table, value) for value in values] for tag, values in names.items()}
    return Linking(
        next(iter(texts[_SONAME]), ""),
        tuple(texts[_NEEDED]),
        _directories(texts[_RPATH]),
        _directories(texts[_RUNPATH]),
        _build_id(file, segments),
    )


def _check_machine(header: bytes, path: str) -> None:
    own = platform.machine()
    if header[4] != 2:
        raise LibraryError(f"{path} is for 32-bit machines: name a llama.cpp that was built for {own}")
    if header[5] != 1:
        raise LibraryError(f"{path} is for big-endian machines: name a llama.cpp that was built for {own}")
    (number,) = struct.unpack_from("<H", header, 0x12)
    machine = _MACHINES.get(number, f"another machine (number {number})")
    if machine != own:
        raise LibraryError(f"{path} is for {machine}, this machine is {own}: name a llama.cpp that was built for it")


def _offset(address: int, segments: list[tuple[int, ...]]) -> int:
    """Return the offset in the file of the memory at ``address``."""
    for kind, offset, begin, length in segments:
        if kind == _LOAD_SEGMENT and begin <= address < begin + length:
            return offset + address - begin
    raise ValueError("an address of no segment")


def _directories(texts: list[str]) -> tuple[str, ...]:
    return tuple(place for text in texts for place in text.split(":") if place)


def _build_id(file: _Reader, segments: list[tuple[int, ...]]) -> str:
    for kind, offset, _, length in segments:
        if kind == _NOTE_SEGMENT:
            for owner, number, text in _notes(file.at(offset, length)):
                if owner == b"GNU\0" and number == _BUILD_ID:
                    return text.hex()
    return ""


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the notes of a segment: owner, type and text. Notes aligned to 8 bytes also start at multiples of 4."""
    at = 0
    while at + 12 <= len(data):
        owner, length, number = struct.unpack_from("<III", data, at)
        text = at + 12 + -(-owner // 4) * 4
        yield data[at + 12 : at + 12 + owner], number, data[text : text + length]
        at = text + -(-length // 4) * 4


def _parse(data: mmap.mmap) -> SharedLibrary:
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
                    needed.append(text_at(data, sections[link][1] + value))
        elif kind == _DYNSYM:
            for name, section in struct.iter_unpack("<I2xH16x", data[offset : offset + length]):
                if name:
                    (defined if section else undefined).add(text_at(data, sections[link][1] + name))
    return SharedLibrary(tuple(needed), frozenset(defined), frozenset(undefined))


@contextmanager
def mapped(path: str | os.PathLike[str], system: str, beginnings: tuple[bytes, ...]) -> Iterator[mmap.mmap]:
    """Yield the bytes of a file that begins like a library or program for ``system``.

    Raises ``LibraryError`` for any other file, and if the block finds it damaged.
    """
    with _opened(path) as file:
        if file.read(4)[: len(beginnings[0])] not in beginnings:
            raise LibraryError(f"{os.fspath(path)} is not a library or a program for {system}: name another one")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a library or program. Raises ``LibraryError`` if it cannot be read, or the block finds it damaged."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise LibraryError(f"{name} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise LibraryError(f"{name} is damaged or not all there: download or build it again") from error


def begins_so(path: str | os.PathLike[str], beginnings: tuple[bytes, ...]) -> bool:
    """Return whether a file begins with one of ``beginnings``, which are equally long."""
    try:
        with open(path, "rb") as file:
            return file.read(len(beginnings[0])) in beginnings
    except OSError:
        return False


def text_at(data: bytes | mmap.mmap, start: int) -> str:
    """Return the text that ends with a NUL. Raises ``ValueError`` without one."""
    end = data.find(b"\0", start)
    if start < 0 or end < 0:
        raise ValueError("a name without an end")
    return data[start:end].decode("utf-8", "surrogateescape")
