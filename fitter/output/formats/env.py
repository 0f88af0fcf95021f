"""Write a plan as the environment variables that llama.cpp's programs read."""

from __future__ import annotations

import shlex

from fitter.errors import PlanError
from fitter.output.formats.format_options import OptionValue, with_absolute_paths
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
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
