"""Find the length of a GGUF header from its beginning, to fetch no more of a remote file.

ggml reads the complete header later; this only refuses impossible headers early.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

LONGEST = 64 << 20
"""Most bytes of a header; the largest vocabularies have 15 MiB."""

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type (``gguf_type``)."""
_NO_NUMBERS = (6, 7, 12)
"""Types without whole numbers: ``float``, ``bool``, ``double``."""

_MOST_DIMENSIONS = 4
_LEAST_KEY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8
_USUAL_KEY, _USUAL_STRING, _USUAL_TENSOR = 40, 10, 72
"""Expected bytes of an unread key, string or tensor."""
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 16
_LEAST_STEP = 1 << 10
_SLACK = 5
"""Share to read beyond the expected length (one part in 32): another request takes longer."""
_MOST_AT_ONCE = 1 << 23
"""Most bytes of one request; two requests are in memory beside the header."""
_FREELY = 1 << 17
"""Bytes that are read at once though little is known; later up to eight times the bytes at hand."""


class Damaged(ValueError):
    """The bytes cannot begin a header that fits into its file."""


class TooLong(ValueError):
    """The header is longer than ``LONGEST``."""


class HeaderLength:
    """Parses the beginning of a file.

    Attributes:
        data: The beginning.
        missing: Bytes to read next; 0 if the header is complete (``whole``).
        split_count: Number of the model's files, by this one.
    """

    def __init__(self, file_bytes: int) -> None:
        self.data = bytearray()
        self.missing = 0
        self.split_count = 1
        self._file_bytes = file_bytes
        self._at = 0
        self._alignment = _ALIGNMENT
        self._least = 0
        self._expected = 0
        self._steps = self._header()

    def add(self, data: bytes) -> None:
        """Add the next bytes of the file. Raises ``Damaged`` and ``TooLong``."""
        self.data += data
        if len(self.data) < self._least:
            self.missing = self._bytes_wanted()
            return
        self.missing = self._bytes_wanted() if next(self._steps, None) else 0

    @property
    def whole(self) -> bytes:
        """The header, without bytes beyond it."""
        with memoryview(self.data) as data:
            return bytes(data[: self._at])

    @property
    def expected(self) -> int:
        """Expected bytes of the header."""
        return max(len(self.data), min(self._expected, self._file_bytes))

    def _bytes_wanted(self) -> int:
        have = len(self.data)
        more = self._expected - have + max(_LEAST_STEP, have >> _SLACK)
        wanted = max(self._least - have, min(more, max(_FREELY, 8 * have), LONGEST - have))
        return min(wanted, _MOST_AT_ONCE, self._file_bytes - have)

    def _need(self, size: int, then: float = 0) -> Iterator[bool]:
        """Wait for ``size`` more bytes, after which ``then`` more are expected."""
        self._least = self._at + size
        if self._least > self._file_bytes:
            raise Damaged
        if self._least > LONGEST:
            raise TooLong
        self._expected = self._least + int(then)
        while len(self.data) < self._least:
            yield True

    def _check(self, count: int, size: int) -> None:
        """Raise if ``count`` things of at least ``size`` bytes do not fit into the file, or into any header."""
        if self._at + count * size > self._file_bytes:
            raise Damaged
        if self._at + count * size > LONGEST:
            raise TooLong

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def _header(self) -> Iterator[bool]:
        yield from self._need(24)
        self._at = 8
        n_tensors, n_kv = self._number("<Q"), self._number("<Q")
        self._check(n_kv, _LEAST_KEY)
        self._check(n_tensors, _LEAST_TENSOR)
        tensors = n_tensors * _USUAL_TENSOR
        for left in range(n_kv - 1, -1, -1):
            yield from self._key(left * _USUAL_KEY + tensors)
        begun = self._at
        for read in range(n_tensors):
            usual = (self._at - begun) / read if read else _USUAL_TENSOR
            yield from self._tensor((n_tensors - read - 1) * usual)
        padding = -self._at % self._alignment if n_tensors and self._alignment <= _MOST_ALIGNMENT else 0
        yield from self._need(min(padding, self._file_bytes - self._at))
        self._at = self._least

    def _key(self, then: float) -> Iterator[bool]:
        yield from self._need(8 + 1 + 4, then)
        length = self._number("<Q")
        yield from self._need(length + 4, then)
        key = bytes(self.data[self._at : self._at + length])
        self._at += length
        kind = self._number("<I")
        if kind == _ARRAY:
            yield from self._array(then)
        elif kind == _STRING:
            yield from self._strings(1, then)
        elif kind in _SIZES:
            yield from self._need(_SIZES[kind], then)
            if key == b"general.alignment" and _SIZES[kind] == 4:
                (self._alignment,) = struct.unpack_from("<I", self.data, self._at)
                if self._alignment == 0 or self._alignment & (self._alignment - 1):
                    raise Damaged
            if key == b"split.count" and kind not in _NO_NUMBERS:
                self.split_count = int.from_bytes(self.data[self._at : self._at + _SIZES[kind]], "little")
            self._at += _SIZES[kind]
        else:
            raise Damaged

    def _array(self, then: float) -> Iterator[bool]:
        yield from self._need(12, then)
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            self._check(count, 8)
            yield from self._strings(count, then)
        elif kind in _SIZES:
            self._check(count, _SIZES[kind])
            yield from self._need(count * _SIZES[kind], then)
            self._at += count * _SIZES[kind]
        else:
            raise Damaged

    def _strings(self, count: int, then: float) -> Iterator[bool]:
        # There are some hundred thousand of them.
        begun, data, length_at = self._at, self.data, struct.Struct("<Q").unpack_from
        at, have = begun, len(data)
        for read in range(count):
            if have < at + 8:
                self._at = at
                usual = (at - begun) / read if read else _USUAL_STRING
                yield from self._need(8, (count - read) * usual + then)
                have = len(data)
            at += 8 + length_at(data, at)[0]
        self._at = at
        yield from self._need(0, then)

    def _tensor(self, then: float) -> Iterator[bool]:
        yield from self._need(8 + 1 + 4, then)
        length = self._number("<Q")
        yield from self._need(length + 4, then)
        self._at += length
        n_dims = self._number("<I")
        if n_dims > _MOST_DIMENSIONS:
            raise Damaged
        yield from self._need(8 * n_dims + 4 + 8, then)
        self._at += 8 * n_dims + 12
