"""llama.cpp's arguments."""

from __future__ import annotations

from fitter.output.arguments import arguments
from fitter.planning.plan import PlanData


def words(plan: PlanData) -> list[str]:
    """What ``plan.arguments()`` says."""
    return arguments(plan)
