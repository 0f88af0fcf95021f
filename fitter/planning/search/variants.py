"""Variants of a request at one context, and which of them to ask for next: the one that promises the least time.

A variant has a micro batch (``n_ubatch``), flash attention as llama.cpp decides or set, and caches with their layers or
on the host. A larger micro batch makes prompts faster and takes more compute buffer. Each variant has a search state of
its own, with compute buffers guessed from those that were measured: they grow by a line with the micro batch
(``Buffers.guess``). Before a variant is searched for, a placement is measured with it, which mostly is one more context
of a loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fitter.errors import LlamaCppError
from fitter.llama.types import FlashAttn, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import is_whole, micro_batches
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.capacity import is_too_large
from fitter.planning.search.compute_buffers import Buffers
from fitter.planning.search.expectations import expected_placement
from fitter.planning.search.proposals import most_saved_by, place_fastest
from fitter.planning.search.scratch import n_scores
from fitter.planning.search.search_state import SearchState
from fitter.planning.speed.explain import Choice

WORTH = GAIN / 2
"""The share of its time that another micro batch must promise to save."""

_LEAST_FOR_SPEED = 256
"""Smaller micro batches are tried only where nothing fits: ``tests/data/speeds`` has no prompts of theirs."""


@dataclass(frozen=True)
class Answer:
    """The best trial of some variants at one context.

    Attributes:
        distance: its time as a multiple of its lower bound.
        state: the search on its devices, with the compute buffers that they need.
    """

    trial: Trial
    distance: float
    state: SearchState


class Kind(NamedTuple):
    """How attention is computed: ``flash_attn`` and ``offload_kqv`` of ``Params``."""

    flash_attn: FlashAttn
    offload_kqv: bool = True


class Variant(NamedTuple):
    """What a variant sets: a kind of attention, and ``n_ubatch`` of ``Params``."""

    kind: Kind
    n_ubatch: int


class Variants:
    """Variants at one context, each asked for once.

    Args:
        state: the search state of the request as it came.
        of_kind: makes the state with another kind of attention.
    """

    def __init__(self, state: SearchState, of_kind: Callable[[Kind], SearchState]) -> None:
        params = state.request.params
        self.first = variant_of(params)
        self.first_seconds = math.inf
        """Seconds that the first variant is expected to take; infinite if it is not known."""
        self._n_ctx = params.n_ctx
        self._sizes = micro_batches(state.request) if state.devices else (params.n_ubatch,)
        self._of_kind = of_kind
        self._states = {self.first: state}
        self._measured: dict[Variant, Trial | None] = {}
        self._asked = set[Variant]()
        self._on_others = {(self.first, False)}

    def may_change_devices(self, best: Answer, others: Sequence[DeviceLimit]) -> bool:
        """Whether the variant of ``best`` was not yet tried on further devices, and on ``others``."""
        key = variant_of(best.trial.params), bool(others)
        is_new = key not in self._on_others and (best.trial.devices == best.state.devices or not best.trial.devices)
        self._on_others.add(key)
        return is_new and (best.trial.fits or bool(others))

    def next(self, best: Answer | None, kinds: Sequence[Kind]) -> SearchState | None:
        """Return the state of the variant to ask for next; ``None`` where none promises a better trial than ``best``.

        Args:
            best: the best answer so far. All further variants are on its devices.
            kinds: the kinds of attention that are open.
        """
        if best is None:
            return self._begin()
        if best.trial.devices == best.state.devices:
            self._move(best)
        if best.trial.devices != best.state.devices or not best.trial.devices:
            # the last layer alone, upstream's rules, or no device: micro batches say nothing
            kinds = [kind for kind in kinds if kind != variant_of(best.trial.params).kind]
        tried = set[Variant]()
        while True:
            promised = dict(self._promised(best, kinds))
            if not promised:
                return self._against_the_odds(best)
            chosen = min(promised, key=lambda variant: self._order(variant, promised[variant]))
            if chosen in tried or self._is_known(chosen, best.trial):
                return self._ask(chosen)
            tried.add(chosen)
            is_other = chosen.kind != variant_of(best.trial.params).kind
            placement = _first_placement(self.state(chosen)) if is_other else best.trial.placement
            if placement is None or self.measure(chosen, placement) is None:
                self._asked.add(chosen)

    def state(self, variant: Variant) -> SearchState:
        """Return the state of a variant, whose compute buffers are guessed until it is asked for."""
        if variant not in self._states:
            of_kind = self._states.get(self.first._replace(kind=variant.kind)) or self._of_kind(variant.kind)
            if of_kind.open != self._devices:
                of_kind = of_kind.on(self._devices)
            is_same = of_kind.request.params.n_ubatch == variant.n_ubatch
            self._states[variant] = of_kind if is_same else of_kind.with_micro_batch(variant.n_ubatch)
        state = self._states[variant]
        if variant not in self._asked:
            known, is_larger = self._buffers_like(variant.kind)
            state.buffers.guess(variant.n_ubatch, known, partial(_of_scores, state) if is_larger else _nothing)
        return state

    def _buffers_like(self, kind: Kind) -> tuple[dict[int, Buffers], bool]:
        """Return measured buffers by micro batch, most like those of a kind, and whether the kind's are larger."""
        as_asked = self.first.kind.flash_attn
        # nothing that was measured tells buffers with flash attention where llama.cpp had turned it off
        others = [] if kind.flash_attn == "on" else [kind._replace(flash_attn=as_asked), self.first.kind]
        for like in (kind, *others):
            trials = {each: trial for each, trial in self._measured.items() if each.kind == like}
            if trials:
                has_scores = any(trial and trial.breakdown.flash_attn is False for trial in trials.values())
                known = {each.n_ubatch: self._states[each].buffers for each in trials}
                return known, kind.flash_attn == "off" and not has_scores
        return {}, False

    def measure(self, variant: Variant, placement: Placement) -> Trial | None:
        """Measure a placement with a variant; ``None`` where llama.cpp refuses it."""
        state = self.state(variant)
        with suppress(LlamaCppError):
            self._measured[variant] = state.trial(placement, self._n_ctx)
            return self._measured[variant]
        return None

    def measured(self, state: SearchState) -> Trial | None:
        """Return what was measured with a variant before it was asked for."""
        return self._measured.get(variant_of(state.request.params))

    @property
    def _devices(self) -> tuple[DeviceLimit, ...]:
        return self._states[self.first].open

    def _is_for_speed(self, variant: Variant) -> bool:
        return variant.n_ubatch >= min(self.first.n_ubatch, _LEAST_FOR_SPEED)

    def _order(self, variant: Variant, seconds: float) -> tuple[bool, float]:
        is_as_asked = variant.kind.offload_kqv == self.first.kind.offload_kqv
        return variant.n_ubatch < _LEAST_FOR_SPEED, seconds if is_as_asked else seconds * (1 + GAIN)

    def _is_known(self, variant: Variant, trial: Trial) -> bool:
        """Whether compute buffers of a variant were measured with a placement like the one of ``trial``."""
        if variant.kind != variant_of(trial.params).kind:
            return variant in self._measured
        state = self._states[variant]
        return state.buffers.has_measured(is_whole(state.request, trial.devices, trial.placement))

    def _ask(self, variant: Variant) -> SearchState:
        self._asked.add(variant)
        state = self.state(variant)
        self._measured.setdefault(variant, None)
        return state

    def _move(self, best: Answer) -> None:
        """Go on on the devices of ``best``, where only its own compute buffers are known."""
        if best.state.open == self._devices:
            return
        here = variant_of(best.trial.params)
        self._states = {self.first: self._states[self.first].on(best.state.open), here: best.state}
        self._measured = {here: best.trial}

    def _begin(self) -> SearchState:
        """Return the state with the micro batch that promises the least time, by a load or two."""
        start = self.state(self.first)
        if len(self._sizes) < 2:
            return self._ask(self.first)
        start.prices()
        placement = _first_placement(start)
        if placement is None or self.measure(self.first, placement) is None:
            return self._ask(self.first)
        expected = expected_placement(start, self._n_ctx)
        best, least = self.first, math.inf if expected is None else start.seconds(expected)
        self.first_seconds = least

        def may_save(size: int) -> bool:
            return expected is None or self._may_save(self.first._replace(n_ubatch=size), self.first, expected, least)

        larger, smaller = ([*filter(may_save, sizes)] for sizes in self._others(self.first.n_ubatch))
        if larger or smaller:
            first = self.first.n_ubatch
            second = min(max(larger), 4 * first) if larger else max(min(smaller), first // 4)
            self.measure(self.first._replace(n_ubatch=second), placement)
        for sizes in (larger, smaller):
            for size in sizes if best == self.first else ():
                variant = self.first._replace(n_ubatch=size)
                seconds = likely_seconds(self.state(variant)) if may_save(size) else math.inf
                if seconds < least * (1 - WORTH):
                    best, least = variant, seconds
                elif math.isfinite(least):
                    break
        return self._ask(best)

    def _others(self, n_ubatch: int) -> tuple[list[int], list[int]]:
        """List the larger and the smaller micro batches, the nearest first."""
        larger = [size for size in self._sizes if size > n_ubatch]
        return larger, [size for size in reversed(self._sizes) if size < n_ubatch]

    def _promised(self, best: Answer, kinds: Iterable[Kind]) -> Iterable[tuple[Variant, float]]:
        """Yield the variants that promise a better trial than ``best``, each with its expected seconds."""
        trial = best.trial
        here = variant_of(trial.params)
        for kind in kinds:
            is_other = kind != here.kind
            least = math.inf
            if trial.fits and trial.expected is not None and trial.seconds is not None:
                # what an estimate misses in one kind of attention, such as splits of graphs, another kind may not have
                least = (trial.seconds if is_other else trial.expected) * (1 - WORTH)
            for sizes in ([here.n_ubatch], *self._others(here.n_ubatch)):
                for size in sizes:
                    variant = Variant(kind, size)
                    if variant in self._asked or (trial.fits and not self._is_for_speed(variant)):
                        continue
                    seconds = self._likely(variant, here, trial, least)
                    if seconds < least:
                        yield variant, seconds
                    is_larger = size > here.n_ubatch
                    is_less = seconds >= least and (is_larger or not is_other)
                    if trial.fits and (is_less or (is_larger and not self._is_known(variant, trial))):
                        # farther ones promise less, or more is known of them when this one is measured
                        break

    def _likely(self, variant: Variant, here: Variant, trial: Trial, least: float) -> float:
        if variant.kind != here.kind:
            if variant.kind.flash_attn == "on" and variant not in self._measured:
                # nothing that was measured tells its buffers, and one micro batch little of another's
                if variant.n_ubatch == here.n_ubatch:
                    return 0.0
                if not any(each.kind == variant.kind for each in self._measured):
                    return math.inf
            self.state(variant).prices()
        elif trial.fits and not self._may_save(variant, here, trial.placement, least / (1 - WORTH)):
            return math.inf
        elif trial.fits and variant.n_ubatch > here.n_ubatch and not self._is_known(variant, trial):
            # a guess says little of a placement that leaves no room
            return self.state(variant).seconds(trial.placement)
        return likely_seconds(self.state(variant))

    def _may_save(self, variant: Variant, here: Variant, placement: Placement, least: float) -> bool:
        """Whether another micro batch may save time over ``least``, from what it does to a placement that fits.

        A larger one leaves less room. What a smaller one frees holds weights, twice as useful as an average byte, or
        layers of a slower device.
        """
        state, start = self.state(variant), self.state(here)
        if not self._is_for_speed(variant) or state.loses_pipeline(placement, self._n_ctx):
            return False
        seconds = state.seconds(placement)
        if variant.n_ubatch < here.n_ubatch and not placement.is_spilled and state.chooses_split:
            seconds = min(seconds, likely_seconds(state))
        elif variant.n_ubatch < here.n_ubatch:
            in_whole = not (placement.first or placement.moved)
            rooms = (each.room(self._n_ctx, in_whole).with_caches for each in (state, start))
            freed = sum(max(0, more - less) for more, less in zip(*rooms, strict=True))
            seconds -= 2 * most_saved_by(start.situation(self._n_ctx, in_whole), placement, freed)
        return seconds < least * (1 - WORTH)

    def _against_the_odds(self, best: Answer) -> SearchState | None:
        """Return the state of the smallest usual micro batch where only smaller ones were expected to fit.

        Corrections may find a way.
        """
        if not best.trial.params.n_ubatch < _LEAST_FOR_SPEED <= self.first.n_ubatch:
            return None
        usual = (self.first._replace(n_ubatch=size) for size in self._sizes if size >= _LEAST_FOR_SPEED)
        variant = next((each for each in usual if each not in self._asked), None)
        is_open = variant is not None and not any(each.n_ubatch >= _LEAST_FOR_SPEED for each in self._asked)
        return self._ask(variant) if variant is not None and is_open else None


def variant_of(params: Params) -> Variant:
    """Return the variant of ``params``."""
    return Variant(Kind(params.flash_attn, params.offload_kqv), params.n_ubatch)


def is_little(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` has another micro batch than ``than``, and saves too little time for it."""
    if trial.params.n_ubatch == than.params.n_ubatch or trial.params.n_ctx > than.params.n_ctx:
        return False
    return trial.seconds is not None and than.seconds is not None and trial.seconds > than.seconds * (1 - WORTH)


def choice_of(chosen: Trial, variants: Variants) -> Choice | None:
    """Describe the choice of another micro batch than the first of ``variants``."""
    n_ubatch, first, seconds = chosen.params.n_ubatch, variants.first.n_ubatch, variants.first_seconds
    if chosen.seconds is None or n_ubatch == first or not chosen.seconds < seconds < math.inf:
        return None
    return Choice("the micro batch", f"-ub {n_ubatch}", chosen.seconds, f"-ub {first}", seconds)


def likely_seconds(state: SearchState) -> float:
    """Estimate as ``expected_seconds``; infinite also where the first device has no room for its buffer."""
    n_ctx = state.request.params.n_ctx
    placement = expected_placement(state, n_ctx)
    if placement is None:
        return math.inf
    # without layers, too, the first device has a buffer to compute prompts with the host's weights; without that device
    # another one has it
    if placement.is_spilled and 0 in placement.idle:
        is_alone = len(placement.idle) == len(state.devices)
        if not is_alone or state.room(n_ctx, is_whole=False).without[0] < 0:
            return math.inf
    return state.seconds(placement)


def _nothing(device: str, n_ctx: int, has_caches: bool) -> int:
    return 0


def _of_scores(state: SearchState, device: str, n_ctx: int, has_caches: bool) -> int:
    """Estimate the bytes by which a compute buffer is larger without flash attention: scores are 32-bit numbers.

    The first device has them even without caches, since it computes prompts of layers on the host.
    """
    is_there = has_caches or device == state.devices[0].name
    return 4 * n_scores(state.request, state.request.params, n_ctx) if is_there else 0


def _first_placement(state: SearchState) -> Placement | None:
    """Return the placement that a search measures first."""
    n_ctx = state.request.params.n_ctx
    if not is_too_large(state, n_ctx):
        at = state.situation(n_ctx, is_whole=True)
        return (place_fastest(at) if state.chooses_split else None) or state.default
    return state.place_partial(state.situation(n_ctx, is_whole=False))
