"""The fields of a GGUF header, found in its bytes, so that one of them can be another."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type (``gguf_type``)."""
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
ALIGNMENT = 32


@dataclass(frozen=True)
class Field:
    """A number in a header, or a name: what it is, where, and how many bytes it has."""

    kind: str
    at: int
    size: int


@dataclass(frozen=True)
class Entry:
    """A key with its value: from ``at``, where the number of its type is, to ``end``."""

    key: str
    type: int
    at: int
    end: int


class Walk:
    """The fields and the entries of a header that begins with ``data``."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24
        self.fields = [Field("count", 8, 8), Field("count", 16, 8), Field("version", 4, 4)]
        self.entries: list[Entry] = []
        n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
        for _ in range(n_kv):
            key = self.string("key length", "key")
            begin = self.at
            kind = self.number("type", 4)
            self.value(kind)
            self.entries.append(Entry(key, kind, begin, self.at))
        for _ in range(n_tensors):
            self.string("name length", "name")
            for _ in range(self.number("dimensions", 4)):
                self.number("dimension", 8)
            self.number("tensor type", 4)
            self.number("offset", 8)

    @property
    def header_bytes(self) -> int:
        """Where the data of the tensors begins."""
        return self.at + -self.at % ALIGNMENT

    def number(self, kind: str, size: int) -> int:
        """Step over a number, and return it."""
        self.fields.append(Field(kind, self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def string(self, kind: str, text: str = "") -> str:
        """Step over a string, and return it; ``kind`` is that of its length."""
        length = self.number(kind, 8)
        if text:
            self.fields.append(Field(text, self.at, length))
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> None:
        """Step over a value of a type."""
        if kind == STRING:
            self.string("length")
        elif kind == ARRAY:
            inner, count = self.number("type", 4), self.number("count", 8)
            for _ in range(count if inner == STRING else 0):
                self.string("length")
            self.at += 0 if inner == STRING else count * SIZES[inner]
        else:
            self.at += SIZES[kind]

    def replaced(self, entry: Entry, value: bytes) -> bytes:
        """The header with another value, ``packed``, of one entry."""
        data = self.data[: entry.at] + value + self.data[entry.end : self.at]
        return data + bytes(-len(data) % ALIGNMENT)


def packed(kind: int, value: float | str) -> bytes:
    """A value of a type, with the number of the type before it."""
    return struct.pack("<I", kind) + _bytes(kind, value)


def packed_array(kind: int, values: list[float] | list[int] | list[str]) -> bytes:
    """An array with elements of a type."""
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + b"".join(_bytes(kind, each) for each in values)


_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _bytes(kind: int, value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<Q", len(value.encode())) + value.encode()
    return struct.pack(f"<{_CODES[kind]}", value)
