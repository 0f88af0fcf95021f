"""llama.cpp's arguments."""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.planning.plan import PlanData


def words(plan: PlanData) -> list[str]:
    """The words of ``plan.arguments()``."""
    return arguments(plan)
