"""llama.cpp's options by each of their names, and a plan's arguments as settings of them.

The formats are made from the arguments that ``fitter.output.arguments`` writes, so that none can leave one out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fitter.errors import PlanError
from fitter.kinds import Flag
from fitter.output.arguments import arguments
from fitter.parameters import PARAMETERS
from fitter.planning.plan import Plan


@dataclass(frozen=True)
class Option:
    """An option of llama.cpp (``common/arg.cpp``) as a plan uses it.

    ``name`` is what ``arguments`` writes, ``key`` its long name, positive and without dashes. ``env`` is the variable
    that llama.cpp's programs read, ``None`` where there is none. ``value`` is what a flag sets ``key`` to, ``None``
    where the option takes a value. ``is_files``: that value is a file, or several with commas.
    """

    name: str
    key: str
    env: str | None
    value: str | None = None
    is_files: bool = False


@dataclass(frozen=True)
class Setting:
    """An option and its value; ``true`` or ``false`` where it is a flag."""

    option: Option
    value: str


MODEL = Option("-m", "model", "LLAMA_ARG_MODEL", is_files=True)
_OWN = (MODEL, Option("-fit", "fit", "LLAMA_ARG_FIT"), Option("--spec-type", "spec-type", "LLAMA_ARG_SPEC_TYPE"))
"""What a plan says that is no parameter of fitter's."""


def options() -> dict[str, Option]:
    """Every option that llama.cpp's programs share with fitter, by the name that a plan's arguments have for it."""
    found = {option.name: option for option in _OWN}
    for each in PARAMETERS.values():
        if each.options and not each.is_ours:
            value = each.kind.word(not each.default) if isinstance(each.kind, Flag) else None
            found[each.option] = Option(each.option, each.long, each.env, value, each.kind.is_file)
    return found


def settings(plan: Plan) -> list[Setting]:
    """The arguments of ``plan``, option by option. Raises :class:`PlanError` for one that has no option."""
    words, known = iter(arguments(plan)), options()
    found = []
    for word in words:
        option = known.get(word)
        if option is None:
            raise PlanError(f"only --format args and --format json can express {word}, which this plan needs")
        found.append(Setting(option, next(words) if option.value is None else option.value))
    return found


def anywhere(plan: Plan) -> list[Setting]:
    """The model and the settings of ``plan`` for a file that is read in another directory: with whole paths."""
    found = [Setting(MODEL, os.path.abspath(plan.model.path))]
    for setting in settings(plan):
        if setting.option.is_files:
            setting = Setting(setting.option, ",".join(map(os.path.abspath, setting.value.split(","))))
        found.append(setting)
    return found
