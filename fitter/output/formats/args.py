"""llama.cpp's arguments on one line."""

from __future__ import annotations

from fitter.output.arguments import arguments, command_line
from fitter.planning.plan import PlanData


def text(plan: PlanData) -> str:
    """The line as ``$(...)`` and ``xargs`` want it: without quotes, which neither takes away."""
    return command_line(arguments(plan), quoted=False)
