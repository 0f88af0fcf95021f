"""Methods of results that write, load and verify them, each by the modules that it needs.

The classes of results stand below, in planning, and import this module when a method is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet
    from fitter.planning.plan.plan import Llama, Plan
    from fitter.planning.plan.verified import Verification
    from fitter.planning.tables.exploration import Exploration
    from fitter.planning.tables.file_rows import Plans


def plan_document(plan: Plan) -> dict[str, Any]:
    """Write the document of ``fitter MODEL --json``."""
    from fitter.output.documents.plan_document import PLAN

    return PLAN.write(plan)


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """Write the document of ``fitter fleet --json``."""
    from fitter.output.documents.deployment_documents import FLEET

    return FLEET.write(fleet)


def document_of_many(plans: Plans) -> dict[str, Any]:
    """Write the document of a grid, of file types, of a repository or of shapes."""
    from fitter.output.documents.many_plans import DOCUMENTS

    return DOCUMENTS[type(plans)].write(plans)


def plan_text(plan: Plan) -> str:
    """Write the table of ``fitter MODEL``."""
    from fitter.output.tables.plan_table import plan_text

    return plan_text(plan)


def plan_html(plan: Plan) -> str:
    """Draw ``plan`` for a notebook."""
    from fitter.output.pages.report_page import plan_fragment

    return plan_fragment(plan)


def arguments(plan: Plan) -> list[str]:
    """Return llama.cpp's arguments, also of a plan that does not fit."""
    from fitter.output.arguments import arguments

    return arguments(plan)


def formatted(plan: Plan, name: str, anyway: bool) -> str:
    """Write ``plan`` in the format ``name``."""
    from fitter.output.formats import render

    return render(plan, name, anyway=anyway)


def explanation(plan: Plan) -> str:
    """Explain ``plan``."""
    from fitter.output.tables.plan_facts import explanation

    return explanation(plan)


def llama_kwargs(plan: Plan) -> dict[str, Any]:
    """Return keyword arguments for ``llama_cpp.Llama``."""
    from fitter.api.measure_load import with_every_output
    from fitter.output.keywords import llama_kwargs

    return llama_kwargs(with_every_output(plan))


def load(plan: Plan, kwargs: Mapping[str, Any]) -> Llama:
    """Load ``plan`` as a ``llama_cpp.Llama``."""
    from fitter.api.fits.fit_model import fit
    from fitter.api.real_runs.load_plan import load

    loaded: Llama = load(plan, kwargs, fit)  # type: ignore[assignment]
    return loaded


def verify(plan: Plan, keywords: Mapping[str, Any]) -> Verification:
    """Load ``plan`` for real, and compare."""
    from fitter.api.real_runs.verify_plan import verify

    return verify(plan=plan, **keywords)


def fleet_text(fleet: Fleet) -> str:
    """Write the table of ``fitter fleet``."""
    from fitter.output.tables.fleet_table import fleet_text

    return fleet_text(fleet)


def fleet_formatted(fleet: Fleet, name: str) -> str:
    """Write ``fleet`` in the format ``name``."""
    from fitter.output.formats import render_fleet

    return render_fleet(fleet, name)


def exploration_html(exploration: Exploration) -> str:
    """Write the grid as a sortable table for a notebook."""
    from fitter.output.pages.exploration_page import exploration_fragment

    return exploration_fragment(document_of_many(exploration))
