"""The whole plan as JSON."""

from __future__ import annotations

from fitter.output.documents.document import dumps
from fitter.output.documents.plan_document import to_dict
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """Write the document of ``plan.to_dict()``."""
    return dumps(to_dict(plan))
