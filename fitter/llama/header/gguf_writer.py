"""GGUF files without weights: a header and a sparse file of the right length.

llama.cpp loads them, for real or without allocating, and takes as much memory as for a real model with these tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from fitter import system
from fitter.storage import replacing

Value: TypeAlias = "bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]"
"""A value of the metadata; an array has values of one type."""

ALIGNMENT = 32
_VERSION = 3
TENSOR_TYPES = {
    # ggml's number, elements of a block, bytes of a block
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q8_0": (8, 32, 34),
    "q4_K": (12, 256, 144),
    "q6_K": (14, 256, 210),
    "i32": (26, 1, 4),
    "bf16": (30, 1, 2),
    "mxfp4": (39, 32, 17),
}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


class Longs(tuple[int, ...]):
    """Whole numbers of an array that have 64 bits in a file."""


@dataclass(frozen=True)
class Tensor:
    """A tensor. ``shape``: in ggml's order, the row length first. ``type``: one of ``TENSOR_TYPES``."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def bytes(self) -> int:
        """Bytes in the file, without padding."""
        _, elements, size = TENSOR_TYPES[self.type]
        return math.prod(self.shape) // elements * size


def header_of(metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of a header, up to where the data of the tensors begins."""
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [_string(tensor.name), shape, struct.pack("<IQ", TENSOR_TYPES[tensor.type][0], offset)]
        offset += _padded(tensor.bytes)
    header = b"".join(parts)
    return header + bytes(_padded(len(header)) - len(header))


def data_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors in a file, with padding."""
    return sum(_padded(tensor.bytes) for tensor in tensors)


def write(file: IO[bytes], metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> None:
    """Write the header into an open file, and extend the file by the bytes of the data, which stay a hole.

    Raises:
        OSError: The file cannot be written, or not be so long.
    """
    header = header_of(metadata, tensors)
    file.write(header)
    system.extend(file, len(header) + data_bytes(tensors))


def write_file(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> Path:
    """Write a file, all of it or nothing, and return its path.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as file:
        write(file, metadata, tensors)
    return path


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, (bool, int, float)):
        kind, code = _kind(value)
        return struct.pack(f"<I{code}", kind, value)
    if texts := [each for each in value if isinstance(each, str)]:
        return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(map(_string, texts))
    numbers = [each for each in value if not isinstance(each, str)]
    kind, code = (_UINT64, "Q") if isinstance(value, Longs) else _kind(numbers[0])
    if kind == _UINT32:
        # the integers of an array are signed, as the converter writes them
        kind, code = _INT32, "i" if min(numbers) < 0 else "I"
    return struct.pack(f"<IIQ{len(numbers)}{code}", _ARRAY, kind, len(numbers), *numbers)


def _kind(value: bool | int | float) -> tuple[int, str]:
    """Return the number of the type in GGUF, and its code in ``struct``."""
    if isinstance(value, bool):
        return _BOOL, "?"
    if isinstance(value, int):
        return (_INT32, "i") if value < 0 else (_UINT32, "I")
    return _FLOAT32, "f"
