"""Arguments as ik_llama.cpp parses them, by the list of its options in ``tests/data/ik_llama``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

LIST = Path(__file__).parent.parent / "data" / "ik_llama" / "options.txt"

_NUMBER = r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?"
_KINDS = {
    "text": r"(?s:.*)",
    "int": r"[-+]?\d+",
    "float": _NUMBER,
    "floats": rf"{_NUMBER}([,/]+{_NUMBER}){{0,14}}",
    "pairs": r"-?\d+,-?\d+(,-?\d+,-?\d+)*",
    "devices": r"[^- ,]+(,[^- ,]+)*",
    "overrides": r"[^,=]+=(CPU|(CUDA|ROCm|Vulkan)\d+)(,[^,=]+=(CPU|(CUDA|ROCm|Vulkan)\d+))*",
    "cache": r"f32|f16|bf16|q8_0|q4_0|q4_1|iq4_nl|q5_0|q5_1|q6_0|q8_KV",
}


def options() -> dict[str, str | None]:
    """The regular expression of every option's value by its names, ``None`` for a flag."""
    found: dict[str, str | None] = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("-"):
            names, _, kind = line.partition(": ")
            found.update(dict.fromkeys(names.split(), _KINDS.get(kind, kind) if kind else None))
    return found


def parse(words: Sequence[str]) -> dict[str, str]:
    """The value of every option, empty for a flag. Fails where the fork would refuse a word."""
    known = options()
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        assert word in known, f"ik_llama.cpp has no option {word}"
        assert word not in found, f"{word} is there twice"
        kind = known[word]
        found[word] = "" if kind is None else next(rest)
        assert kind is None or re.fullmatch(kind, found[word]), f"{word} takes no {found[word]!r}"
    return found
