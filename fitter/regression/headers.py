"""Identity of a model in a lock: a digest of its headers, and the type of every tensor. No weights are read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from fitter.errors import ModelError
from fitter.llama.types import TensorInfo
from fitter.model.files.source import show
from fitter.model.tensors import split_name
from fitter.text import printable

_ANY = "*"
"""Stands for the number of the layer."""
_MOST_LAYERS = 4096


def digest(files: Sequence[Path], header_bytes: Sequence[int]) -> str:
    """Compute a digest of the first ``header_bytes`` of each file. Raises ``ModelError`` if a file cannot be read."""
    total = hashlib.sha256()
    for path, size in zip(files, header_bytes, strict=True):
        try:
            with path.open("rb") as file:
                total.update(file.read(size))
        except OSError as error:
            raise ModelError(f"{show(path)} cannot be read: {error.strerror}") from None
    return f"sha256:{total.hexdigest()}"


def summarize(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Sum up types of tensors by name, with ``*`` for the layer: ``q4_K``, or ``q4_K 0-2,4-31; q8_0 3`` by layer.

    The names are made printable, since they are only compared and shown.
    """
    types: dict[str, list[tuple[int | None, str]]] = {}
    for tensor in tensors:
        name = printable(tensor.name)
        stack, layer, rest = split_name(name)
        key = name if layer is None else f"{stack}blk.{_ANY}.{rest}"
        types.setdefault(key, []).append((layer, tensor.type))
    return {key: _types(types[key]) for key in sorted(types)}


def expand(summary: Mapping[str, str]) -> dict[str, str]:
    """Read the type of every tensor by its name, from what ``summarize`` wrote; anything else is ignored."""
    tensors = {}
    for key, text in summary.items():
        for part in text.split("; "):
            kind, _, layers = part.partition(" ")
            if not layers:
                tensors[key] = kind
            for first, last in re.findall(r"([0-9]+)(?:-([0-9]+))?", layers):
                for layer in range(int(first), min(int(last or first), _MOST_LAYERS) + 1):
                    tensors[key.replace(_ANY, str(layer), 1)] = kind
    return tensors


def _types(tensors: Iterable[tuple[int | None, str]]) -> str:
    by_type: dict[str, list[int]] = {}
    for layer, kind in tensors:
        by_type.setdefault(kind, []).extend([] if layer is None else [layer])
    return "; ".join(f"{kind} {_ranges(by_type[kind])}".rstrip() for kind in sorted(by_type))


def _ranges(numbers: Iterable[int]) -> str:
    """``0-2,4`` for 0, 1, 2 and 4."""
    ranges = []
    # Consecutive numbers all have the same distance from their position in the list.
    for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        consecutive = [number for _, number in run]
        ranges.append(str(consecutive[0]) if len(consecutive) == 1 else f"{consecutive[0]}-{consecutive[-1]}")
    return ",".join(ranges)
