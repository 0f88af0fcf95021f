"""Write objects of Kubernetes as YAML: maps, lists, and scalars as JSON has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def documents(*objects: Mapping[str, Any]) -> str:
    """Write several objects of Kubernetes into one file."""
    return "\n---\n".join("\n".join(_lines(each)) for each in objects)


def escaped(word: str) -> str:
    """Escape an argument of a container, in which Kubernetes takes ``$(NAME)`` for a variable and ``$$`` for ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    entries = value.items() if isinstance(value, Mapping) else [("-", each) for each in value]
    for key, each in entries:
        mark = key if key == "-" else f"{key}:"
        if isinstance(each, str) or not isinstance(each, (Mapping, Sequence)):
            yield f"{mark} {json.dumps(each, ensure_ascii=False)}"
        elif not each:
            yield f"{mark} {'{}' if isinstance(each, Mapping) else '[]'}"
        elif key == "-":
            first, *rest = _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
        else:
            yield mark
            yield from (f"  {line}" for line in _lines(each))
