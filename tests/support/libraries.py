"""Small ELF files that say what the tests want, and hold no code."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
OTHER = "aarch64" if os.uname().machine == "x86_64" else "x86_64"

_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29


def write(
    path: Path,
    *,
    name: str | None = None,
    needed: Sequence[str] = (),
    runpath: str = "",
    rpath: str = "",
    defined: Sequence[str] = (),
    build_id: str = "",
    machine: str = os.uname().machine,
    bits: int = 64,
    code: int = 0,
) -> Path:
    """Write a library, or a program where ``name`` is ''; by default it calls itself what the file is called.

    ``code``: bytes of memory that nothing here reads.
    """
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        strings.extend(value.encode() + b"\0")
        return len(strings) - len(value.encode()) - 1

    tags = [(_NEEDED, text(each)) for each in needed]
    soname = path.name if name is None else name
    tags += [(tag, text(value)) for tag, value in ((_SONAME, soname), (_RUNPATH, runpath), (_RPATH, rpath)) if value]
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += b"".join(struct.pack("<IBBHQQ", text(each), 18, 0, 1, 0, 0) for each in defined)
    note = struct.pack("<III", 4, len(build_id) // 2, 3) + b"GNU\0" + bytes.fromhex(build_id) if build_id else b""
    n_tags = len(tags) + 3
    base = 64 + 3 * 56
    at_dynamic = base + len(note) + -len(note) % 8
    at_symbols = at_dynamic + 16 * n_tags
    at_strings = at_symbols + len(symbols)
    tags += [(_STRTAB, at_strings), (_STRSZ, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    at_sections = at_strings + len(strings) + code
    # type, offset, size, linked section
    sections = [(0, 0, 0, 0), (3, at_strings, len(strings), 0), (11, at_symbols, len(symbols), 1)]
    sections.append((6, at_dynamic, len(dynamic), 1))
    segments = [(1, 0, at_sections), (2, at_dynamic, len(dynamic)), (4, base, len(note))]
    header = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH",
        *(b"\x7fELF", bits // 32, 1, 1, 0, 3, MACHINES.get(machine, 0), 1, 0, 64, at_sections, 0, 64, 56, 3, 64),
        *(len(sections), 0),
    )
    data = header + b"".join(struct.pack("<IIQQQQQQ", kind, 4, at, at, at, n, n, 8) for kind, at, n in segments)
    data += note.ljust(at_dynamic - base, b"\0") + dynamic + symbols + bytes(strings) + bytes(code)
    data += b"".join(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, n, link, 0, 8, 0) for kind, at, n, link in sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755)
    return path
