"""Choice of the micro batch (``n_ubatch``): a larger one makes prompts faster, and takes more compute buffer.

Searches with different micro batches are states of their own. Compute buffers grow by a line with the micro batch, so
those of two tell the others' (``Buffers.guess``), and the placement at hand is measured with a second micro batch: one
more context of a loaded model, which needs no load.
"""

from __future__ import annotations

import math
from contextlib import suppress

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import GAIN, rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import micro_batches
from fitter.planning.search.capacity import is_too_large
from fitter.planning.search.context_choice import Answer, best_at
from fitter.planning.search.expectations import expected_placement, spill_styles
from fitter.planning.search.proposals import most_saved_by, place_fastest
from fitter.planning.search.search_state import CutShort, SearchState
from fitter.planning.speed.explain import Choice

WORTH = GAIN / 2
"""The share of its time that another micro batch must promise to save."""

_LEAST_FOR_SPEED = 256
"""Smaller ones are tried only where nothing fits: ``tests/data/speeds`` has no prompts of theirs."""


class MicroBatches:
    """States of the same search on the same devices, one for each micro batch.

    Args:
        state: the state with one of them.
    """

    def __init__(self, state: SearchState) -> None:
        self.first = state.request.params.n_ubatch
        self._states = {self.first: state}
        self._measured = {self.first: state}
        self._promised: dict[int, float] = {}
        self._chosen: dict[int, float] = {}
        self.first_seconds = math.inf
        """Seconds that the first micro batch is expected to take; infinite if it is not known."""
        self.sizes = micro_batches(state.request)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.sizes) > 1 and bool(self._states[self.first].devices)

    def state(self, n_ubatch: int) -> SearchState:
        """Return the state with a micro batch, whose compute buffers are guessed until they are measured."""
        if n_ubatch not in self._states:
            self._states[n_ubatch] = self._states[self.first].with_micro_batch(n_ubatch)
        state = self._states[n_ubatch]
        if n_ubatch != self.first and n_ubatch not in self._chosen:
            state.buffers.guess(n_ubatch, {size: measured.buffers for size, measured in self._measured.items()})
        return state

    def measure(self, n_ubatch: int, placement: Placement, n_ctx: int) -> Trial | None:
        """Measure a placement with a micro batch; ``None`` where llama.cpp refuses it."""
        state = self.state(n_ubatch)
        with suppress(LlamaCppError):
            trial = state.trial(placement, n_ctx)
            self._measured[n_ubatch] = state
            return trial
        return None

    def quickest(self, n_ctx: int, *, can_grow: bool = True) -> SearchState:
        """Return the state with the micro batch that promises the least time at a context, by one load.

        ``can_grow``: whether it may be larger than the first one.
        """
        start = self.state(self.first)
        if not self.is_open:
            return start
        start.prices()
        placement = _first_placement(start, n_ctx)
        if placement is None or self.measure(self.first, placement, n_ctx) is None:
            return start
        expected = expected_placement(start, n_ctx)
        best, least = self.first, math.inf if expected is None else start.seconds(expected)
        self.first_seconds = self._promised[best] = least

        def may_save(size: int) -> bool:
            return expected is None or self._promises(size, expected, n_ctx, least)

        larger, smaller = ([*filter(may_save, sizes)] for sizes in (self._larger if can_grow else [], self._smaller))
        if larger or smaller:
            second = min(max(larger), 4 * self.first) if larger else max(min(smaller), self.first // 4)
            self.measure(second, placement, n_ctx)
        for sizes in (larger, smaller):
            for size in sizes if best == self.first else ():
                if not may_save(size):
                    continue
                seconds = self._promised[size] = likely_seconds(self.state(size), n_ctx)
                if seconds < least * (1 - WORTH):
                    best, least = size, seconds
                elif math.isfinite(least):
                    break
        return self._choose(best, least)

    def another(self, best: Trial, n_ctx: int) -> SearchState | None:
        """Return the state with a micro batch that promises less time than ``best`` takes, once; ``None`` without one.

        ``best`` is of another one, which promised still less. Where it takes much longer than that, smaller ones may
        leave the room that was missing.
        """
        if not self._chosen:
            return None
        if best.params.n_ubatch < _LEAST_FOR_SPEED <= self.first:
            # no larger one was expected to fit, but corrections may find a way
            untried = [size for size in self._promised if size >= _LEAST_FOR_SPEED and size not in self._chosen]
            return self._choose(min(untried), math.inf) if untried else None
        least = best.seconds * (1 - GAIN) if best.fits and best.seconds is not None else math.inf
        sizes = {size for size, seconds in self._promised.items() if seconds < least}
        if least > max(self._chosen.values(), default=0.0):
            sizes |= {size for size in self.sizes if size < max(self._chosen)}
        promised = {size: likely_seconds(self.state(size), n_ctx) for size in sorted(sizes - self._chosen.keys())}
        for_speed = [size for size in promised if size >= _LEAST_FOR_SPEED and promised[size] < math.inf]
        size = min(for_speed or promised, key=lambda size: promised[size], default=None)
        return None if size is None or promised[size] >= least else self._choose(size, promised[size])

    def _choose(self, n_ubatch: int, seconds: float) -> SearchState:
        self._chosen[n_ubatch] = seconds
        # the search of this state measures its buffers
        state = self._measured[n_ubatch] = self.state(n_ubatch)
        return state

    def may_take(self, seconds: float, n_ctx: int) -> bool:
        """Whether the largest micro batch for which there is room is expected to take that time at most."""
        each = (likely_seconds(self.state(size), n_ctx) for size in (self.first, *self._smaller))
        return next(filter(math.isfinite, each), math.inf) <= seconds

    @property
    def _larger(self) -> list[int]:
        return [size for size in self.sizes if size > self.first]

    @property
    def _smaller(self) -> list[int]:
        return [size for size in reversed(self.sizes) if size < self.first]

    def _promises(self, n_ubatch: int, placement: Placement, n_ctx: int, least: float) -> bool:
        """Whether a micro batch may save time over ``least`` seconds, from what it does to a placement that fits.

        A larger one leaves less room. What a smaller one frees holds weights, twice as useful as an average byte.
        """
        if n_ubatch < min(self.first, _LEAST_FOR_SPEED):
            return False
        state, start = self.state(n_ubatch), self.state(self.first)
        if state.loses_pipeline(placement):
            return False
        seconds = state.seconds(placement)
        if n_ubatch < self.first:
            is_whole = not (placement.first or placement.moved)
            rooms = (each.room(n_ctx, is_whole).with_caches for each in (state, start))
            freed = sum(max(0, more - less) for more, less in zip(*rooms, strict=True))
            seconds -= 2 * most_saved_by(start.situation(n_ctx, is_whole), placement, freed)
        return seconds < least * (1 - WORTH)

    def improved(self, best: Answer) -> Answer:
        """Try larger and smaller micro batches on the devices of ``best``, where they promise a better trial."""
        if not self.is_open or best.trial.devices != self.state(self.first).devices:
            # of the last layer alone, or of upstream's rules
            return best
        before = best
        # a larger one needs more memory
        for sizes in (self._larger if best.trial.fits else [], self._smaller):
            for size in sizes if best is before else ():
                trial = self._attempt(size, best.trial)
                if trial is not None and rank(trial) > rank(best.trial):
                    share = (trial.seconds or 1.0) / (best.trial.seconds or 1.0)
                    best = Answer(trial, best.distance * share, self.state(size))
                elif best.trial.fits:
                    break
        return best

    def _attempt(self, n_ubatch: int, best: Trial) -> Trial | None:
        """Find the best trial with a micro batch; ``None`` if it promises none that is better than ``best``."""
        n_ctx, state = best.params.n_ctx, self.state(n_ubatch)
        least = math.inf if best.expected is None or not best.fits else best.expected * (1 - WORTH)
        if state.loses_pipeline(best.placement):
            return None
        if best.fits and not self._promises(n_ubatch, best.placement, n_ctx, best.expected or math.inf):
            return None
        if n_ubatch < best.params.n_ubatch and likely_seconds(state, n_ctx) >= least:
            return None
        with suppress(LlamaCppError, TimeLimitError, CutShort):
            trial = self.measure(n_ubatch, best.placement, n_ctx)
            if likely_seconds(state, n_ctx) < least:
                found = best_at(state)
                trial = found if trial is None or rank(found) > rank(trial) else trial
            return trial
        return None


def is_little(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` has another micro batch than ``than``, and saves too little time for it."""
    if trial.params.n_ubatch == than.params.n_ubatch or trial.params.n_ctx > than.params.n_ctx:
        return False
    return trial.seconds is not None and than.seconds is not None and trial.seconds > than.seconds * (1 - WORTH)


def choice_of(chosen: Trial, batches: MicroBatches) -> Choice | None:
    """Describe the choice of another micro batch than the first of ``batches``."""
    n_ubatch, seconds = chosen.params.n_ubatch, batches.first_seconds
    if chosen.seconds is None or n_ubatch == batches.first or not chosen.seconds < seconds < math.inf:
        return None
    return Choice("the micro batch", f"-ub {n_ubatch}", chosen.seconds, f"-ub {batches.first}", seconds)


def likely_seconds(state: SearchState, n_ctx: int) -> float:
    """Estimate as ``expected_seconds``; infinite also where a device without layers has no room for its buffer."""
    placement = expected_placement(state, n_ctx)
    if placement is None:
        return math.inf
    # without layers, too, the first device has a buffer to compute prompts with the host's weights
    is_idle = len(placement.idle) == len(state.devices)
    has_room = not is_idle or min(state.room(n_ctx, is_whole=False).without[:1], default=0) >= 0
    return state.seconds(placement) if has_room else math.inf


def _first_placement(state: SearchState, n_ctx: int) -> Placement | None:
    """Return the placement that a search measures first."""
    if not is_too_large(state, n_ctx):
        at = state.situation(n_ctx, is_whole=True)
        return (place_fastest(at) if state.chooses_split else None) or state.default
    spread = spill_styles(state, n_ctx)[0]
    return state.place_partial(state.situation(n_ctx, is_whole=False), spread)
