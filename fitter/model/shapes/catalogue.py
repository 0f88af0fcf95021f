"""The catalogue of models without a file: published hyperparameters with their source, one small file each."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.storage.files import parse_toml
from fitter.text import printable

_FOLDER = Path(__file__).with_name("catalogue")


@dataclass(frozen=True)
class Published:
    """The published facts of a model. ``config``: hyperparameters by their names in its ``config.json``."""

    name: str
    title: str
    source: str
    config: Mapping[str, Any]


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all shapes."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def spelt_so(text: str) -> str:
    """Return the one shape with these letters and digits (``llama3.1:8b`` is llama-3.1-8b); empty if there is none."""
    wanted = re.sub("[^a-z0-9]", "", text.lower()[:100])
    found = [name for name in names() if re.sub("[^a-z0-9]", "", name) == wanted]
    return found[0] if len(found) == 1 else ""


def similar(name: str, cutoff: float = 0.7) -> str:
    """Return ``did you mean NAME?`` with the shapes most similar to ``name``; empty if none is."""
    close = difflib.get_close_matches(name.strip().lower()[:100], names(), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else ""


def published(name: str) -> Published:
    """Read the shape ``name``. Raises ``UsageError`` for an unknown one."""
    key = name.strip().lower()
    if key not in names():
        hint = f"{similar(key, 0.5)} ".lstrip()
        raise UsageError(f"there is no shape '{printable(name, 60)}': {hint}'fitter shapes' lists them")
    entry = parse_toml((_FOLDER / f"{key}.toml").read_text(encoding="utf-8"))
    return Published(key, entry["title"], entry["source"], entry["config"])
