"""Declare JSON documents: keys in a stable order, sizes in bytes, versioned by ``schema``.

The writer (``Document.write``), the reader (``Document.read``) and the reference pages (``tools/docs/of_json.py``) use
the same declaration. An ``Entry`` is a value that is read, with its place, which errors name.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from fitter.errors import UsageError
from fitter.text import LONGEST_TEXT, printable

_T = TypeVar("_T")

_LARGEST = 2**63
"""No number of a document is as large; some larger ones have no equal among floating-point numbers."""


class Entry:
    """A value of the document ``name``, at the place ``where``.

    Its methods raise ``UsageError`` for a missing key or a wrong type.
    """

    def __init__(self, name: str, value: Any, where: str = "") -> None:
        self._name = name
        self._where = where
        self._value = value

    def __getitem__(self, key: str) -> Entry:
        if not isinstance(self._value, dict):
            raise self._wrong("an object")
        where = f"{self._where}.{key}" if self._where else key
        if key not in self._value:
            raise self.error(f"'{where}' is missing: give a plan that this version's fitter --json wrote")
        return Entry(self._name, self._value[key], where)

    def __contains__(self, key: str) -> bool:
        return isinstance(self._value, dict) and key in self._value

    def text(self) -> str:
        return self._plain(str, "a text")

    def shown(self) -> str:
        """Read a text that is only shown."""
        return printable(self.text(), LONGEST_TEXT)

    def flag(self) -> bool:
        return self._plain(bool, "true or false")

    def whole(self) -> int:
        return self._plain(int, "a whole number")

    def count(self) -> int:
        if (count := self.whole()) < 0:
            raise self._wrong("a whole number of 0 or more")
        return count

    def number(self) -> float:
        if isinstance(self._value, float) and abs(self._value) < float("inf"):
            return self._value
        return float(self._plain(int, "a number"))

    def one_of(self, *choices: str) -> Any:
        if self._value not in choices:
            raise self._wrong(f"one of {', '.join(choices)}")
        return self._value

    def maybe(self, kind: Callable[[Entry], _T]) -> _T | None:
        return None if self._value is None else kind(self)

    def options(self, allowed: set[str]) -> tuple[str, ...]:
        """Read options of llama-server with their values; refuse others, because the server starts with them."""
        words = self.each(Entry.text)
        if len(words) % 2 or not allowed.issuperset(words[::2]):
            raise self._wrong("options that a plan has, each with a value")
        return words

    def each(self, kind: Callable[[Entry], _T]) -> tuple[_T, ...]:
        if not isinstance(self._value, list):
            raise self._wrong("a list")
        return tuple(kind(Entry(self._name, value, f"{self._where}[{i}]")) for i, value in enumerate(self._value))

    def _plain(self, kind: type[_T], what: str) -> _T:
        if not isinstance(self._value, kind) or (isinstance(self._value, bool) and kind is not bool):
            raise self._wrong(what)
        if isinstance(self._value, int) and abs(self._value) >= _LARGEST:
            raise self._wrong(what)
        return self._value

    def error(self, message: str) -> UsageError:
        """Return an error of the document."""
        return UsageError(f"{self._name}: {message}")

    def _wrong(self, what: str) -> UsageError:
        text = json.dumps(self._value)
        text = text if len(text) <= 40 else f"{text[:40]}…"
        where = f"'{self._where}'" if self._where else "the document"
        return self.error(f"{where} is {text}, not {what}")


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
