"""A plan as the environment variables that llama.cpp's programs read."""

from __future__ import annotations

import shlex

from fitter.errors import PlanError
from fitter.output.formats.settings import Setting, anywhere
from fitter.planning.plan import Plan


def text(plan: Plan) -> str:
    """A line for the model's path and for every argument.

    A value that a shell would change is in quotes, which a shell and systemd take away and docker's ``--env-file``
    does not; a comment then says so. Raises :class:`PlanError` where llama.cpp has no variable for what the plan needs.
    """
    found = anywhere(plan)
    lines = [f"{_variable(each)}={shlex.quote(each.value)}" for each in found]
    quoted = [_variable(each) for each in found if shlex.quote(each.value) != each.value]
    if quoted:
        lines.insert(0, f"# docker's --env-file would keep the quotes of {', '.join(quoted)}")
    return "\n".join(lines)


def _variable(setting: Setting) -> str:
    option = setting.option
    if option.env is None:
        raise PlanError(
            f"llama.cpp reads no environment variable for {option.name}, which this plan needs: "
            "take another format, such as ini"
        )
    if not setting.value.isprintable():
        raise PlanError(f"{option.env} cannot be on one line: '{setting.value}' has control characters; rename it")
    return option.env
