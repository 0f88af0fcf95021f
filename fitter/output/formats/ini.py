"""A preset for llama-server: a section that it serves as a model of that name."""

from __future__ import annotations

import re
from pathlib import Path

from fitter.errors import PlanError
from fitter.output.formats.settings import Setting, anywhere
from fitter.planning.plan import Plan


def text(plan: Plan) -> str:
    """The preset: version, a section named like the file, the model's whole path and every argument by its long name.

    Raises :class:`PlanError` where a value has something in it that llama-server would cut off.
    """
    lines = [f"{each.option.key} = {_value(each)}" for each in anywhere(plan)]
    return "\n".join(["version = 1", "", f"[{section(plan.model.path)}]", *lines])


def section(path: str) -> str:
    """The name under which llama-server offers the model at ``path``: its file name, without what a preset reserves.

    ``]`` would end the name, ``:`` begin a tag that is written in capitals, and ``*`` stands for all models.
    """
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).name.removesuffix(".gguf"))
    return re.sub(r"[^\w.+-]+", "-", stem) or "model"


def _value(setting: Setting) -> str:
    if re.search(r"[;#]|^\s|\s$", setting.value) or not setting.value.isprintable():
        raise PlanError(
            f"'{setting.value}' cannot be the {setting.option.key} of a llama-server preset, which takes ';' and '#' "
            "for a comment, and has no white space at either end and no control characters"
        )
    return setting.value
