"""Correction of proposals at one context: propose, measure, correct, until proposal and measurement agree. Bytes.

``context_choice`` asks it for the best trial at each context that it considers.
"""

from __future__ import annotations

from collections.abc import Callable

from fitter.errors import LlamaCppCrashError, LlamaCppError
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import is_worth_a_load, rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import given
from fitter.planning.search import choices
from fitter.planning.search.expectations import is_too_large
from fitter.planning.search.proposals import Situation, in_place, place_whole
from fitter.planning.search.search_state import SearchState

_MAX_CORRECTIONS = 12
"""At most so many placements are measured for one plan at one context, each corrected by the one before.

Four are enough for all 29 cases of ``tools/comparisons/cases.py``: it ends corrections that would go on for ever."""

_OUT_OF_REACH = 1.02
"""Corrections end at a proposal that takes so many times the limit: they save less than that.

With 1.0, GPT-OSS 120B on a 4090 and 12 GiB has 90,112 tokens instead of 98,304."""

Propose = Callable[[Situation], "Placement | None"]


def settle(
    state: SearchState, n_ctx: int, is_whole: bool, propose: Propose, limit: float | None = None
) -> Trial | None:
    """Measure proposals, each corrected by the measurements before it, and return the best trial that fits.

    Args:
        is_whole: proposals have all of the model on devices.
        limit: seconds; return the first trial that takes at most so long, and stop where none is likely to.
    """
    best: Trial | None = None
    seen: set[Placement] = set()
    optimistic = False
    while len(seen) < _MAX_CORRECTIONS:
        placement = propose(state.situation(n_ctx, is_whole, optimistic))
        if placement is None and not seen and not optimistic:
            # compute buffers of the other kind of placement may be too large: measure once before giving up
            optimistic = True
            continue
        if placement is None or placement in seen or not _gains(state, placement, best):
            break
        if limit is not None and seen and state.seconds(placement) > _OUT_OF_REACH * limit:
            break
        seen.add(placement)
        trial = _trial(state, placement, n_ctx)
        is_surprise = not is_whole and given.is_whole(state.request, state.devices, placement)
        if trial is not None and not trial.fits and is_surprise:
            # without this gpt-oss-20b on a 4060 Ti (machine 376) ends with the whole model, which lacks memory
            state.learn(trial, is_partial=True)
        if trial is not None and trial.fits and (best is None or rank(trial) > rank(best)):
            best = trial
            if _keeps(best, limit):
                return best
    return best and _refined(state, best, is_whole, propose, seen)


def _keeps(trial: Trial, limit: float | None) -> bool:
    return limit is not None and trial.seconds is not None and trial.seconds <= limit


def _trial(state: SearchState, placement: Placement, n_ctx: int) -> Trial | None:
    """Measure a placement; ``None`` where llama.cpp refuses caches apart from their layers. Then be plain."""
    try:
        trial = state.trial(placement, n_ctx)
    except LlamaCppError as error:
        if state.is_plain and not isinstance(error, LlamaCppCrashError):
            raise
        # not every architecture can have a layer's cache and its weights in two places
        state.be_plain()
        return None
    if trial.placement.moved and any(name == "host" for name, _ in trial.missing):
        # the host may lack room because caches are apart from their layers
        state.be_plain()
    return trial


def _refined(state: SearchState, best: Trial, is_whole: bool, propose: Propose, seen: set[Placement]) -> Trial:
    """Improve ``best`` in the room that its own compute buffers leave.

    Without it GLM 4.5 Air with 32,768 tokens on two 3090, given to it with an rpc-server, takes 38 % longer.
    """
    n_ctx = best.params.n_ctx
    while state.can_price and len(seen) < _MAX_CORRECTIONS:
        # learned compute buffers are the largest of all trials, and too large for this one
        placement = propose(state.situation(n_ctx, is_whole, room=state.room_left_by(best, is_whole)))
        if placement is None or placement in seen or not _gains(state, placement, best):
            break
        seen.add(placement)
        trial = state.trial(placement, n_ctx)
        if not trial.fits or rank(trial) <= rank(best):
            break
        best = trial
    return best


def _gains(state: SearchState, placement: Placement, best: Trial | None) -> bool:
    """Whether a correction of ``best`` promises enough to be measured. Without a fitting trial every one does."""
    if best is None or best.expected is None:
        return True
    return is_worth_a_load(state.seconds(placement), best.expected)


def settle_whole(state: SearchState, n_ctx: int) -> Trial | None:
    """Find the best trial with all of the model on devices."""
    if state.chooses_split:
        # make prices at the smallest context, before a larger one is recorded
        state.prices()
    trial = settle(state, n_ctx, True, place_whole)
    choice = trial and choices.which_devices_have_layers(trial, state.default, state.seconds)
    if choice and state.chooses_split:
        state.callbacks.on_choice(choice)
    return trial


def settle_partial(state: SearchState, n_ctx: int, limit: float | None = None) -> Trial | None:
    """Find the best trial with weights on the host.

    ``limit``: as in ``settle``.
    """
    best = settle(state, n_ctx, False, state.place_partial, limit)
    if best is not None and best.seconds is not None:
        kinds = in_place(state.situation(n_ctx, is_whole=False))
        other = next((each for each in kinds if each.first != best.placement.first), None)
        if choice := choices.where_weights_go(state.request, best, other, state.seconds):
            state.callbacks.on_choice(choice)
    return best


def best_at(state: SearchState) -> Trial:
    """Find the best trial at the context of ``state`` on its devices, or where none fits the one that lacks least."""
    n_ctx = state.request.params.n_ctx
    trial = None if is_too_large(state, n_ctx) else whole_at(state)
    if trial is None and state.devices:
        trial = settle_partial(state, n_ctx)
    return trial or state.least or state.trial(state.default, n_ctx)


def whole_at(state: SearchState) -> Trial | None:
    """Find the best trial with all of the model on devices; without devices on the host."""
    n_ctx = state.request.params.n_ctx
    if given.keeps_layers_on_host(state.request, state.devices):
        # with weights of those layers on devices it may be faster
        return None
    if not state.chooses_split:
        trial = state.trial(state.default, n_ctx)
        if trial.fits or not state.devices:
            return trial if trial.fits else None
    return settle_whole(state, n_ctx)
