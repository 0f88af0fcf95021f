"""Values from outside: shown in messages, parsed from words, checked whatever their type. Bytes."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fitter.errors import UsageError
from fitter.text import MIB, mib

MAX_DEVICES = 16
"""Most devices of llama.cpp (``llama_max_devices``)."""

MAX_OVERRIDES = 512
"""Most tensor overrides: llama.cpp compiles the pattern of each again for every tensor."""

MAX_PATTERNS = 2**13
"""Most characters of all patterns: beyond that ``std::regex`` takes seconds, or overflows its stack."""

MAX_SCALE = 1e30
"""The largest scale of an adapter, a ``float`` in llama.cpp."""

MOST_BYTES = 2**60
"""More memory than any machine has."""

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Units of sizes and bandwidths, in bytes."""

SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
"""A number and a unit."""
_TOKENS = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,4}))?\s*([km])", re.IGNORECASE | re.ASCII)
_TOKEN_UNITS = {"k": 1024, "m": 1024**2}
_LEAST_SHARE, _MOST_SHARE = 1e-30, 1e30
"""Shares of a tensor split: llama.cpp stores them as ``float`` and adds them up."""

_LONGEST = 1e6
"""Longest wait in seconds; the system's own limit is twice that."""

_DIGITS = 30
"""Most digits of a number in a message."""

_CHARACTERS = 40


# --- values in messages, and values from words


def shown(value: object) -> str:
    """Write a value for a message, shortened if it is long."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Python cannot write a number of more than 4300 digits
        digits = int(value.bit_length() * math.log10(2)) + 1
        return str(value) if digits <= _DIGITS else f"about {'-' if value < 0 else ''}1e{digits - 1}"
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 3] + "..."


def split_list(text: str) -> list[str]:
    """Split a list of numbers. As in llama.cpp, commas and slashes separate them, and several count as one."""
    return re.split("[,/]+", text)


def parse_whole(text: str) -> int:
    """Parse a whole number. Raises ``UsageError``."""
    try:
        return int(text)
    except ValueError:
        why = "has too many digits" if text.strip().lstrip("+-").isdigit() else "is not a whole number"
        raise UsageError(f"{shown(text)} {why}") from None


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as ``8192``, ``32k`` or ``1M``: k is 1024, M is 1024 k. Raises ``UsageError``."""
    if not (match := _TOKENS.fullmatch(text.strip())):
        return parse_whole(text)
    number, decimals, unit = match[1], match[2] or "", match[3]
    tokens, rest = divmod(int(number + decimals) * _TOKEN_UNITS[unit.lower()], int("1" + "0" * len(decimals)))
    if rest:
        raise UsageError(f"{shown(text)} is not a whole number of tokens")
    return tokens


