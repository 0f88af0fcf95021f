"""Twenty architectures with few layers, and every value of their headers at its extremes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.header.gguf_writer import write
from fitter.model.shapes.catalogue import published_shape
from fitter.model.shapes.common import ShapeHeader
from fitter.model.shapes.mapping import header_of
from fitter.model.tensors import layer_of
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny
from tools.models.tiny_kinds import write_hybrid, write_swa, write_vision
from tools.mutated_headers.fields import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, UINT64, Entry, Walk
from tools.mutated_headers.fields import packed as value
from tools.mutated_headers.fields import packed_array as array

_WRITTEN: Mapping[str, Callable[[Path], Path]] = {
    "qwen3moe": lambda path: write_tiny(path, TINY_MOE),
    "qwen3": lambda path: write_tiny(path, TINY_DENSE),
    "gemma3": write_swa,
    "lfm2": write_hybrid,
    "qwen3vl": write_vision,
}
"""Models with a tokenizer, by architecture."""
_SHAPES = {
    "llama": "tinyllama-1.1b",
    "gemma2": "gemma-2-2b",
    "gemma4": "gemma-4-31b",
    "deepseek2": "deepseek-v2-lite",
    "gpt-oss": "gpt-oss-20b",
    "glm4moe": "glm-4.5-air",
    "jamba": "jamba-v0.1",
    "mamba": "mamba-130m",
    "nemotron_h": "nemotron-h-56b",
    "qwen2moe": "qwen1.5-moe-a2.7b",
    "phi3": "phi-3.5-mini",
    "llama4": "llama-4-scout",
    "starcoder2": "starcoder2-7b",
    "stablelm": "stablelm-2-1.6b",
    "qwen35moe": "qwen3.6-35b-a3b",
}
"""Shapes of the catalogue, by architecture."""
_LAYERS = 8
_WHOLE = ("deepseek-v2-lite",)
"""What llama.cpp tells from others by its number of layers."""
_MILLION = 10**6

ARCHITECTURES = (*_WRITTEN, *_SHAPES)

EXTREMES = ("0", "-1", "2^31", "2^32-1", "2^63", "NaN", "infinity", "array", "text")
_NUMBERS = {"0": 0, "2^31": 2**31, "2^32-1": 2**32 - 1, "2^63": 2**63, "-1": -1}


@dataclass(frozen=True)
class Source:
    """A header to change: its bytes, its fields, and the bytes of its tensors' data."""

    architecture: str
    walk: Walk
    data_bytes: int

    @classmethod
    def of(cls, path: Path, architecture: str) -> Source:
        """That of a file."""
        with path.open("rb") as file:
            data = file.read(8 << 20)
        walk = Walk(data)
        return cls(architecture, walk, path.stat().st_size - walk.header_bytes)

    def write(self, path: Path, header: bytes | None = None) -> Path:
        """A file with that header, or with its own, as long as with the data."""
        header = self.walk.data[: self.walk.header_bytes] if header is None else header
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + self.data_bytes)
        return path


@dataclass(frozen=True)
class Mutation:
    """One value of one header that is another: ``key`` without the architecture, and what it is now."""

    architecture: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.architecture}: {self.key} = {self.what}"


def sources(directory: Path, architectures: Sequence[str] = ARCHITECTURES) -> dict[str, Source]:
    """The headers to change, by architecture."""
    found = {}
    for name in architectures:
        path = directory / f"{name}.gguf"
        if name in _WRITTEN:
            _WRITTEN[name](path)
        else:
            made = header_of(published_shape(_SHAPES[name]).config, name)
            made = made if _SHAPES[name] in _WHOLE else _fewer_layers(made)
            with path.open("wb") as file:
                write(file, made.metadata, made.tensors)
        found[name] = Source.of(path, name)
    return found


def _fewer_layers(made: ShapeHeader) -> ShapeHeader:
    """The same with ``_LAYERS`` layers, where it has more and none for multi-token prediction."""
    n_layer = made.number("block_count")
    if n_layer <= _LAYERS or made.number("nextn_predict_layers"):
        return made
    made.tensors = [each for each in made.tensors if (layer_of(each.name) or 0) < _LAYERS]
    for key, each in made.metadata.items():
        if isinstance(each, Sequence) and not isinstance(each, str) and len(each) == n_layer:
            made.metadata[key] = each[:_LAYERS]  # type: ignore[assignment]
    made.key("block_count", _LAYERS)
    return made


def mutations(found: Mapping[str, Source]) -> list[Mutation]:
    """Every value of every header at each of its extremes, the value itself left out."""
    every = []
    for name, source in found.items():
        for entry in source.walk.entries:
            for what in EXTREMES:
                if mutated(source, Mutation(name, entry.key, what)) != source.walk.data[: source.walk.header_bytes]:
                    every.append(Mutation(name, entry.key, what))
    return every


def drawn(found: Mapping[str, Source], count: int, seed: int) -> list[Mutation]:
    """So many of them: those that are known to have been bad, and others that ``seed`` chooses."""
    known = [each for each in KNOWN if each.architecture in found]
    others = [each for each in mutations(found) if each not in known]
    random.Random(seed).shuffle(others)
    return [*known, *others][:count]


def mutated(source: Source, mutation: Mutation) -> bytes:
    """The header with that value."""
    entry = next(each for each in source.walk.entries if each.key == mutation.key)
    return source.walk.replaced(entry, _extreme(source.walk, entry, mutation.what))


def _extreme(walk: Walk, entry: Entry, what: str) -> bytes:
    if what == "text":
        return value(STRING, "many")
    if what == "a million":
        return array(UINT32, [2] * _MILLION)
    if what == "NaN":
        return value(FLOAT32, math.nan)
    if what == "infinity":
        return value(FLOAT32, math.inf)
    if what == "array":
        return array(UINT32, []) if entry.type == ARRAY else array(UINT32, [2**31] * 3)
    number = _NUMBERS.get(what) if what in _NUMBERS else int(float(what))
    assert number is not None
    if entry.type == ARRAY:
        inner, count = int.from_bytes(walk.data[entry.at + 4 : entry.at + 8], "little"), 8
        length = int.from_bytes(walk.data[entry.at + 8 : entry.at + 8 + count], "little")
        kind = _kind_for(inner, number)
        return array(kind, [number] * length) if inner != STRING else array(STRING, [what] * length)
    return value(_kind_for(entry.type, number), number)


def _kind_for(kind: int, number: int) -> int:
    """The type itself where it has that number, so that nothing but the number is wrong."""
    if kind == FLOAT32:
        return kind
    if kind == BOOL and number == 0:
        return kind
    return INT32 if number < 0 else UINT32 if number < 2**32 else UINT64


KNOWN = (
    Mutation("gemma3", "gemma3.block_count", "2^31"),
    Mutation("qwen3", "qwen3.block_count", "2^32-1"),
    Mutation("qwen3moe", "qwen3moe.expert_count", "2^31"),
    Mutation("qwen3", "qwen3.attention.head_count", "a million"),
    Mutation("qwen3", "qwen3.embedding_length", "NaN"),
    Mutation("qwen3moe", "qwen3moe.embedding_length", "infinity"),
    Mutation("qwen3", "qwen3.context_length", "1e8"),
    Mutation("gemma3", "gemma3.context_length", "2^32-1"),
    Mutation("llama", "llama.vocab_size", "15e6"),
)
"""What took all memory, or was a bug, on 2026-11-23."""
