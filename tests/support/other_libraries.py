"""Small libraries for Windows and for macOS, written by hand: enough for what reads links and symbols."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

_HEADERS = 0x200
_ADDRESS = 0x1000
"""Of the only section of a file for Windows, whose bytes begin behind the headers."""


class _Bytes:
    """Bytes that are appended; what is appended begins at the address that is returned."""

    def __init__(self, start: int) -> None:
        self.data, self._start = b"", start

    def add(self, data: bytes) -> int:
        self.data += data
        return self._start + len(self.data) - len(data)

    def text(self, text: str) -> int:
        return self.add(text.encode() + b"\0")


def write_for_windows(
    path: Path, needed: Sequence[str], defined: Sequence[str], identity: bytes = b"", machine: int = 0x8664
) -> Path:
    """Write a DLL of that name. ``identity`` has 20 bytes, or none."""
    section = _Bytes(_ADDRESS)
    names = [section.text(name) for name in needed]
    imports = section.add(b"".join(struct.pack("<5I", 0, 0, 0, name, 0) for name in names) + bytes(20))
    table = section.add(struct.pack(f"<{len(defined)}I", *[section.text(name) for name in sorted(defined)]))
    own = section.text(path.name)
    exports = section.add(struct.pack("<3I", 0, 0, 0) + struct.pack("<7I", own, 1, 0, len(defined), 0, table, 0))
    codeview = section.add(b"RSDS" + identity)
    debug = section.add(struct.pack("<7I", 0, 0, 0, 2, 4 + len(identity), codeview, codeview - _ADDRESS + _HEADERS))
    parts = [(exports, 40), (imports, 20), *[(0, 0)] * 4, (debug, 28 if identity else 0), *[(0, 0)] * 9]
    optional = struct.pack("<H", 0x20B) + bytes(106) + struct.pack("<I", len(parts))
    optional += b"".join(struct.pack("<II", *part) for part in parts)
    header = b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0"
    header += struct.pack("<HH12xHH", machine, 1, len(optional), 0) + optional
    size = len(section.data)
    header += struct.pack("<8sIIII16x", b".data", size, _ADDRESS, size, _HEADERS)
    path.write_bytes(header.ljust(_HEADERS, b"\0") + section.data)
    return path


def write_for_macos(
    path: Path,
    needed: Sequence[str],
    defined: Sequence[str],
    undefined: Sequence[str] = (),
    places: Sequence[str] = (),
    identity: bytes = bytes(16),
    machine: int = 0x0100_000C,
) -> Path:
    """Write a dylib of that name. ``identity`` has 16 bytes."""

    def named(kind: int, text: str, before: int = 0) -> bytes:
        size = (12 + before + len(text) + 8) // 8 * 8
        return (struct.pack("<III", kind, size, 12 + before) + bytes(before) + text.encode()).ljust(size, b"\0")

    commands = [named(0xD, f"@rpath/{path.name}", 12), *(named(0xC, name, 12) for name in needed)]
    commands += [named(0x8000_001C, place) for place in places] + [struct.pack("<II", 0x1B, 24) + identity]
    size = sum(map(len, commands)) + 24
    texts, table = _Bytes(0), b""
    texts.text("")
    for names, kind in ((defined, 0x0F), (undefined, 0x01)):
        table += b"".join(struct.pack("<IBBHQ", texts.text(f"_{name}"), kind, 0, 0, 0) for name in names)
    start = 32 + size
    commands.append(struct.pack("<6I", 2, 24, start, len(table) // 16, start + len(table), len(texts.data)))
    header = struct.pack("<8I", 0xFEED_FACF, machine, 0, 6, len(commands), size, 0, 0)
    path.write_bytes(header + b"".join(commands) + table + texts.data)
    return path