def parse_size(text: str) -> int:
    """Parse a size such as ``24GiB``, ``24564 MiB`` or ``20GB``; return bytes. The unit is required. Fractions round
    down.

    Raises ``UsageError`` if it is not a size, or more than an exbibyte.
    """
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{shown(text)} is not a size: write a number and a unit, such as 24GiB or 24564MiB")
    number, unit = match.groups()
    if not unit:
        raise UsageError(f"{shown(text)} has no unit: write {number}MiB or {number}GiB")
    if unit.lower() + "ib" in UNITS:
        raise UsageError(f"{shown(text)} may mean two sizes: write {number}{unit.upper()}iB or {number}{unit.upper()}B")
    if unit.lower() not in UNITS:
        raise UsageError(f"{shown(text)} has an unknown unit: use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    whole, _, decimals = number.partition(".")
    size = int(whole + decimals) * UNITS[unit.lower()] // int("1" + "0" * len(decimals))
    if size > MOST_BYTES:
        raise UsageError(f"{shown(text)} is more memory than any machine has")
    return size


def check_timeout(timeout: float, what: str = "timeout") -> None:
    """Raise ``UsageError`` unless a time is above 0 and not too long to wait."""
    if not timeout > 0:
        raise UsageError(f"a {what} of {timeout:g} seconds is too short: give more than 0")
    if timeout > _LONGEST:
        raise UsageError(f"a {what} of {timeout:g} seconds is too long: give {_LONGEST:g} or less")


# --- checks of values from Python; ``called`` is the parameter's name with its option


def whole(called: str, value: object) -> int:
    """Convert a value of any type to a whole number. Raises ``UsageError``."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{called} is {shown(value)}: give a whole number") from None


def number(called: str, value: object) -> float:
    """Convert a value to a number, which may be nan or infinite. Raises ``UsageError``."""
    try:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{called} is {shown(value)}: give a number") from None


def size(called: str, value: object) -> int:
    """Convert a number or a string such as ``24GiB`` to bytes. Raises ``UsageError``."""
    if isinstance(value, str):
        if value == "0":
            return 0
        try:
            return parse_size(value)
        except UsageError as error:
            raise UsageError(f"{called}: {error}") from None
    number_of_bytes = whole(called, value)
    if number_of_bytes < 0:
        raise UsageError(f"{called} is {shown(number_of_bytes)} bytes: it must be 0 or more")
    if number_of_bytes > MOST_BYTES:
        raise UsageError(
            f"{called} is {shown(number_of_bytes // MIB)} MiB, which is more memory than any machine has: "
            f"give {mib(MOST_BYTES)} MiB at most"
        )
    return number_of_bytes


def text(called: str, value: object) -> str:
    """Check a string for llama.cpp. Raises ``UsageError``."""
    if not isinstance(value, str):
        raise UsageError(f"{called} is {shown(value)}: give a string")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{called} is {shown(value)}, which contains a lone surrogate: remove it") from None
    if "\0" in value:
        raise UsageError(f"{called} is {shown(value)}, which contains a NUL character: remove it")
    return str(value)


def path(called: str, value: object) -> str:
    """Convert a string, bytes or path-like object to a path. Raises ``UsageError``."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise UsageError(f"{called} is {shown(value)}: give the path of a file")
    try:
        return text(called, os.fsdecode(value))
    except (TypeError, ValueError):
        raise UsageError(f"{called} is {shown(value)}: give the path of a file") from None


def items(called: str, value: object, what: str) -> list[Any]:
    """Return the items of a list, or of any other iterable but a string. Raises ``UsageError``."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping)):
        try:
            return list(value)
        except (TypeError, ValueError):
            # such as an array without dimensions
            pass
    raise UsageError(f"{called} is {shown(value)}: give a list of {what}")


def texts(called: str, value: object) -> tuple[str, ...]:
    """Return several strings, or one. Raises ``UsageError``."""
    strings = [value] if isinstance(value, str) else items(called, value, "strings")
    return tuple(text(called, item) for item in strings)


def shares(called: str, value: object) -> tuple[float, ...]:
    """Check a tensor split. Raises ``UsageError``."""
    parts = tuple(number(called, share) for share in items(called, value, "numbers such as [3, 1]"))
    if len(parts) > MAX_DEVICES:
        raise UsageError(f"{called} has {len(parts)} shares: llama.cpp has room for {MAX_DEVICES} devices")
    for share in parts:
        if not share >= 0:
            raise UsageError(f"{called} has a share below 0: give each device a share of 0 or more")
        if share and not _LEAST_SHARE <= share <= _MOST_SHARE:
            raise UsageError(f"{called} has a share of {share:g}: give 0, or {_LEAST_SHARE:g} to {_MOST_SHARE:g}")
    return parts


def read_size(where: str, value: Any) -> int:
    """Read a size in a TOML file or a marker: bytes, or a string with a unit. Raises ``UsageError``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return size(where, value)
    if not isinstance(value, str):
        raise UsageError(f'{where} is {shown_in_file(value)}: give a size such as "24GiB", or a number of bytes')
    try:
        return parse_size(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def shown_in_file(value: Any) -> str:
    """Write a value for a message about a file."""
    return str(value).lower() if isinstance(value, bool) else shown(value)


# --- what parameters are made of


@dataclass(frozen=True)
class TensorBuftOverride:
    """A buffer type for the tensors whose names match a pattern, as in llama.cpp's ``-ot``."""

    pattern: str
    """An ECMAScript regular expression (``std::regex``) that matches a part of a tensor's name."""
    buffer_type: str
    """The name of the buffer type, such as ``CPU``."""


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter, as in llama.cpp's ``--lora-scaled``."""

    path: str
    """The adapter's file."""
    scale: float = 1.0
    """Its factor; with 0 it is loaded but not used."""


def parse_overrides(given: Iterable[str]) -> tuple[TensorBuftOverride, ...]:
    """Parse overrides such as ``pattern=buffer type``, or several with commas, as in ``-ot``. Raises ``UsageError``."""
    overrides = []
    for each in given:
        for part in each.split(","):
            pattern, equals, buffer_type = part.partition("=")
            if not equals or not pattern or not buffer_type:
                raise UsageError(f"tensor override {shown(part)} is not of the form <name pattern>=<buffer type>")
            overrides.append(TensorBuftOverride(pattern, buffer_type))
    check_overrides([override.pattern for override in overrides])
    return tuple(overrides)


def check_overrides(patterns: Collection[str]) -> None:
    """Raise ``UsageError`` for more or longer patterns than llama.cpp can handle."""
    if len(patterns) > MAX_OVERRIDES:
        raise UsageError(f"{len(patterns)} tensor overrides (-ot) are given: give {MAX_OVERRIDES} at most")
    length = sum(map(len, patterns))
    if length > MAX_PATTERNS:
        raise UsageError(f"the tensor overrides (-ot) have {length} characters: give {MAX_PATTERNS} at most")


_WITHOUT_BACKSLASH = {
    **{f"\\{char}": f"[{char}]" for char in ".$*+?()[{}|/-"},
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
}


def plain_pattern(pattern: str) -> str:
    r"""Rewrite a regular expression with as few backslashes as possible.

    ``blk\.1\.`` becomes ``blk[.]1[.]``: a backslash does not survive ``xargs``.
    """
    out: list[str] = []
    in_class = False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "[":
            in_class = True
        elif token == "]":
            in_class = False
        out.append(token if in_class else _WITHOUT_BACKSLASH.get(token, token))
    return "".join(out)
