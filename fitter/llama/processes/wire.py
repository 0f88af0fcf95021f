"""Convert dataclasses to JSON values and back, for the messages between worker and client.

A tuple of named tuples is sent by columns, which is several times as fast for thousands of them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_PLAIN = frozenset({str, int, float, bool, type(None)})


def encode(value: Any) -> Any:
    """Convert dataclasses, tuples and mappings to values for ``json``."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names:
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        if value and _is_record(type(value[0])):
            return [encode(column) for column in zip(*value, strict=True)]
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: Any, value: Any) -> Any:
    """Build a value of type ``kind`` from ``encode``'s result.

    Raises ``TypeError`` if it is not of that type.
    """
    return _decoder(kind)(value)


_Decoder = Callable[[Any], Any]


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass or named tuple; none for anything else."""
    if _is_record(kind):
        return tuple(kind._fields)
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


# cached: a header has thousands of values of a few types
@functools.cache
def _decoder(kind: Any) -> _Decoder:
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or _is_record(kind)):
        return _fields_decoder(kind)
    if origin is tuple:
        return _tuple_decoder(typing.get_args(kind))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        item_decoder = _decoder(typing.get_args(kind)[1])
        return lambda value: {key: item_decoder(item) for key, item in value.items()}
    if origin is typing.Union or origin is types.UnionType:
        return _union_decoder(typing.get_args(kind))
    if origin is typing.Literal:
        return _literal_decoder(typing.get_args(kind))
    return functools.partial(_decode_plain, kind)


def _decode_plain(kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _fields_decoder(kind: type[Any]) -> _Decoder:
    decoders = {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}

    def decode_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
        unknown = value.keys() - decoders.keys()
        if unknown:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: decoders[name](item) for name, item in value.items()})

    return decode_fields


def _tuple_decoder(kinds: tuple[Any, ...]) -> _Decoder:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if _is_record(kinds[0]):
            return _columns_decoder(kinds[0])
        return functools.partial(_decode_items, kinds[0], _decoder(kinds[0]))
    decoders = [_decoder(kind) for kind in kinds]

    def decode_tuple(value: Any) -> Any:
        _check_list(value)
        if len(decoders) != len(value):
            raise TypeError(f"{value!r} does not have {len(decoders)} items")
        return tuple(decoder(item) for decoder, item in zip(decoders, value, strict=True))

    return decode_tuple


def _decode_items(kind: Any, decoder: _Decoder, value: Any) -> Any:
    _check_list(value)
    if kind in _PLAIN and set(map(type, value)) <= {kind}:
        return tuple(value)
    return tuple(map(decoder, value))


def _columns_decoder(kind: type[Any]) -> _Decoder:
    decoders = [_tuple_decoder((hint, Ellipsis)) for hint in typing.get_type_hints(kind).values()]

    def decode_columns(value: Any) -> Any:
        _check_list(value)
        if not value:
            return ()
        if len(value) != len(decoders):
            raise TypeError(f"{len(value)} columns are not those of {kind.__name__}")
        columns = [decoder(column) for decoder, column in zip(decoders, value, strict=True)]
        if len({len(column) for column in columns}) > 1:
            raise TypeError(f"columns of {kind.__name__} differ in length")
        return tuple(map(kind, *columns))

    return decode_columns


def _check_list(value: Any) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")


def _literal_decoder(choices: tuple[Any, ...]) -> _Decoder:
    def decode_literal(value: Any) -> Any:
        if value not in choices:
            raise TypeError(f"{value!r} is not one of {choices}")
        return value

    return decode_literal


def _union_decoder(kinds: tuple[Any, ...]) -> _Decoder:
    def decode_union(value: Any) -> Any:
        # the exact type first, so that an integer in "int | float" stays an integer
        if type(value) in kinds:
            return value
        for kind in kinds:
            try:
                return decode(kind, value)
            except TypeError:
                continue
        raise TypeError(f"{value!r} is not of type {' or '.join(map(str, kinds))}")

    return decode_union
