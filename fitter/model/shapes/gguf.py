"""GGUF files without weights: a header, and the length that the file would have."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeAlias

Value: TypeAlias = "bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float]"
"""A value of the metadata, or the values of an array of them."""

ALIGNMENT = 32
_VERSION = 3
_TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "mxfp4": (39, 32, 17)}
"""By type of a tensor: its number in ggml, and how many values are in how many bytes."""
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Tensor:
    """One tensor. ``shape``: in ggml's order, the length of a row first."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def bytes(self) -> int:
        """Bytes of its data, without padding."""
        _, values, size = _TYPES[self.type]
        return math.prod(self.shape) // values * size


def header_of(metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> bytes:
    """The header of a file with these, up to where the tensors' data begins."""
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [_string(tensor.name), shape, struct.pack("<IQ", _TYPES[tensor.type][0], offset)]
        offset += _padded(tensor.bytes)
    header = b"".join(parts)
    return header + bytes(_padded(len(header)) - len(header))


def data_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors in a file, with padding."""
    return sum(_padded(tensor.bytes) for tensor in tensors)


def write(file: IO[bytes], metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> None:
    """Write the header, and let the file be as long as with the data, which is never written. Raises ``OSError``."""
    header = header_of(metadata, tensors)
    file.write(header)
    file.truncate(len(header) + data_bytes(tensors))


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
    kind, code = _kind(value[0])
    return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, kind if kind != _UINT32 else _INT32, len(value), *value)


def _kind(value: bool | int | float) -> tuple[int, str]:
    """Number of the type in GGUF, and its code in ``struct``."""
    if isinstance(value, bool):
        return _BOOL, "?"
    if isinstance(value, int):
        return (_INT32, "i") if value < 0 else (_UINT32, "I")
    return _FLOAT32, "f"
