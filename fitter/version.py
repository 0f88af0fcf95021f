"""The version of fitter, and how versions are compared."""

from __future__ import annotations

import re

VERSION = "0.1.0"


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, to compare it with others."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
