"""Choice of the context: the largest one with which the request takes little longer than with the quickest. Tokens.

``search_order`` finds the best trial at one context. Estimates tell at which contexts it is asked to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fitter.errors import LlamaCppCrashError
from fitter.planning.pricing.objective import AS_QUICK, LITTLE_CONTEXT, longest_seconds, rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import is_whole
from fitter.planning.search.corrections import best_at, settle_partial, whole_at
from fitter.planning.search.expectations import (
    context_in_total,
    expected_seconds,
    expected_whole,
    is_tight,
    last_true,
    likely_fits_host,
)
from fitter.planning.search.search_state import SearchState
from fitter.planning.search.variants import Answer

_MISSES = 3
"""After so many wrong estimates the search bisects the contexts.

With 2, Nemotron-H 9B on a GTX 1060 takes 20 loads instead of 12; with 20, Llama 3.1 8B with itself as a draft model on
three cards of 8 GiB takes 92 instead of 78."""

_MAX_CONTEXTS = 40
"""At most so many contexts are tried: it ends a search that errs."""

_MAX_CRASHES = 8
"""At most so many contexts are tried below one at which llama.cpp aborts."""


At = Callable[[int], Answer]
"""Finds the best trial at a context."""


class ContextChoice:
    """The choice of the context for one request.

    With prices, the request may take ``context_cost`` longer than with the quickest context. Without, weights leave the
    devices only for a context that the devices hold in total, as with upstream's fit.

    Args:
        state: the search on all devices.
        at: finds the best trial at a context.
    """

    def __init__(self, state: SearchState, at: At) -> None:
        self._state = state
        self._request = state.original_request
        self._at = at
        self._quickest = math.inf
        self._in_total = 0
        self._has_devices = bool(state.devices)

    def best(self) -> Answer:
        """Find the best answer at the largest context that the rule accepts, or the one that lacks least."""
        low, high = self._request.n_ctx_min, self._request.n_ctx_max
        if low == high:
            return self._at(high)
        top = self._answer(high) if self._starts_high() else None
        if top and top.trial.fits and self._is_certain(top):
            return top
        bottom = self._at(low)
        self._quickest, self._has_devices = self._seconds(bottom), bool(bottom.trial.devices)
        if not bottom.trial.fits:
            return bottom
        if top and self._accepts(top):
            return top
        if not bottom.trial.params.devices:
            return self._most_on_host(bottom)
        if self._is_for_most:
            return self._most(bottom, high)
        best = self._more_whole(bottom, high)
        return self._more_partial(best, high) if self._state.is_priced else self._more_in_total(best, high)

    def larger_than(self, best: Answer) -> Trial:
        """Find the best trial at the largest context that the rule accepts, with plans like ``best``."""
        self._quickest = min(self._quickest, self._seconds(best))
        if not best.trial.devices:
            return best.trial
        return self._largest_partial(best, min(self._request.n_ctx_max, best.state.request.n_ctx_max)).trial

    def _starts_high(self) -> bool:
        """Whether the largest context is worth a load before the smallest: it may cost no time."""
        if self._is_for_most or not self._state.devices:
            return True
        if is_tight(self._state, self._request.n_ctx_min):
            return False
        at = self._state.at(self._request.n_ctx_max)
        try:
            return bool(at.devices) and whole_at(at) is not None
        except LlamaCppCrashError:
            return False

    @property
    def _is_for_most(self) -> bool:
        return self._state.is_priced and self._request.is_for_most_context

    @property
    def _limit(self) -> float:
        return longest_seconds(self._request, self._quickest)

    def _answer(self, n_ctx: int) -> Answer | None:
        """Return the answer at ``n_ctx``; ``None`` where llama.cpp aborts, as for a tensor that is too large."""
        try:
            return self._at(n_ctx)
        except LlamaCppCrashError:
            return None

    def _seconds(self, answer: Answer) -> float:
        """Return the seconds of an answer; 0 without prices."""
        trial, state = answer.trial, answer.state
        if trial.seconds is None and state.is_priced:
            state.prices()
            return state.seconds(trial.placement, trial.breakdown)
        return trial.seconds or 0.0

    def _is_certain(self, answer: Answer) -> bool:
        """Whether the rule accepts an answer that fits, whatever is quickest: by its lower bound."""
        if not self._state.is_priced:
            return self._is_whole(answer.trial)
        return answer.distance <= longest_seconds(self._request, 1.0)

    def _accepts(self, answer: Answer) -> bool:
        if self._state.is_priced or not answer.trial.fits:
            return answer.trial.fits and self._seconds(answer) <= self._limit
        return answer.trial.params.n_ctx <= self._in_total or self._is_whole(answer.trial)

    def _is_whole(self, trial: Trial) -> bool:
        return bool(trial.devices) is self._has_devices and is_whole(self._request, trial.devices, trial.placement)

    def _or_larger(self, best: Answer, n_ctx: int) -> Answer:
        """Return the answer at ``n_ctx`` if that is larger and accepted, else ``best``."""
        answer = self._answer(n_ctx) if n_ctx > best.trial.params.n_ctx else None
        return answer if answer and self._accepts(answer) else best

    def _most_on_host(self, best: Answer) -> Answer:
        """Find the answer at the largest context without devices, which have no room even at the smallest."""
        state = self._state.on(())

        def attempt(n_ctx: int) -> bool:
            nonlocal best
            at = state.at(n_ctx)
            answer = Answer(best_at(at), at)
            if not self._accepts(answer):
                return False
            best = answer
            return True

        bottom = best
        if not attempt(state.request.n_ctx_max):
            low, high = best.trial.params.n_ctx, state.request.n_ctx_max
            self._largest(self._between(low, high), attempt, lambda n_ctx: likely_fits_host(state, n_ctx))
        # a device may still have room for weights of layers whose cache is on the host
        with_devices = self._or_larger(bottom, best.trial.params.n_ctx)
        return with_devices if rank(with_devices.trial) > rank(best.trial) else best

    def _most(self, best: Answer, high: int) -> Answer:
        """Find the answer at the largest context that any placement has room for."""

        def attempt(n_ctx: int) -> bool:
            nonlocal best
            best = self._or_larger(best, n_ctx)
            return best.trial.params.n_ctx == n_ctx

        state, contexts = self._state, self._between(best.trial.params.n_ctx, high)
        self._largest(contexts, attempt, lambda n_ctx: likely_fits_host(state, n_ctx))
        return best

    def _more_whole(self, best: Answer, high: int) -> Answer:
        """Find the answer at the largest context with the whole model on the devices in use, or on more of them."""
        start, widest = best, self._state.at(high)
        groups = start.trial.used[0], start.state.devices, self._state.devices, widest.devices
        for devices in dict.fromkeys(groups):
            known = start.state
            state = known if devices == known.devices else known.on(devices)
            if state.loses_pipeline(state.default, best.trial.params.n_ctx):
                # one device has chosen a micro batch that several could not work on at once
                known, state = self._state, self._state.on(devices)
            if not devices or not state.with_buffers_of(known).buffers.knows(True):
                continue

            def attempt(n_ctx: int, state: SearchState = state) -> bool:
                at = state.at(n_ctx)
                trial = whole_at(at)
                return trial is not None and self._accepts(Answer(trial, at))

            def promises(n_ctx: int, state: SearchState = state) -> bool:
                return likely_fits_host(state, n_ctx) and expected_whole(state, n_ctx) <= self._limit

            step = self._request.alignment
            too_large = (min(high, state.request.n_ctx_max) // step + 1) * step
            contexts = self._between(best.trial.params.n_ctx, too_large)
            best = self._or_larger(best, self._largest(contexts, attempt, promises) or 0)
        return best

    def _between(self, low: int, high: int) -> range:
        """Return the contexts that llama.cpp takes above ``low`` and below ``high``."""
        step = self._request.alignment
        return range((low // step + 1) * step, high, step)

    def _largest(
        self,
        contexts: Sequence[int],
        attempt: Callable[[int], bool],
        promises: Callable[[int], bool],
        is_hopeless: Callable[[int], bool] = lambda n_ctx: False,
    ) -> int | None:
        """Find the largest of ``contexts`` at which ``attempt`` succeeds; ``None`` if it does at none.

        Ends when the next larger context was measured, and failed, or ``is_hopeless``. ``promises`` tells the first
        contexts to try.
        """
        first, last, near, crashes, misses = -1, len(contexts), None, 0, 0
        for _ in range(_MAX_CONTEXTS):
            if last - first <= 1 or crashes > _MAX_CRASHES or is_hopeless(contexts[first + 1]):
                break
            guess, is_promised = (first + last) // 2, True
            if misses < _MISSES and not crashes:
                guess = last_true(first, last, lambda index: promises(contexts[index]), near)
                is_promised = guess > first
                guess = min(max(guess, first + 1), last - 1)
            try:
                is_success = attempt(contexts[guess])
            except LlamaCppCrashError:
                is_success, crashes = False, crashes + 1
            misses += is_success is not is_promised
            if is_success:
                first, near = guess, guess + 1
            else:
                last, near = guess, guess - 1
        return contexts[first] if first >= 0 else None

    def _more_partial(self, best: Answer, high: int) -> Answer:
        """Find the answer at the largest round context for which weights leave the devices."""
        high = min(high, best.state.request.n_ctx_max)
        if expected_seconds(best.state, high) <= self._limit and (top := self._or_larger(best, high)) is not best:
            return top
        found = self._largest_partial(best, high)
        answer = self._or_larger(best, found.trial.params.n_ctx)
        return answer if rank(answer.trial) > rank(found.trial) else found

    def _largest_partial(self, best: Answer, high: int) -> Answer:
        """Find the largest round context that the rule accepts with weights on the host and the devices of ``best``."""
        state, found = best.state, best

        def promises(n_ctx: int) -> bool:
            return expected_seconds(state, n_ctx) <= self._limit

        def is_hopeless(n_ctx: int) -> bool:
            return state.buffers.knows(False) and expected_seconds(state, n_ctx) > (1 + AS_QUICK) * self._limit

        def attempt(n_ctx: int) -> bool:
            nonlocal state, found
            at = state.at(n_ctx).with_buffers_of(state)
            trial = settle_partial(at, n_ctx, self._limit)
            if not at.has_lost_flash:
                # buffers grow by a line with the context
                state = state.with_buffers_of(at)
            if trial is None or not self._accepts(Answer(trial, at)):
                return False
            # the nearest smaller context tells most of those above it
            state, found = at, Answer(trial, at)
            return True

        contexts = _round(best.trial.params.n_ctx, high, self._request.alignment)
        # less context than the first is not worth the time of the first weights on the host
        if not self._is_whole(best.trial) or (contexts and promises(contexts[0])):
            self._largest(contexts, attempt, promises, is_hopeless)
        return found

    def _more_in_total(self, best: Answer, high: int) -> Answer:
        """Try the context that the devices hold in total, as upstream's fit does, and one between it and ``best``."""
        low, state = best.trial.params.n_ctx, self._state
        high = min(high, state.request.n_ctx_max)
        try:
            top, bottom = (state.trial(state.default, n_ctx) for n_ctx in (high, self._request.n_ctx_min))
        except LlamaCppCrashError:
            return best
        most = self._in_total = context_in_total(state, top, bottom)
        for n_ctx in (most, (low + most) // 2 // self._request.alignment * self._request.alignment):
            larger = self._or_larger(best, n_ctx)
            if larger is not best:
                return larger
        return best


def _round(low: int, high: int, step: int) -> list[int]:
    """List round contexts above ``low`` by an eighth or more, up to ``high``: eight to fifteen times a power of two.

    They are the same for every machine, so that one with more memory never has less context.
    """
    sizes = (eighths << power for power in range((high // step).bit_length()) for eighths in range(8, 16))
    contexts = sorted({*range(step, 8 * step, step), *(step * size for size in sizes), high})
    return [n_ctx for n_ctx in contexts if low * (1 + LITTLE_CONTEXT) <= n_ctx <= high]
