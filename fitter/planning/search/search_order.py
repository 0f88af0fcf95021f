"""The order of a search: which plan is asked for first, and which others before one goes out. Bytes.

Each step takes the best plan so far and returns it, or a better one. ``objective`` compares plans, ``search_state``
holds the facts, ``proposals`` makes placements, ``corrections`` measures and corrects them, ``context_choice`` chooses
the context, ``device_choice`` and ``remote_devices`` the devices. ``levers`` makes concessions after all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Params
from fitter.planning.pricing.objective import is_better
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import context_limit
from fitter.planning.request.given import usable_devices
from fitter.planning.request.request import Measure, Record, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search import flash_attention
from fitter.planning.search.device_choice import Devices, in_better_order
from fitter.planning.search.remote_devices import worth_their_network
from fitter.planning.search.search_state import Callbacks, CutShort, SearchState
from fitter.planning.speed.explain import Choice


def search(
    request: Request,
    measure: Measure,
    record: Record,
    on_candidate: Callable[[Params], None] = lambda params: None,
    on_choice: Callable[[Choice], None] = lambda choice: None,
) -> Trial:
    """Find the best trial that fits, or where none does the one that lacks least.

    Args:
        measure: makes a dummy load.
        record: makes a dummy load and returns the size of every tensor.
        on_candidate: gets parameters that may turn out to be the answer, as early as possible.
        on_choice: gets every choice by price.

    Raises:
        TimeLimitError: the time limit was reached before a trial fitted. After one, the best so far is returned.
        LlamaCppError: llama.cpp refuses the user's own parameters.
    """
    seen = set[bool | None]()

    def noted(params: Params) -> Breakdown:
        breakdown = measure(params)
        seen.add(breakdown.flash_attn)
        return breakdown

    callbacks = Callbacks(remembered(noted), record, on_candidate, on_choice)
    state = SearchState(request, context_limit.usable(request, usable_devices(request)), callbacks)
    try:
        best, distance = _best(state)
    except CutShort as cut:
        return cut.best
    is_open = flash_attention.is_open(request) and best.fits and best.seconds is not None
    return _with_other_attention(state, best, distance, seen) if is_open else best


def _with_other_attention(state: SearchState, best: Trial, distance: float, seen: set[bool | None]) -> Trial:
    """Try flash attention on, or off, for all layers."""
    if seen == {False}:
        # learn whether the devices can compute it at all
        with suppress(LlamaCppError, CutShort):
            state.trial(state.default, state.smallest_context)
    for other in tuple(flash_attention.alternatives(state.request, best, distance, seen)):
        best = _better_with(other, state, best)
    return best


def _better_with(other: Request, state: SearchState, best: Trial) -> Trial:
    """Search for the changed request ``other``; return the better plan."""
    try:
        trial, _ = _best(SearchState(other, state.devices, state.callbacks))
    except CutShort as cut:
        trial = cut.best
    except (LlamaCppError, TimeLimitError):
        return best
    if not is_better(state.request, trial, best):
        return best
    if choice := flash_attention.choice_of(trial, best):
        state.callbacks.on_choice(choice)
    return trial


def _best(state: SearchState) -> tuple[Trial, float]:
    """Find the best trial, and its time as a multiple of its bound."""
    state = in_better_order(state)
    devices = Devices(state)
    best = devices.without_idle(state)
    best = devices.with_more_context(best)
    best = worth_their_network(state, best)
    devices.forget_remotes(best)
    best = devices.without_doubtful(best)
    best = devices.on_others(best)
    best = devices.with_the_last_layer(best)
    best = devices.with_few_layers(best)
    return best, devices.distance(best)
