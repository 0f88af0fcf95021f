"""llama.cpp's arguments."""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.planning.plan.plan import Plan


def words(plan: Plan) -> list[str]:
    """The words of ``plan.arguments()``."""
    return arguments(plan)
