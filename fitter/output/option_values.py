"""A plan's arguments as pairs of an option of llama.cpp and its value.

Formats are made from ``fitter.output.arguments``, so that none can leave an argument out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import PlanError
from fitter.model.files.source import split_name, split_path
from fitter.model.location import local_name
from fitter.output.arguments import arguments
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.plan import Plan


@dataclass(frozen=True)
class Option:
    """An option of llama.cpp (``common/arg.cpp``) in a plan's arguments.

    Attributes:
        name: Its name in ``arguments``.
        key: Its long name, in the positive form and without dashes.
        env: The environment variable that llama.cpp's programs read, if any.
        value: The value that a flag sets; ``None`` for an option with a value.
        is_file: Whether its value is a file.
        is_list: Whether llama.cpp splits its value at commas.
    """

    name: str
    key: str
    env: str | None
    value: str | None = None
    is_file: bool = False
    is_list: bool = False


@dataclass(frozen=True)
class OptionValue:
    """An option and its value; a flag's is ``true`` or ``false``."""

    option: Option
    value: str

    @property
    def parts(self) -> list[str]:
        """The values that llama.cpp reads in it."""
        return self.value.split(",") if self.option.is_list else [self.value]

    @property
    def words(self) -> list[str]:
        """The words of a command line."""
        return [self.option.name] if self.option.value is not None else [self.option.name, self.value]


MODEL = Option("-m", "model", "LLAMA_ARG_MODEL", is_file=True)
_NO_PARAMETERS = (
    MODEL,
    Option("-fit", "fit", "LLAMA_ARG_FIT"),
    Option("--spec-type", "spec-type", "LLAMA_ARG_SPEC_TYPE"),
)
"""Options in a plan's arguments that are not parameters of fitter."""


def options() -> dict[str, Option]:
    """List every option that fitter shares with llama.cpp's programs, by the name that a plan's arguments use."""
    table = {option.name: option for option in _NO_PARAMETERS}
    for each in PARAMETERS.values():
        if each.options and not each.is_ours:
            value = each.kind.word(not each.default) if isinstance(each.kind, Flag) else None
            table[each.option] = Option(
                each.option, each.long, each.env, value, each.kind.is_file, each.kind.has_commas
            )
    return table


def option_values(plan: Plan) -> list[OptionValue]:
    """List the arguments of ``plan``, option by option. Raises :class:`PlanError` for an argument that is not known."""
    words, table = iter(arguments(plan)), options()
    values = []
    for word in words:
        option = table.get(word)
        if option is None:
            raise PlanError(f"this format cannot express {word}, which this plan needs: use args or json")
        values.append(OptionValue(option, next(words) if option.value is None else option.value))
    return values


def with_absolute_paths(plan: Plan) -> list[OptionValue]:
    """List the model and the arguments of ``plan`` with absolute paths, for a file that is read in any directory.

    Raises :class:`PlanError` where llama.cpp would split such a path.
    """
    return list(map(_absolute, [OptionValue(MODEL, local_name(plan.model.path)), *option_values(plan)]))


def _absolute(argument: OptionValue) -> OptionValue:
    if not argument.option.is_file:
        return argument
    paths = list(map(os.path.abspath, argument.parts))
    if argument.option.is_list and (path := next((path for path in paths if "," in path), None)):
        raise PlanError(f"llama.cpp's {argument.option.name} splits '{path}' at the comma: rename it, or its directory")
    return OptionValue(argument.option, ",".join(paths))


def check_is_for(plan: Plan, program: str, what: str) -> None:
    """Raise :class:`PlanError` where ``plan`` is for another program than this format, which is ``what``.

    Also where the plan is of a file, which does not say how many layers the model has.
    """
    if plan.program != program:
        raise PlanError(f"{what} are for {program}, and the plan is for {plan.program}: fit with --for {program}")
    if not plan.n_layer:
        raise PlanError(f"the plan does not say how many layers the model has: fit again with --format {program}")


def split_files(path: str) -> list[str]:
    """List the files of the model whose first file is at ``path``."""
    split = split_name(Path(path))
    if split is None:
        return [path]
    prefix, _, count = split
    return [os.path.join(os.path.dirname(path), split_path(prefix, each + 1, count)) for each in range(count)]
