"""Declare JSON documents: keys in a stable order, sizes in bytes, versioned by ``schema``.

The writer (``Document.write``) and the reference pages (``tools/docs/of_json.py``) read the same declaration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import PurePath
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Key:
    """A key of a document, and the source of its value.

    Args:
        name: The key.
        field: The field or property of the object, dotted for a part's; by default ``name``; ``.`` for the object.
        of: How to write the value if it is an object, or each value of a list.
        change: Makes the value from the field's value (not from ``None``), before ``of``.
        hint: The type of the value in the reference; by default the field's.
        about: The meaning of the value in the reference, or the name of a field with it; by default the field's
            docstring.
    """

    name: str
    field: str = ""
    of: Document | None = None
    change: Callable[[Any], Any] | None = None
    hint: Any = None
    about: str = ""

    def value(self, owner: Any) -> Any:
        """Return the key's value of ``owner``, as JSON has it."""
        value = owner if self.field == "." else attrgetter(self.field or self.name)(owner)
        if self.change is not None and value is not None:
            value = self.change(value)
        return _plain(value, self.of)


@dataclass(frozen=True)
class Document:
    """A JSON object that is written from a ``kind``. One with a ``title`` is a whole document."""

    kind: type
    keys: tuple[Key, ...]
    title: str = ""

    def write(self, value: Any) -> dict[str, Any]:
        """Write ``value``, an object of ``kind`` or one with the same attributes."""
        version = {"schema": SCHEMA} if self.title else {}
        return {**version, **{key.name: key.value(value) for key in self.keys}}


def document(kind: type, *keys: str | Key, title: str = "") -> Document:
    """Declare a document; a plain name stands for the key of the field with that name."""
    return Document(kind, tuple(Key(key) if isinstance(key, str) else key for key in keys), title)


def rounded(name: str) -> Key:
    """Declare a key with an estimate, which is written to four digits."""
    return Key(name, change=four_digits)


def four_digits(number: float) -> float:
    """Round ``number`` to four digits; an estimate is less precise than that."""
    return float(f"{number:.4g}")


def dumps(document: dict[str, Any]) -> str:
    """Write ``document`` as text: in ASCII, which any terminal or pipe can show, and without commands to CI systems."""
    return json.dumps(document, indent=2).replace("\x7f", r"\u007f").replace("##", r"#\u0023")


def _plain(value: Any, of: Document | None) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each, of) for each in value]
    if of is not None and value is not None:
        return of.write(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value
