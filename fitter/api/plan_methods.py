"""The methods of a plan that write, load and verify it."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitter.api.fit_model import fit
from fitter.api.measure_load import measure
from fitter.api.verify_plan import verify
from fitter.planning.plan.plan import Plan, renamed
from fitter.planning.plan.result_methods import provide

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Llama
    from fitter.planning.plan.verified import Verification


class _Methods:
    """The methods; each imports only the modules that it needs."""

    def text(self, plan: Plan, as_html: bool) -> str:
        from fitter.output.pages import report_page
        from fitter.output.tables import plan_table

        return report_page.plan_fragment(plan) if as_html else plan_table.plan_text(plan)

    def arguments(self, plan: Plan) -> list[str]:
        from fitter.output.arguments import arguments

        return arguments(plan)

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        from fitter.output.documents.plan_document import to_dict

        return to_dict(plan)

    def format(self, plan: Plan, name: str, anyway: bool) -> str:
        from fitter.output.formats import render

        return render(plan, name, anyway=anyway)

    def explain(self, plan: Plan) -> str:
        from fitter.output.tables.explanation import explanation

        return explanation(plan)

    def llama_kwargs(self, plan: Plan) -> dict[str, Any]:
        from fitter.api.repeat_load import with_every_output
        from fitter.output.keywords import llama_kwargs

        return llama_kwargs(with_every_output(plan, measure))

    def load(self, plan: Plan, kwargs: Mapping[str, Any]) -> Llama:
        from fitter.api.load_plan import load

        loaded: Llama = load(plan, kwargs, fit)  # type: ignore[assignment]
        return loaded

    def verify(self, plan: Plan, keywords: Mapping[str, Any]) -> Verification:
        return verify(plan=plan, **keywords)


def _restore_plan(values: dict[str, Any]) -> Plan:
    return Plan(**renamed(values))


provide(Plan, _Methods())
# unpickling a plan imports this module, so that the plan has its methods
copyreg.pickle(Plan, lambda plan: (_restore_plan, (dict(vars(plan)),)))
