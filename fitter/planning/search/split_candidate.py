"""A plan with split mode ``tensor`` before it is one: what its search finds, with its price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from fitter.errors import LlamaCppError
from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import objective_seconds
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.split_price import price_split
from fitter.planning.request.request import Measure, Record, Request
from fitter.planning.search.levers import Candidate
from fitter.planning.search.splitting import search_split


def split_candidate(
    request: Request, measure: Measure, record: Record, on_candidate: Callable[[Params], None]
) -> Candidate:
    """What ``request`` gets where every tensor is split over all devices. Raises what the search raises."""
    prices: dict[Params, Price | None] = {}
    recorded = cache(record)

    def seconds(params: Params, breakdown: Breakdown, placement: Placement) -> float | None:
        try:
            layout = recorded(replace(request.params, n_ctx=request.n_ctx_min))
        except LlamaCppError:
            # the plan holds without a price
            return None
        found = prices[params] = price_split(request, params, breakdown, layout, placement)
        return None if found is None else objective_seconds(request, found.estimate)

    trial = search_split(request, measure, recorded, seconds, on_candidate)
    return Candidate(request, trial, prices.get(trial.params))
