"""Write a preset for llama-server: a section with a model's parameters, named like the model."""

from __future__ import annotations

import re
from pathlib import Path

from fitter.errors import PlanError
from fitter.output.formats.format_options import OptionValue, with_absolute_paths
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """Write the preset: version, a section named like the file, the model's full path, every argument by its long name.

    Raises :class:`PlanError` for a value that llama-server would not read completely.
    """
    return "\n".join(["version = 1", "", *model(section(plan.model.path), plan)])


def model(name: str, plan: Plan) -> list[str]:
    """Write the section ``name`` of a preset. Raises :class:`PlanError` as ``text``."""
    return [f"[{name}]", *(f"{each.option.key} = {_value(each)}" for each in with_absolute_paths(plan))]


def section(path: str) -> str:
    """Return the name under which llama-server offers the model at ``path``: its file name as ``safe_name``."""
    return safe_name(re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).name.removesuffix(".gguf")))


def safe_name(name: str) -> str:
    """Replace special characters of a model's name.

    In a preset ``]`` ends the name, ``:`` begins a tag, and ``*`` stands for all models.
    """
    return re.sub(r"[^\w.+-]+", "-", name) or "model"


def _value(argument: OptionValue) -> str:
    if re.search(r"[;#]|^\s|\s$", argument.value) or not argument.value.isprintable():
        raise PlanError(
            f"'{argument.value}' cannot be the {argument.option.key} in a llama-server preset: rename the file "
            "without ';', '#', control characters, or white space at either end"
        )
    return argument.value
