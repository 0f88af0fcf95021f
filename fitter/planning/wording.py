"""Values in messages, however long they are, and numbers from words. Imported with the command line, so it is light."""

from __future__ import annotations

import math

from fitter.errors import UsageError

_DIGITS = 30
"""Of a number that is written out."""

_CHARACTERS = 40


def shown(value: object) -> str:
    """``value`` for a message, however long it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        # a number of more than 4300 digits cannot be written out
        digits = int(value.bit_length() * math.log10(2)) + 1
        return str(value) if digits <= _DIGITS else f"about {'-' if value < 0 else ''}1e{digits - 1}"
    try:
        text = repr(value)
    except ValueError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 3] + "..."


def parse_whole(text: str) -> int:
    """The whole number that ``text`` is. Raises ``UsageError``."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{shown(text)} is not a whole number, or one of thousands of digits") from None
