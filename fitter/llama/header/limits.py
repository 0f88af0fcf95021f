"""llama.cpp's own limits for the values of a header, checked before a load.

``header_limits.json`` has the limits, each with its place in llama.cpp. A load may still refuse values within them, but
never accepts values outside.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fitter.llama.types import Array, MetadataValue
from fitter.text import printable

_MOST = 2**32 - 1
"""The largest ``uint32_t``, the type of most values."""
MOST_WORDS = 1 << 23
"""llama.cpp creates all words of a vocabulary without texts before it reads a tensor. No published model has as many:
Gemma 3 has 262,208."""
_LONGEST = 60
"""Most characters of a text to show."""


class Limit(NamedTuple):
    """The limit of a key.

    Attributes:
        key: The key; with a dot in front it follows the architecture.
        kind: Type of the value.
        least: The least value.
        most: The largest value; another key, or ``tensors`` for the number in the file.
        list: Most elements of an array.
        why: Its place in llama.cpp.
    """

    key: str
    kind: str
    why: str
    least: int = 0
    most: int | str = _MOST
    list: int = 0


@functools.cache
def limits() -> tuple[Limit, ...]:
    """Read all limits."""
    with Path(__file__).with_suffix(".json").open(encoding="utf-8") as file:
        return tuple(Limit(**each) for each in json.load(file)["limits"])


def most(key: str) -> int:
    """Return the largest whole number that llama.cpp accepts for a key."""
    largest = next(limit.most for limit in limits() if limit.key == key)
    assert isinstance(largest, int)
    return largest


def problem(metadata: Mapping[str, MetadataValue], n_tensors: int) -> str:
    """Describe the first value that llama.cpp does not accept; empty if it accepts all."""
    architecture = metadata.get("general.architecture")
    for limit in limits():
        key = f"{architecture}{limit.key}" if limit.key.startswith(".") else limit.key
        value = metadata.get(key)
        if value is None:
            continue
        most = n_tensors if limit.most == "tensors" else limit.most
        if isinstance(most, str):
            other = metadata.get(f"{architecture}{most}", 0)
            most = other if isinstance(other, int) else 0
        if not _is_taken(value, limit, most):
            return f"has {printable(key)} {_value_text(value)}: llama.cpp takes {_words(limit, most)}"
    return ""


def _is_taken(value: MetadataValue, limit: Limit, most: int) -> bool:
    if isinstance(value, Array):
        return value.length <= limit.list
    if limit.kind == "flag":
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and limit.least <= value <= most


def _value_text(value: MetadataValue) -> str:
    if isinstance(value, Array):
        return f"with {value.length} values"
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{printable(value, _LONGEST)}'" if isinstance(value, str) else str(value)


def _words(limit: Limit, most: int) -> str:
    if limit.kind == "flag":
        return "true or false"
    range_ = f"a whole number from {limit.least} to {most}"
    return f"{range_}, or up to {limit.list} of them" if limit.list else range_
