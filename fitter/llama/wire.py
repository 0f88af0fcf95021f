"""Dataclasses as JSON values and back: what the worker and its client say to each other."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def encode(value: Any) -> Any:
    """Turn dataclasses, tuples and mappings into what ``json`` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: Any, value: Any) -> Any:
    """Build a value of type ``kind`` from what ``encode`` made of it.

    Raises ``TypeError`` where the value does not have that type.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        _, item_kind = typing.get_args(kind)
        return {key: decode(item_kind, item) for key, item in value.items()}
    if origin is typing.Union or origin is types.UnionType:
        return _decode_union(typing.get_args(kind), value)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise TypeError(f"{value!r} is none of {typing.get_args(kind)}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _decode_dataclass(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    hints = typing.get_type_hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: decode(hints[name], item) for name, item in value.items()})


def _decode_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no tuple")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(decode(kinds[0], item) for item in value)
    if len(kinds) != len(value):
        raise TypeError(f"{value!r} does not have {len(kinds)} items")
    return tuple(decode(kind, item) for kind, item in zip(kinds, value, strict=True))


def _decode_union(kinds: tuple[Any, ...], value: Any) -> Any:
    # The exact type first, so that an integer in "int | float" stays one.
    if type(value) in kinds:
        return value
    for kind in kinds:
        try:
            return decode(kind, value)
        except TypeError:
            continue
    raise TypeError(f"{value!r} is none of {', '.join(map(str, kinds))}")
