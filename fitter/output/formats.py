"""A plan or a fleet in the formats of ``fitter.parameters.targets``.

The module of a target in ``fitter.programs`` writes them; in a folder with rules, which planning reads, its ``text``.
Each format is a function there: ``NAME_text(plan)``, ``NAME_fleet(fleet)``, or ``NAME_words(plan)`` for arguments on
one line without quotes. ``NAME_anyway(plan)`` leaves out what the format cannot express, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fitter.errors import PlanError, UsageError
from fitter.parameters.targets import FLEET_FORMATS, FORMATS, TARGETS

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet
    from fitter.planning.plan.plan import Plan


def render(plan: Plan, name: str, *, anyway: bool = False) -> str:
    """Write ``plan`` in the format ``name``, without a newline at the end.

    Raises:
        PlanError: The format cannot express a parameter of the plan, which the message names (with ``anyway``, only if
            the format leaves nothing out); or the plan does not fit, ``anyway`` is false and it is not ``json``.
        UsageError: There is no such format.
    """
    _check_name(name, FORMATS)
    if name != "json" and not anyway:
        from fitter.planning.plan.plan import check_fits

        check_fits(plan, f"format('{name}', anyway=True)")
    if is_unquoted(name):
        return " ".join(words(plan, name))
    partial = _writer(name, "anyway") if anyway else None
    text: str = (partial or _writer(name, "text"))(plan)
    return text


def render_fleet(fleet: Fleet, name: str) -> str:
    """Write ``fleet`` in the format ``name``, without a newline at the end.

    Raises:
        PlanError: The fleet does not fit, or the format cannot express a plan or a name, which the message says.
        UsageError: There is no such format.
    """
    _check_name(name, FLEET_FORMATS)
    if not fleet.fits:
        raise PlanError(f"the models do not fit: {fleet.problems[0]}")
    text: str = _writer(name, "fleet")(fleet)
    return text


def is_unquoted(name: str) -> bool:
    """Return whether a format is arguments on one line without quotes, for ``$(...)``."""
    return _writer(name, "words") is not None


def words(plan: Plan, name: str) -> list[str]:
    """Write the arguments of ``plan`` in the format ``name``, which is unquoted, whether it fits or not.

    Raises:
        PlanError: An argument cannot be on one line, or as ``render``.
    """
    from fitter.output.arguments import check_line

    arguments: list[str] = _writer(name, "words")(plan)
    check_line(arguments)
    return arguments


def _check_name(name: str, formats: Mapping[str, str]) -> None:
    if name not in formats:
        raise UsageError(f"unknown format '{name}': choose from {', '.join(formats)}")


def _writer(name: str, kind: str) -> Any:
    """Return the function of this kind for a format; ``None`` if there is none."""
    home, target = next(each for each in TARGETS.items() if name in {**each[1].formats, **each[1].fleets})
    module = import_module(f"fitter.programs.{home}.text" if target.programs else f"fitter.programs.{home}")
    return getattr(module, f"{name.replace('-', '_')}_{kind}", None)


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
