"""llama.cpp's arguments."""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.planning.plan.plan import Plan


def words(plan: Plan) -> list[str]:
    """Write the words of ``plan.arguments()``."""
    return arguments(plan)
