"""llama.cpp's arguments."""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.planning.plan import Plan


def words(plan: Plan) -> list[str]:
    """What ``plan.arguments()`` says."""
    return arguments(plan)
