"""llama.cpp's arguments, quoted for a shell that evaluates them."""

from __future__ import annotations

from fitter.output.arguments import arguments, shell_line
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """Write one line that ``eval`` turns into ``plan.arguments()`` in sh, bash, zsh and fish.

    Raises :class:`PlanError` for an argument that cannot be on one line.
    """
    return shell_line(arguments(plan))
