"""Match patterns of tensor overrides as llama.cpp does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fitter.errors import UsageError
from fitter.llama.build import library as native


def match(patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return for each name the index of the first pattern that matches a part of it, or -1.

    Raises ``UsageError`` for an invalid regular expression.
    """
    library = native.libraries()
    compiled: list[Any] = []
    try:
        for pattern in patterns:
            regex = library.fitter.fitter_regex_new(pattern.encode("utf-8", "surrogateescape"))
            if regex == library.ffi.NULL:
                raise UsageError(f"pattern '{pattern}' is not a valid regular expression: {library.last_error()}")
            compiled.append(regex)
        return tuple(_first_match(library, compiled, name) for name in names)
    finally:
        for regex in compiled:
            library.fitter.fitter_regex_free(regex)


def _first_match(library: native.Library, compiled: Sequence[Any], name: str) -> int:
    text = name.encode("utf-8", "surrogateescape")
    for i, regex in enumerate(compiled):
        is_match = library.fitter.fitter_regex_search(regex, text)
        if is_match < 0:
            raise UsageError(f"a pattern cannot be matched with '{name}': {library.last_error()}")
        if is_match:
            return i
    return -1
