from __future__ import annotations

import struct
from pathlib import Path

import pytest

from fitter.model.files.header_length import LONGEST, Damaged, HeaderLength, TooLong
from tests.support.cases import cases
from tools.models import shapes
from tools.models.tiny import write_tiny


def read(data: bytes, file_bytes: int, first: int) -> tuple[bytes, int]:
    """The header that is read of a file that begins with ``data``, and how many times it was asked."""
    header, asked = HeaderLength(file_bytes), 0
    step = first
    while step:
        at = len(header.data)
        header.add(data[at : at + step])
        step, asked = header.missing, asked + 1
    assert len(header.data) <= 1.1 * len(header.whole) + (1 << 11) or asked == 1
    return header.whole, asked


def ends(path: Path) -> int:
    """Where the tensors of a file begin, by how long it is: a file ends with its last tensor."""
    from gguf import GGUFReader

    return int(GGUFReader(path).data_offset)


@cases(24, 1000, 1 << 14, 1 << 20)
def test_the_header_is_found_with_little_more(first: int, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    data, end = path.read_bytes(), ends(path)
    found, _ = read(data, len(data), first)
    assert found == data[: len(found)]
    assert len(found) == end


def test_a_large_vocabulary_takes_few_questions(tmp_path: Path) -> None:
    path = shapes.write("qwen3-30b-a3b", tmp_path)
    with path.open("rb") as file:
        data = file.read(16 << 20)
    found, asked = read(data, path.stat().st_size, 1 << 14)
    tail = data[len(found) : len(found) + 4096]
    assert not any(tail), "what follows the header was never written"
    assert len(found) - len(found.rstrip(b"\0")) < 64 and asked <= 10


def header(n_tensors: int = 0, n_kv: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_kv) + rest


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def text(length: int) -> bytes:
    return struct.pack("<Q", length)


GIB = 1 << 30
IMPOSSIBLE: dict[str, tuple[bytes, int, type[Exception]]] = {
    "cut off": (header()[:20], 20, Damaged),
    "more keys than bytes": (header(n_kv=1000), 5000, Damaged),
    "more tensors than bytes": (header(n_tensors=1000), 5000, Damaged),
    "a key beyond the file": (header(n_kv=1, rest=text(5000)), 5000, Damaged),
    "a key beyond any header": (header(n_kv=1, rest=text(GIB) + bytes(5)), 100 * GIB, TooLong),
    "a text beyond the file": (header(n_kv=1, rest=key(b"a", 8, text(5000))), 5000, Damaged),
    "a text beyond any header": (header(n_kv=1, rest=key(b"a", 8, text(GIB))), 100 * GIB, TooLong),
    "a type that is none": (header(n_kv=1, rest=key(b"a", 13, b"")), 5000, Damaged),
    "an array of arrays": (header(n_kv=1, rest=key(b"a", 9, struct.pack("<IQ", 9, 1))), 5000, Damaged),
    "an array beyond the file": (header(n_kv=1, rest=key(b"a", 9, struct.pack("<IQ", 4, 5000))), 5000, Damaged),
    "an array beyond headers": (header(n_kv=1, rest=key(b"a", 9, struct.pack("<IQ", 8, LONGEST))), 100 * GIB, TooLong),
    "no alignment": (header(n_kv=1, rest=key(b"general.alignment", 4, struct.pack("<I", 33))), 5000, Damaged),
    "five dimensions": (header(n_tensors=1, rest=text(1) + b"a" + struct.pack("<I", 5)), 5000, Damaged),
}


@cases(IMPOSSIBLE)
def test_what_can_be_no_header_is_not_read(data: bytes, size: int, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        read(data + bytes(4096), size, 4096)
    assert str(caught.value) == ""


def test_a_header_ends_where_its_alignment_says() -> None:
    aligned = key(b"general.alignment", 4, struct.pack("<I", 4096))
    tensor = text(1) + b"a" + struct.pack("<IQIQ", 1, 32, 0, 0)
    data = header(n_tensors=1, n_kv=1, rest=aligned + tensor)
    found, _ = read(data + bytes(8192), 8192, len(data))
    assert len(found) == 4096
