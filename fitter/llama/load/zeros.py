"""GGUF files whose weights are all zero: a header and a sparse file of the right length.

llama.cpp loads them, for real or without allocating, and takes as much memory as for a real model with these tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.storage.files import replacing

Value = bool | int | float | str | Sequence[bool] | Sequence[int]

TENSOR_TYPES = {
    # ggml's number, elements of a block, bytes of a block
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q8_0": (8, 32, 34),
    "q4_K": (12, 256, 144),
    "q6_K": (14, 256, 210),
}

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class ZeroTensor:
    """A tensor. ``shape``: in ggml's order, the row length first. ``type``: one of ``TENSOR_TYPES``."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def bytes(self) -> int:
        """Bytes in the file, without padding."""
        _, elements, size = TENSOR_TYPES[self.type]
        return math.prod(self.shape) // elements * size


def write_zeros(path: Path, metadata: Mapping[str, Value], tensors: Sequence[ZeroTensor]) -> Path:
    """Write a sparse file, all of it or nothing, and return its path. Raises ``OSError``."""
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        number, _, _ = TENSOR_TYPES[tensor.type]
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += _string(tensor.name) + dimensions + struct.pack("<IQ", number, offset)
        offset += _padded(tensor.bytes)
    with replacing(path) as file:
        file.write(header)
        file.truncate(_padded(len(header)) + offset)
    return path


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool | int | float):
        kind, form = _scalar(value, _UINT32)
        return struct.pack(f"<I{form}", kind, value)
    kind, form = _scalar(value[0], _INT32)
    return struct.pack(f"<IIQ{len(value)}{form}", _ARRAY, kind, len(value), *value)


def _scalar(value: bool | int | float, integer: int) -> tuple[int, str]:
    if isinstance(value, bool):
        return _BOOL, "?"
    if isinstance(value, float):
        return _FLOAT32, "f"
    return integer, "I" if integer == _UINT32 else "i"
