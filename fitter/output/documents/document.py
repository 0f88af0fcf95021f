"""Declare JSON documents: keys in a stable order, sizes in bytes, versioned by ``schema``.

The writer (``Document.write``), the reader (``Document.read``) and the reference pages (``tools/docs/of_json.py``) use
the same declaration.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Literal

from fitter.output.documents.entry import Entry

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
        read: Makes the field's value from the key's; by default, the type of the field decides.
    """

    name: str
    field: str = ""
    of: Document | None = None
    change: Callable[[Any], Any] | None = None
    hint: Any = None
    about: str = ""
    read: Callable[[Entry], Any] | None = None

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

    def read(self, entry: Entry, **known: Any) -> Any:
        """Read an object of ``kind``: its fields from their keys, but those that are ``known``.

        Other keys are ignored. A key whose field has a default may be missing, as in files of earlier versions.
        """
        hints, needed = _fields(self.kind)
        for key in self.keys:
            field = key.field or key.name
            if field in hints and field not in known and (field in needed or key.name in entry):
                value = entry[key.name]
                known[field] = key.read(value) if key.read else _read(value, hints[field], key.of)
        return self.kind(**known)


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


_PLAIN_READERS = {str: Entry.shown, int: Entry.count, float: Entry.number, bool: Entry.flag}


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the type of each field of ``kind``, and the names of those without a default."""
    hints, declared = typing.get_type_hints(kind), fields(kind)
    needed = (each.name for each in declared if each.default is MISSING and each.default_factory is MISSING)
    return {each.name: hints[each.name] for each in declared}, frozenset(needed)


def _read(entry: Entry, hint: Any, of: Document | None) -> Any:
    """Read a value of the type ``hint``; texts are made safe to show."""
    inner = typing.get_args(hint)
    if type(None) in inner:
        [hint] = (each for each in inner if each is not type(None))
        return entry.maybe(lambda value: _read(value, hint, of))
    if typing.get_origin(hint) is tuple:
        return entry.each(lambda value: _read(value, inner[0], of))
    if typing.get_origin(hint) is Literal:
        return entry.one_of(*inner)
    return _PLAIN_READERS[hint](entry) if of is None else of.read(entry)
