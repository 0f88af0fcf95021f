"""Read a JSON document: each value with its place, which errors name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

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
