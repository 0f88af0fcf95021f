"""The catalogue of models without a file: one small file of published hyperparameters each, with its source."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.storage.data_files import parse_toml
from fitter.text import printable

_FOLDER = Path(__file__).with_name("catalogue")


@dataclass(frozen=True)
class Published:
    """What is published of a model. ``config``: hyperparameters by their names in its ``config.json``."""

    name: str
    title: str
    source: str
    config: Mapping[str, Any]


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all shapes."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def published(name: str) -> Published:
    """What is known of the shape ``name``. Raises ``UsageError`` for one that is not in the catalogue."""
    known = name.strip().lower()
    if known not in names():
        close = difflib.get_close_matches(known[:100], names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(f"there is no shape '{printable(name, 60)}': {hint}'fitter shapes' lists them")
    found = parse_toml((_FOLDER / f"{known}.toml").read_text(encoding="utf-8"))
    return Published(known, found["title"], found["source"], found["config"])
