"""A preset for llama-server: a section with a model's parameters; its name is the model's name there."""

from __future__ import annotations

import re
from pathlib import Path

from fitter.errors import PlanError
from fitter.output.formats.settings import Setting, anywhere
from fitter.planning.plan import PlanData


def text(plan: PlanData) -> str:
    """The preset: version, a section named like the file, the model's full path, every argument by its long name.

    Raises :class:`PlanError` for a value that llama-server would not read completely.
    """
    lines = [f"{each.option.key} = {_value(each)}" for each in anywhere(plan)]
    return "\n".join(["version = 1", "", f"[{section(plan.model.path)}]", *lines])


def section(path: str) -> str:
    """The name under which llama-server offers the model at ``path``: its file name without special characters.

    In a preset ``]`` ends the name, ``:`` begins a tag, and ``*`` stands for all models.
    """
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).name.removesuffix(".gguf"))
    return re.sub(r"[^\w.+-]+", "-", stem) or "model"


def _value(setting: Setting) -> str:
    if re.search(r"[;#]|^\s|\s$", setting.value) or not setting.value.isprintable():
        raise PlanError(
            f"'{setting.value}' cannot be the {setting.option.key} in a llama-server preset: rename the file, without "
            "';', '#', control characters, or white space at either end"
        )
    return setting.value
