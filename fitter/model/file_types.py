"""File types of llama-quantize: what is published of them, and the next smaller one."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fitter.llama.types import TensorInfo
from fitter.model.shapes.catalogue import wanted
from fitter.storage.files import read_data


class SmallerType(NamedTuple):
    """The next smaller file type of a model.

    Attributes:
        name: Its name.
        share: About the share of the weights' bytes that it keeps.
        arguments: The options that name a model without a file in that type; empty for the path of a file.
    """

    name: str
    share: float
    arguments: tuple[str, ...] = ()


@functools.cache
def data() -> Mapping[str, Any]:
    """Return the published facts about file types."""
    return read_data(__file__, "file_types.toml")


def source_type(tensors: Sequence[TensorInfo]) -> str:
    """Return the type of most weights."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else ""


def least_share(architecture: str, bits_per_weight: float) -> float:
    """Return about the share of its bytes that a model keeps in the smallest type that ``smaller_type`` may name."""
    least = min(each["bits"] for each in data()["smaller"].values())
    return 1.0 if architecture in data()["published"] else min(1.0, least / max(least, bits_per_weight))


def smaller_type(called: str, architecture: str, own_type: str, bits_per_weight: float) -> SmallerType | None:
    """Return the next smaller file type; ``None`` for models that are published quantized, or already small.

    Args:
        called: The path or address of the model.
        own_type: The type of most of its weights.
    """
    if architecture in data()["published"]:
        return None
    types = data()["smaller"]
    own_bits = next((each["bits"] for each in types.values() if each["type"] == own_type.lower()), bits_per_weight)
    for name, each in types.items():
        if each["bits"] < own_bits:
            shape = wanted(called)
            words = () if shape is None else (f"--{shape.scheme}", f"{shape.name}:{name}")
            return SmallerType(name, each["bits"] / own_bits, words)
    return None
