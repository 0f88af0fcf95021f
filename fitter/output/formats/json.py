"""The whole plan as JSON."""

from __future__ import annotations

from fitter.output.plan_json import dumps, to_dict
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """The document of ``plan.to_dict()``."""
    return dumps(to_dict(plan))
