"""Names of a fleet's models that other programs accept."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from fitter.errors import PlanError

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet

MOST_SAID = 12
"""Most sets of models that a comment lists."""


def distinct(fleet: Fleet, safe: Callable[[str], str]) -> dict[str, str]:
    """Map each model's name to a safe one.

    Args:
        fleet: The fleet.
        safe: Makes a name safe.

    Raises:
        PlanError: Two models would have the same name.
    """
    names: dict[str, str] = {}
    for model in fleet.models:
        name = safe(model.name)
        if other := next((other for other, its_name in names.items() if its_name == name), None):
            raise PlanError(f"this format would call both '{other}' and '{model.name}' {name}: rename one of them")
        names[model.name] = name
    return names


def file_name(name: str) -> str:
    """Replace every character but ASCII letters, digits, ``_``, ``.`` and ``-``; begin with a letter or digit."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("_.-") or "model"
