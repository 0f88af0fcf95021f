"""Sparse GGUF files with the headers of real models: every tensor described, not a byte of weights written.

A dummy load reads nothing but the header, so llama.cpp plans on such a file exactly as on the real one. The headers are
in ``tests/data/shapes``, whose README says where they are from.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

Value = int | float | bool | str | list[int] | list[bool]

F32 = GGMLQuantizationType.F32
Q8_0 = GGMLQuantizationType.Q8_0
Q4_K = GGMLQuantizationType.Q4_K

ALIGNMENT = 32
DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "shapes"


@dataclass(frozen=True)
class Tensor:
    """One tensor; ``shape`` in ggml's order (the row length first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType = F32

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        block, size = GGML_QUANT_SIZES[self.type]
        if self.shape[0] % block:
            raise ValueError(
                f"{self.name}: rows of {self.shape[0]} are no multiple of {block}, {self.type.name}'s block"
            )
        return int(np.prod(self.shape, dtype=object)) // block * size


@dataclass(frozen=True)
class Shape:
    """A model's header. Keys of ``metadata`` that start with a dot get the architecture before them."""

    architecture: str
    title: str
    n_vocab: int
    pre: str
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...] = field(repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def is_moe(self) -> bool:
        """Whether it is a mixture of experts."""
        return ".expert_count" in self.metadata

    @property
    def n_layer(self) -> int:
        """``<arch>.block_count``."""
        count = self.metadata[".block_count"]
        assert isinstance(count, int)
        return count


def write(shape_name: str, directory: Path, vocab: bool = True) -> Path:
    """Write the shape as one sparse GGUF file into ``directory`` and return its path; a file already there is kept.

    Without ``vocab`` the file says ``no_vocab`` and has no tokens, as in a test of everything but the tokenizer.
    """
    path = directory / (f"{shape_name}.gguf" if vocab else f"{shape_name}-no-vocab.gguf")
    if not path.exists():
        write_shape(SHAPES[shape_name], path, vocab)
    return path


def write_split(shape_name: str, directory: Path, n_files: int, vocab: bool = True) -> Path:
    """Write the shape as llama.cpp's split model of ``n_files`` files, and return the path of the first."""
    shape = SHAPES[shape_name]
    per_file = -(-len(shape.tensors) // n_files)
    parts = [shape.tensors[i * per_file : (i + 1) * per_file] for i in range(n_files)]
    if not all(parts):
        raise ValueError(f"{shape_name} cannot be split into {n_files} files")
    paths = [directory / f"{shape_name}-{i + 1:05d}-of-{n_files:05d}.gguf" for i in range(n_files)]
    for i, (path, part) in enumerate(zip(paths, parts, strict=True)):
        writer = GGUFWriter(None, shape.architecture)
        if i == 0:
            _add_metadata(writer, shape, vocab)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n_files)
        writer.add_int32("split.tensors.count", len(shape.tensors))
        _finish(writer, part, path)
    return paths[0]


def write_shape(shape: Shape, path: Path, vocab: bool = True) -> None:
    """Write ``shape`` as one sparse GGUF file to ``path``."""
    writer = GGUFWriter(None, shape.architecture)
    _add_metadata(writer, shape, vocab)
    _finish(writer, shape.tensors, path)


def _add_metadata(writer: GGUFWriter, shape: Shape, vocab: bool) -> None:
    writer.add_string("general.type", "model")
    writer.add_string("general.name", shape.title)
    for key, value in shape.metadata.items():
        key = shape.architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_uint32(f"{shape.architecture}.vocab_size", shape.n_vocab)
    if vocab:
        add_vocabulary(writer, shape.n_vocab, shape.pre)
    else:
        writer.add_string("tokenizer.ggml.model", "no_vocab")


def _finish(writer: GGUFWriter, tensors: Sequence[Tensor], path: Path) -> None:
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), tensor.bytes, tensor.type)
    # a second pytest process that finds the path must find all of it
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = -(-partial.stat().st_size // ALIGNMENT) * ALIGNMENT
    data = sum(-(-tensor.bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    os.truncate(partial, header + data)
    partial.replace(path)


# ---- vocabulary


def add_vocabulary(writer: GGUFWriter, n_vocab: int, pre: str = "default") -> None:
    """Add a byte-level BPE tokenizer of ``n_vocab`` made-up tokens that llama.cpp accepts."""
    tokens, merges = _vocabulary(n_vocab)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_key_value("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.add_key_value(
        "tokenizer.ggml.token_type", [1] * (n_vocab - 2) + [3, 3], GGUFValueType.ARRAY, GGUFValueType.INT32
    )
    if merges:
        writer.add_key_value("tokenizer.ggml.merges", merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.add_uint32("tokenizer.ggml.bos_token_id", n_vocab - 2)
    writer.add_uint32("tokenizer.ggml.eos_token_id", n_vocab - 1)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)


@functools.cache
def _vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: the 256 bytes, pairs of them, pairs with a third byte, each by a merge, and two specials."""
    letters = _byte_letters()
    tokens, merges = list(letters), []
    for left in _endless(tokens):
        if len(tokens) >= n_vocab - 2:
            break
        for right in letters[: n_vocab - 2 - len(tokens)]:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return [*tokens, "<|begin|>", "<|end|>"], merges


def _endless(tokens: list[str]) -> Iterator[str]:
    index = 0
    while True:
        yield tokens[index]
        index += 1


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2) has for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


# ---- the stored headers


def shape(name: str) -> Shape:
    """Read a shape of ``tests/data/shapes``."""
    stored = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    rows = stored.pop("tensors")
    tensors = tuple(Tensor(tensor, tuple(sizes), GGMLQuantizationType[kind]) for tensor, sizes, kind in rows)
    return Shape(**stored, tensors=tensors)


NAMES = (
    *("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3.1", "kimi-k2"),
    *("glm45-air", "gemma3-12b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-next-80b-a3b", "nemotron-h-9b"),
)
"""The large models; random draws of tests go through them in this order."""

SHAPES: dict[str, Shape] = {name: shape(name) for name in NAMES}
"""Every shape of ``NAMES`` by its name."""
