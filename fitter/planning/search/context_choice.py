"""Which context: the largest with the whole model on devices, or a longer one that is worth weights on the host.

Tokens. A ``floor`` is a context below which a plan with weights on the host is of no interest; ``None`` where that is
for this search to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fitter.errors import LlamaCppCrashError
from fitter.planning.pricing.objective import GAIN, beats, is_better
from fitter.planning.pricing.trial import Trial
from fitter.planning.search.capacity import context_in_total, is_tight, is_too_large, total_target, total_used
from fitter.planning.search.corrections import settle_fastest, settle_partial, settle_whole
from fitter.planning.search.expectations import (
    expected_partial,
    last_true,
    likely_fits_host,
    likely_fits_whole,
    spill_styles,
)
from fitter.planning.search.search_state import SearchState

_MAX_CONTEXTS = 40
"""How many contexts are tried between one that fits and one that does not; the last half of them halve what is left."""
_MAX_CRASHES = 8
"""How many contexts are tried below one that llama.cpp aborts at."""

_CONTEXTS_TO_SPILL = 8
"""Contexts that are asked about between what fits as a whole and what the devices hold in total."""

_MAX_SPILLED, _MAX_DISAPPOINTED = 5, 2
"""How many of those llama.cpp is asked about, and how many of them may be no better."""

_SMALL_SHARE = 0.004
"""A share of a context that is not worth another proposal."""


def best_on(state: SearchState, floor: int | None = None) -> Trial:
    """The best trial on the devices of ``state``, or the one that lacks least."""
    request = state.request
    if "n_ctx" in request.fixed:
        found = _at_context(state, request.params.n_ctx)
    elif not state.devices:
        found = _on_host(state, floor)
    elif request.objective == "context" and state.is_priced:
        found = _most_context(state)
    else:
        found = _with_context(state, floor)
    return found or state.least or state.trial(state.default, state.smallest_context)


def _at_context(state: SearchState, n_ctx: int) -> Trial | None:
    """The best at a context that is given."""
    if is_too_large(state, n_ctx):
        return settle_partial(state, n_ctx)
    if state.chooses_devices and (fastest := settle_fastest(state, n_ctx)):
        return fastest
    trial = state.trial(state.default, n_ctx)
    if trial.fits or not state.devices:
        return trial
    return settle_whole(state, n_ctx) or settle_partial(state, n_ctx)


def _most_context(state: SearchState) -> Trial | None:
    """The largest context that any placement leaves room for."""
    low, high = state.request.n_ctx_min, state.request.n_ctx_max

    def attempt(n_ctx: int) -> Trial | None:
        try:
            trial = _at_context(state, n_ctx)
        except LlamaCppCrashError:
            return None
        return trial if trial and trial.fits else None

    best = attempt(high)
    if best is not None or low == high:
        return best
    best = attempt(low)
    return best and _largest_context(state, best, high, attempt, likely_fits_host)


def _with_context(state: SearchState, floor: int | None) -> Trial | None:
    """The best where the context is as open as the placement."""
    low, high = state.request.n_ctx_min, state.request.n_ctx_max
    if is_too_large(state, low):
        return settle_partial(state, max(low, floor or 0))
    if low < high and is_tight(state, low):
        bottom = state.trial(state.default, low)
        if total_used(state, bottom, state.devices) >= total_target(state):
            # no larger context leaves room for more of the model
            return settle_whole(state, low) or settle_partial(state, max(low, floor or 0))
    if state.chooses_devices and (fastest := settle_fastest(state, high)):
        return fastest
    top = _top(state)
    if top.fits:
        return top
    if trial := settle_whole(state, top.params.n_ctx):
        return trial
    return settle_partial(state, low) if top.params.n_ctx == low else _below(state, top, floor)


def _below(state: SearchState, top: Trial, floor: int | None) -> Trial | None:
    """The best at a context below that of ``top``, which is too large for the whole model on devices."""
    low, high = state.request.n_ctx_min, top.params.n_ctx
    bottom = state.trial(state.default, low)
    least = floor or context_in_total(state, top, bottom)
    best = bottom if bottom.fits else settle_whole(state, low)
    if best is None:
        return settle_partial(state, least) or (settle_partial(state, low) if least > low else None)
    best = _largest_context(state, best, high, lambda n_ctx: settle_whole(state, n_ctx), likely_fits_whole)
    return best if best.params.n_ctx >= least else _spilled_beyond(state, best, least, floor)


def _spilled_beyond(state: SearchState, whole: Trial, most: int, floor: int | None) -> Trial:
    """``whole``, or a better plan with weights on the host for a context of up to ``most``."""
    alignment = state.request.alignment
    best, asked, low, failed = whole, set[int](), whole.params.n_ctx, 0
    while len(asked) < _MAX_SPILLED and failed < _MAX_DISAPPOINTED and most > low:
        n_ctx = _worth_spilling(state, whole, most) if floor is None and state.can_price else most
        if n_ctx in asked:
            # what was learned of compute buffers does not change it any more
            break
        asked.add(n_ctx)
        trial = settle_partial(state, n_ctx)
        if trial is not None and is_better(state.request, trial, best):
            best = trial
            if n_ctx == most:
                break
        else:
            failed += 1
            most = (low + n_ctx) // 2 // alignment * alignment
    return best


def _worth_spilling(state: SearchState, whole: Trial, most: int) -> int:
    """The context of up to ``most`` that promises the best plan where the most that fits without spilling is ``whole``.

    Little more context can cost much of the time, where no tensor is small enough for the room that is left.
    """
    alignment, spread = state.request.alignment, spill_styles(state, most, is_plain=True)[0]
    seconds: dict[int, float] = {}

    def expect(n_ctx: int) -> None:
        n_ctx = n_ctx // alignment * alignment if n_ctx < most else most
        if whole.params.n_ctx < n_ctx and n_ctx not in seconds:
            seconds[n_ctx] = expected_partial(state, n_ctx, spread, is_plain=True)

    def best() -> int:
        found = most
        for n_ctx in seconds:
            is_first = math.isinf(seconds[found])
            if is_first or beats(state.request, (n_ctx, seconds[n_ctx]), (found, seconds[found])):
                found = n_ctx
        return found

    expect(most)
    if whole.seconds is not None and seconds[most] <= whole.seconds * (1 + GAIN):
        # nothing is lost by all of it
        return most
    stride = max(alignment, (most - whole.params.n_ctx) // _CONTEXTS_TO_SPILL)
    for n in range(_CONTEXTS_TO_SPILL):
        expect(most - n * stride)
    while stride > max(alignment, _SMALL_SHARE * most):
        stride //= 2
        around = best()
        expect(around - stride)
        expect(around + stride)
    return best()


def _largest_context(
    state: SearchState,
    best: Trial,
    too_large: int,
    attempt: Callable[[int], Trial | None],
    promises: Callable[[SearchState, int], bool],
) -> Trial:
    """The largest context at which ``attempt`` succeeds, between that of ``best`` and ``too_large``.

    Ends when the next larger context was measured and does not fit.
    """
    step = state.request.alignment
    for tries in range(_MAX_CONTEXTS):
        low, high = best.params.n_ctx // step, -(-too_large // step)
        if high - low <= 1:
            break
        guess = (low + high) // 2
        if tries < _MAX_CONTEXTS // 2:
            guess = last_true(low, high, lambda n: promises(state, n * step))
            guess = min(max(guess, low + 1), high - 1)
        trial = attempt(guess * step)
        if trial is None:
            too_large = guess * step
        else:
            best = trial
    return best


def _top(state: SearchState) -> Trial:
    """The default at the largest context that llama.cpp survives.

    It aborts, for one, where the cache of a layer is larger than a tensor may be on the device.
    """
    low, high = state.request.n_ctx_min, state.request.n_ctx_max
    try:
        return state.trial(state.default, high)
    except LlamaCppCrashError:
        if low == high:
            raise
    best, too_large, step = state.trial(state.default, low), high, state.request.alignment
    for _ in range(_MAX_CRASHES):
        n_ctx = (best.params.n_ctx + too_large) // 2 // step * step
        if n_ctx <= best.params.n_ctx:
            break
        try:
            best = state.trial(state.default, n_ctx)
        except LlamaCppCrashError:
            too_large = n_ctx
    return best


def _on_host(state: SearchState, floor: int | None) -> Trial | None:
    """The largest context without any device."""

    def attempt(n_ctx: int) -> Trial | None:
        trial = state.trial(state.default, n_ctx)
        return trial if trial.fits else None

    if floor is not None:
        return attempt(floor)
    low = state.request.n_ctx_min
    top = _top(state)
    if top.fits or top.params.n_ctx == low:
        return top
    bottom = state.trial(state.default, low)
    return _largest_context(state, bottom, top.params.n_ctx, attempt, likely_fits_host) if bottom.fits else None
