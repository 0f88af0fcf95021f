"""Write a plan as llama.cpp's own programs read it: arguments, variables, and presets of llama-server.

A llama-server with a preset starts a process for each model that a request names. It unloads the least recently used
model when it has as many as it may have, whichever these are (``tools/server/server-models.cpp``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fitter.errors import PlanError
from fitter.output.arguments import OptionValue, arguments, shell_line, with_absolute_paths
from fitter.output.formats import distinct
from fitter.planning.plan.plan import Plan

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet


def args_words(plan: Plan) -> list[str]:
    """Write the words of ``plan.arguments()``."""
    return arguments(plan)


def shell_text(plan: Plan) -> str:
    """Write one line that ``eval`` turns into ``plan.arguments()`` in sh, bash, zsh and fish.

    Raises :class:`PlanError` for an argument that cannot be on one line.
    """
    return shell_line(arguments(plan))


def json_text(plan: Plan) -> str:
    """Write the document of ``plan.to_dict()``."""
    from fitter.output.documents.document import dumps
    from fitter.output.documents.plan_document import to_dict

    return dumps(to_dict(plan))


def env_text(plan: Plan) -> str:
    """Write a line for the model's path, and one for every argument.

    A value that a shell would change is quoted. A shell and systemd remove the quotes, but docker's ``--env-file`` does
    not, so a comment warns of it. Raises :class:`PlanError` if llama.cpp has no variable for something in the plan.
    """
    options = with_absolute_paths(plan)
    lines = [f"{_variable(each)}={shlex.quote(each.value)}" for each in options]
    quoted = [_variable(each) for each in options if shlex.quote(each.value) != each.value]
    if quoted:
        lines.insert(0, f"# not for docker's --env-file, which would keep the quotes of {', '.join(quoted)}")
    return "\n".join(lines)


def _variable(argument: OptionValue) -> str:
    option = argument.option
    if option.env is None:
        raise PlanError(
            f"llama.cpp has no environment variable for {option.name}, which this plan needs: "
            "use another format, such as ini"
        )
    if not argument.value.isprintable():
        raise PlanError(f"{option.env} cannot be on one line: rename '{argument.value}', which has control characters")
    return option.env


def ini_text(plan: Plan) -> str:
    """Write the preset: version, a section named like the file, the model's full path, every argument by its long name.

    Raises :class:`PlanError` for a value that llama-server would not read completely.
    """
    return "\n".join(["version = 1", "", *_section_of(section(plan.model.path), plan)])


def _section_of(name: str, plan: Plan) -> list[str]:
    """Write the section ``name`` of a preset. Raises :class:`PlanError` as ``ini_text``."""
    return [f"[{name}]", *(f"{each.option.key} = {_preset_value(each)}" for each in with_absolute_paths(plan))]


def section(path: str) -> str:
    """Return the name under which llama-server offers the model at ``path``: its file name as ``safe_name``."""
    return safe_name(re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).name.removesuffix(".gguf")))


def safe_name(name: str) -> str:
    """Replace special characters of a model's name.

    In a preset ``]`` ends the name, ``:`` begins a tag, and ``*`` stands for all models.
    """
    return re.sub(r"[^\w.+-]+", "-", name) or "model"


def ini_fleet(fleet: Fleet) -> str:
    """Write the command as a comment, and a section for each model.

    Raises :class:`PlanError` for a value that llama-server would not read completely, and for two names that would be
    the same.
    """
    names = distinct(fleet, safe_name)
    first = [each.name for each in fleet.models if each.is_resident][: fleet.any_together]
    lines = [*(f"# {line}" for line in _comments(fleet)), "version = 1"]
    for each in fleet.models:
        lines += ["", *_section_of(names[each.name], each.plan)]
        if each.name in first:
            lines.append("load-on-startup = true")
    return "\n".join(lines)


def _comments(fleet: Fleet) -> Iterator[str]:
    most, count = fleet.any_together, len(fleet.models)
    yield f"llama-server --models-preset FILE --models-max {most}"
    if most >= count:
        yield "All models fit together."
        return
    if most == 1:
        yield "Some two of these models do not fit together, so it has only one in memory."
    else:
        yield f"Any {most} of these models fit together, but not any {most + 1}."
    yield "llama-server only counts them: it unloads the least recently used one before it loads one more."
    yield "It cannot be told which sets of models fit together, nor which model must stay."
    resident = sum(each.is_resident for each in fleet.models)
    if resident > most:
        yield f"It loads {most} of {resident} models at the start, because it may have no more."


def _preset_value(argument: OptionValue) -> str:
    if re.search(r"[;#]|^\s|\s$", argument.value) or not argument.value.isprintable():
        raise PlanError(
            f"'{argument.value}' cannot be the {argument.option.key} in a llama-server preset: rename the file "
            "without ';', '#', control characters, or white space at either end"
        )
    return argument.value
