"""The whole plan as JSON."""

from __future__ import annotations

from fitter.output.json import dumps, to_dict
from fitter.planning.plan import Plan


def text(plan: Plan) -> str:
    """The document of ``plan.to_dict()``."""
    return dumps(to_dict(plan))
