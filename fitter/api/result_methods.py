"""Methods of results that write, load and verify them, each by the modules that it needs.

The classes of results stand below, in planning, and import this module when a method is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet
    from fitter.planning.plan.plan import Llama, Plan
    from fitter.planning.plan.verified import Verification
    from fitter.planning.tables.exploration import Exploration

_DOCUMENTS = {
    "Plan": "plan_document.PLAN",
    "Fleet": "deployment_documents.FLEET",
    "Exploration": "many_plans.EXPLORATION",
    "Quantizations": "many_plans.QUANTIZATIONS",
    "Repository": "many_plans.REPOSITORY",
    "ShapePlans": "many_plans.SHAPE_PLANS",
}
"""The document of each class of results, below ``fitter.output.documents``."""


def document(result: object) -> dict[str, Any]:
    """Write the document of ``result``, as the command that makes it prints with ``--json``."""
    module, _, name = _DOCUMENTS[type(result).__name__].partition(".")
    declared = getattr(import_module(f"fitter.output.documents.{module}"), name)
    return dict(declared.write(result))


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

    return exploration_fragment(document(exploration))
