"""Published hyperparameters, read with care: a ``config.json`` may come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fitter.errors import ModelError
from fitter.llama.header import limits
from fitter.text import printable

_T = TypeVar("_T")

LARGEST = 2**31 - 1
"""The largest dimension in a header."""
MOST_LAYERS, MOST_EXPERTS = limits.most(".block_count"), limits.most(".expert_count")
"""What llama.cpp reads at most."""
_POSITIONS = 1 << 24
_MOST = {
    "vocab_size": 1 << 21,
    "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS,
    "model_max_length": _POSITIONS,
}
"""Limits of numbers that take memory when the model is planned. Of published models Gemma 3 has the most words,
262,208, and Llama 4 Scout the most positions, 10,485,760.
"""
LONGEST = 1 << 20
"""Most bytes of a ``config.json``."""
_DEEPEST = 100
"""Most nested lists and objects; published files have five."""


class Config:
    """Hyperparameters by name, each checked when it is read; ``unread`` lists the others.

    ``where`` is their name in messages. Every method raises ``ModelError`` for an invalid value.
    """

    def __init__(self, values: Mapping[str, Any], where: str, read: set[str] | None = None, prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._read: set[str] = set() if read is None else read
        self._prefix = prefix

    def value(self, *names: str) -> Any:
        """Return the value of the first of ``names`` that is set; ``None`` if none is. All count as read."""
        self._read.update(self._prefix + name for name in names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def has(self, name: str) -> bool:
        """Return whether a name is set and not null."""
        return self._values.get(name) is not None

    def count(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Read a whole number."""
        if (value := self.value(*names)) is None:
            return self._needed(names[0], default)
        return self._whole_number(names[0], value, least, min(most, _MOST.get(names[0], LARGEST)))

    def counts(self, name: str, n: int, least: int = 0) -> list[int]:
        """Read ``n`` whole numbers, from a list or from one number for all."""
        value = self.value(name)
        if isinstance(value, list):
            if len(value) != n:
                raise self.error(f"has {len(value)} values of {name} for {n} layers: give one for each")
            return [self._whole_number(name, each, least, LARGEST) for each in value]
        return [self.count(name, least=least)] * n

    def number(self, *names: str, default: float | None = None) -> float:
        """Read a number."""
        return float(self._given(names, default, _is_number, "a number"))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Read true or false."""
        return bool(self._given((name,), default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, name: str, default: str | None = None) -> str:
        """Read a text."""
        return str(self._given((name,), default, _is_text, "a text"))

    def texts(self, name: str) -> list[str] | None:
        """Read a list of texts; ``None`` without one."""
        return self._list(name, _is_text, "a list of texts")

    def numbers(self, name: str) -> list[float] | None:
        """Read a list of numbers; ``None`` without one."""
        return self._list(name, _is_number, "a list of numbers")

    def _needed(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise self.error(f"has no {name}: add it")
        return default

    def _given(self, names: Sequence[str], default: Any, is_known: Callable[[object], bool], what: str) -> Any:
        value = self.value(*names)
        if value is not None and not is_known(value):
            raise self.error(f"has {names[0]} {_value_text(value)}: give {what}")
        return self._needed(names[0], default) if value is None else value

    def _list(self, name: str, is_known: Callable[[object], bool], what: str) -> list[Any] | None:
        value = self.value(name)
        if value is not None and not (isinstance(value, list) and all(map(is_known, value))):
            raise self.error(f"has {name} {_value_text(value)}: give {what}")
        return value

    def part(self, name: str) -> Config | None:
        """Return the hyperparameters in the object ``name``; ``None`` without one."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"has {name} {_value_text(value)}: give an object")
        return Config(value, self.where, self._read, f"{self._prefix}{name}.")

    def without(self, name: str) -> Config:
        """Return the hyperparameters without ``name``, which counts as read."""
        self._read.add(self._prefix + name)
        rest = {key: value for key, value in self._values.items() if key != name}
        return Config(rest, self.where, self._read, self._prefix)

    def replaced(self, name: str, value: Any) -> Config:
        """Return the hyperparameters with another value of ``name``."""
        return Config({**self._values, name: value}, self.where, self._read, self._prefix)

    def must_be(self, **known: object) -> None:
        """Raise ``ModelError`` if a name is set to another value than the known one; a tuple has several, or none."""
        for name, values in known.items():
            value = self.value(name)
            if value is not None and value not in (values if isinstance(values, tuple) else (values,)):
                raise self.unknown(f"{name} {_value_text(value)}")

    def unknown(self, what: str) -> ModelError:
        """Make the error for an unknown variation."""
        what = printable(what, 100)
        return self.error(f"has {what}, which fitter cannot tell the tensors of: give a GGUF file of the model instead")

    def error(self, text: str) -> ModelError:
        """Make an error about these hyperparameters."""
        return ModelError(f"{self.where} {printable(text)}")

    def unread(self) -> list[str]:
        """Return the names with a value that nothing has read."""
        return [name for name, value in self._values.items() if name not in self._read and not _is_nothing(value)]

    def _whole_number(self, name: str, value: object, least: int, most: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"has {name} {_value_text(value)}: give a whole number from {least} to {most}")
        return value


def _is_number(value: object) -> bool:
    """Return whether a 32-bit float can hold a value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _value_text(value: object) -> str:
    return printable(repr(value), 60)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Parse a ``config.json``. Raises ``ModelError`` unless it is an object."""
    if len(data) > LONGEST:
        raise ModelError(f"{where} is larger than {LONGEST >> 20} MiB: give the config.json of a model")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelError(f"{where} is not JSON: give the config.json of a model") from None
    if not isinstance(document, dict):
        raise ModelError(f"{where} has no object: give the config.json of a model")
    _check_depth(document, where)
    return document


def _check_depth(value: object, where: str) -> None:
    """Raise ``ModelError`` for values nested too deeply for a message."""
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise ModelError(f"{where} has objects in more than {_DEEPEST} others: give the config.json of a model")


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def listed(names: Sequence[str]) -> str:
    """Write the first names of a list, for a message."""
    shown = [printable(name, 60) for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
