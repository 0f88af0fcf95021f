"""Choice of the context: the largest with the whole model on devices, or a longer one with weights on the host. Tokens.

``device_choice`` asks for the best trial on each choice of devices. A ``floor`` is the least context of a plan with
weights on the host; ``None`` to find it here.
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
"""Most contexts to test between a fitting context and a larger one; the second half is a bisection."""
_MAX_CRASHES = 8
"""At most so many contexts are tried below one at which llama.cpp aborts."""

_CONTEXTS_TO_SPILL = 8
"""Number of contexts to estimate between the largest without spilling and the devices' total room."""

_MAX_SPILLED, _MAX_DISAPPOINTED = 5, 2
"""At most so many of those are measured, and so many of them may disappoint."""

_SMALL_SHARE = 0.004
"""A smaller share of a context is not worth another estimate."""


def best_on(state: SearchState, floor: int | None = None) -> Trial:
    """Find the best trial on the devices of ``state``, or where none fits the one that lacks least."""
    request = state.request
    if "n_ctx" in request.fixed:
        trial = _at_context(state, request.params.n_ctx)
    elif not state.devices:
        trial = _on_host(state, floor)
    elif request.objective == "context" and state.is_priced:
        trial = _most_context(state)
    else:
        trial = _with_context(state, floor)
    return trial or state.least or state.trial(state.default, state.smallest_context)


def _at_context(state: SearchState, n_ctx: int) -> Trial | None:
    """Find the best trial at one context."""
    if is_too_large(state, n_ctx):
        return settle_partial(state, n_ctx)
    if state.chooses_devices and (fastest := settle_fastest(state, n_ctx)):
        return fastest
    trial = state.trial(state.default, n_ctx)
    if trial.fits or not state.devices:
        return trial
    return settle_whole(state, n_ctx) or settle_partial(state, n_ctx)


def _most_context(state: SearchState) -> Trial | None:
    """Find the trial with the largest context that any placement has room for."""
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
    """Find the best trial with an open context."""
    low, high = state.request.n_ctx_min, state.request.n_ctx_max
    if is_too_large(state, low):
        return settle_partial(state, max(low, floor or 0))
    if low < high and is_tight(state, low):
        bottom = state.trial(state.default, low)
        if total_used(state, bottom, state.devices) >= total_target(state):
            # a larger context has even less room
            return settle_whole(state, low) or settle_partial(state, max(low, floor or 0))
    if state.chooses_devices and (fastest := settle_fastest(state, high)):
        return fastest
    top = _top(state)
    if top.fits:
        return top
    if trial := settle_whole(state, top.params.n_ctx):
        return trial
    return settle_partial(state, low) if top.params.n_ctx == low else _best_below(state, top, floor)


def _best_below(state: SearchState, top: Trial, floor: int | None) -> Trial | None:
    """Find the best trial with less context than ``top``, which is too large for the whole model on devices."""
    low, high = state.request.n_ctx_min, top.params.n_ctx
    bottom = state.trial(state.default, low)
    least = floor or context_in_total(state, top, bottom)
    best = bottom if bottom.fits else settle_whole(state, low)
    if best is None:
        return settle_partial(state, least) or (settle_partial(state, low) if least > low else None)
    best = _largest_context(state, best, high, lambda n_ctx: settle_whole(state, n_ctx), likely_fits_whole)
    return best if best.params.n_ctx >= least else _spilled_beyond(state, best, least, floor)


def _spilled_beyond(state: SearchState, whole: Trial, most: int, floor: int | None) -> Trial:
    """Try contexts above that of ``whole``, up to ``most``, with weights on the host; return the best trial."""
    alignment = state.request.alignment
    best, tested, low, failed = whole, set[int](), whole.params.n_ctx, 0
    while len(tested) < _MAX_SPILLED and failed < _MAX_DISAPPOINTED and most > low:
        n_ctx = _worth_spilling(state, whole, most) if floor is None and state.can_price else most
        if n_ctx in tested:
            # newly learned compute buffers do not change the estimate any more
            break
        tested.add(n_ctx)
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
    """Estimate which context above that of ``whole``, up to ``most``, promises the best plan.

    A little more context can cost much time, where no tensor is small enough for the room that is left.
    """
    alignment, spread = state.request.alignment, spill_styles(state, most, is_plain=True)[0]
    seconds: dict[int, float] = {}

    def expect(n_ctx: int) -> None:
        n_ctx = n_ctx // alignment * alignment if n_ctx < most else most
        if whole.params.n_ctx < n_ctx and n_ctx not in seconds:
            seconds[n_ctx] = expected_partial(state, n_ctx, spread, is_plain=True)

    def best() -> int:
        best_n_ctx = most
        for n_ctx in seconds:
            is_first = math.isinf(seconds[best_n_ctx])
            if is_first or beats(state.request, (n_ctx, seconds[n_ctx]), (best_n_ctx, seconds[best_n_ctx])):
                best_n_ctx = n_ctx
        return best_n_ctx

    expect(most)
    if whole.seconds is not None and seconds[most] <= whole.seconds * (1 + GAIN):
        # the whole context costs no time
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
    """Find the largest context at which ``attempt`` succeeds, between that of ``best`` and ``too_large``.

    Ends when the next larger context was measured and does not fit. ``promises`` guesses the first contexts.
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
    """Measure the default placement at the largest context at which llama.cpp does not abort.

    It aborts, for example, where the cache of a layer is larger than a tensor may be on the device.
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
    """Find the trial with the largest context without devices."""

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
