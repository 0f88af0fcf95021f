"""The version of fitter, and how versions are compared. Imports nothing: the search path is not checked yet."""

from __future__ import annotations

VERSION = "0.1.0"


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, to compare it with others."""
    numbers: list[int] = []
    for part in version.split("."):
        rest = part.lstrip("0123456789")
        if rest != part:
            numbers.append(int(part.removesuffix(rest)))
        if rest or not part:
            break
    return tuple(numbers)
