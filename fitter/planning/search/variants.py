"""Variants of a request at one context, and which of them to ask for next: the one that promises the least time.

A variant has devices in their order, a micro batch (``n_ubatch``), flash attention as llama.cpp decides or set, and
caches with their layers or on the host. ``device_choice`` lists other devices; here are other micro batches and kinds
of attention. A larger micro batch makes prompts faster and takes more compute buffer. Each variant has a search state
of its own, with compute buffers guessed from those that were measured: they grow by a line with the micro batch
(``Buffers.guess``). Before a variant is searched for, a placement is measured with it, which mostly is one more context
of a loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from fitter.errors import LlamaCppError
from fitter.llama.types import FlashAttn, Layout, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import GAIN, rank
from fitter.planning.pricing.pricing import MeasuredPlacement, bound_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import (
    is_whole,
    micro_batches,
    needs_devices,
    pinned_devices,
    user_chose_devices,
)
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.request.shared import LEAST_FOR_SPEED
from fitter.planning.search.corrections import best_at
from fitter.planning.search.expectations import expected_placement, is_too_large
from fitter.planning.search.proposals import most_saved_by, place_whole
from fitter.planning.search.room import Buffers
from fitter.planning.search.search_state import SearchState
from fitter.planning.speed.explain import Choice
from fitter.planning.speed.work import resized_layout

WORTH = GAIN / 2
"""The share of its time that another micro batch must promise to save."""


@dataclass(frozen=True)
class Answer:
    """The best trial of some variants at one context.

    Attributes:
        state: the search on its devices, with the compute buffers that they need.
    """

    trial: Trial
    state: SearchState

    @cached_property
    def distance(self) -> float:
        """Its time as a multiple of the lower bound at the smallest context; 1 without a bound."""
        return self._distance(self.state.smallest_layout)

    @cached_property
    def distance_at_its_context(self) -> float:
        """Its time as a multiple of the lower bound at its context; 1 without a bound."""
        layout, request = self.state.smallest_layout, self.state.original_request
        return self._distance(layout and resized_layout(request.facts, layout, request.params, self.trial.params))

    def _distance(self, layout: Layout | None) -> float:
        trial, request = self.trial, self.state.original_request
        if layout is None or trial.seconds is None:
            return 1.0
        measured = MeasuredPlacement(request, *trial.used, trial.params, trial.breakdown, layout)
        is_off = trial.breakdown.flash_attn is False
        bound = bound_of(request, layout, trial.seconds, None, measured.host_only_everywhere, is_without_flash=is_off)
        return bound.times if bound else 1.0


class Kind(NamedTuple):
    """How attention is computed: ``flash_attn`` and ``offload_kqv`` of ``Params``."""

    flash_attn: FlashAttn
    offload_kqv: bool = True


class Variant(NamedTuple):
    """What a variant sets: a kind of attention, ``n_ubatch`` of ``Params``, devices, or the last layer alone there."""

    kind: Kind
    n_ubatch: int
    devices: tuple[DeviceLimit, ...] = ()
    last_layer: bool = False

    def differs(self, other: Variant) -> bool:
        """Whether it differs in more than its micro batch, so that a placement of ``other`` tells nothing of it."""
        return self[0] != other[0] or self[2] != other[2]


class Variants:
    """Variants at one context, each asked for once, and the best answer so far.

    Args:
        state: the search state of the request as it came.
        of_kind: makes the state with another kind of attention.
    """

    def __init__(self, state: SearchState, of_kind: Callable[[Kind], SearchState]) -> None:
        params = state.request.params
        self.request = state.original_request
        self.first = Variant(*variant_of(params)[:2], state.open)
        self.first_seconds = math.inf
        """Seconds that the first variant is expected to take; infinite if it is not known."""
        self.devices = state.open
        """The devices that a variant may use."""
        self._n_ctx = params.n_ctx
        self._sizes = micro_batches(state.request) if state.devices else (params.n_ubatch,)
        self._of_kind = of_kind
        self._first_state = state
        self._states = {self.first: state}
        self._measured: dict[Variant, Trial | None] = {}
        self._answers: dict[Variant, Answer] = {}
        self._asked = set[Variant]()
        self._on_others = {(self.first[:2], False)}
        self._best: Answer | None = None

    @property
    def best(self) -> Answer:
        """The best answer so far."""
        assert self._best is not None
        return self._best

    @property
    def here(self) -> Variant:
        """The variant of the best answer."""
        return Variant(*variant_of(self.best.trial.params)[:2], self.best.state.open)

    def take(self, answer: Answer) -> bool:
        """Return whether ``answer`` is better than all before it, and keep it then."""
        is_better = self._best is None or rank(answer.trial) > rank(self._best.trial)
        if is_better:
            before = self._best.state.open if self._best else self.first.devices
            self._best = answer
            if before != answer.state.open:
                # on other devices only its own compute buffers are known
                self._measured[self.here] = answer.trial
                self._states.setdefault(self.here, answer.state)
        return is_better

    def price_best(self) -> None:
        """Price the best trial: it was measured before sizes were recorded where all of the model has room at once."""
        best, state = self.best, self.best.state
        state.prices()
        seconds = state.seconds(best.trial.placement, best.trial.breakdown)
        self._best = replace(best, trial=replace(best.trial, seconds=seconds))

    def may_change_devices(self, others: Sequence[DeviceLimit]) -> bool:
        """Whether the variant of the best answer was not yet tried on further devices, and on ``others``."""
        best = self.best
        key = self.here[:2], bool(others)
        is_new = key not in self._on_others and (best.trial.devices == best.state.devices or not best.trial.devices)
        self._on_others.add(key)
        return is_new and (best.trial.fits or bool(others))

    def ask(self, variant: Variant) -> Answer:
        """Find the best trial of a variant on its devices, or on those of them that it has a use for."""
        answer = best = self.settle(variant)
        # the best answer has a use for all of its devices
        is_settled = (
            variant.last_layer or user_chose_devices(self.request) or (self._best and variant[2] == self.here[2])
        )
        while answer.state.devices and not is_settled:
            useless = _useless(self.request, answer.state.devices, answer.trial)
            useful = self.first_of_equal(each for each in answer.state.devices if each not in useless)
            # without devices, only the first kind of attention has a meaning
            if not useless or (not useful and (needs_devices(self.request) or variant.kind != self.first.kind)):
                break
            answer = self.settle(variant._replace(devices=useful))
            if rank(best.trial) <= rank(answer.trial):
                best = answer
        return best

    def settle(self, variant: Variant) -> Answer:
        """Find the best trial of a variant on its devices, once."""
        if variant not in self._answers:
            state, before = self.state(variant), self._measured.get(variant)
            trial = best_at(_with_last_layer(state, variant.devices) if variant.last_layer else state)
            if before and before.fits and rank(before) > rank(trial):
                trial = before
            self._answers[variant] = Answer(trial, state)
        return self._answers[variant]

    def is_tested(self, variant: Variant) -> bool:
        """Whether the best trial of a variant on its devices was looked for."""
        return variant in self._answers

    def first_of_equal(self, devices: Iterable[DeviceLimit]) -> tuple[DeviceLimit, ...]:
        """Replace devices by the first ones that are equal to them, in the user's order."""
        left: dict[tuple[object, ...], list[DeviceLimit]] = {}
        for device in self.devices:
            left.setdefault(self._likes(device), []).append(device)
        return tuple((left.get(self._likes(device)) or [device]).pop(0) for device in devices)

    def _likes(self, device: DeviceLimit) -> tuple[object, ...]:
        is_named = device in pinned_devices(self.request) or "devices" in self.request.fixed
        return self.request.speeds.get(device.name), device.target, device.largest_tensor, is_named and device.name

    def next(self, kinds: Sequence[Kind]) -> Variant | None:
        """Return the variant to ask for next; ``None`` where none promises a better trial than the best.

        It is on the devices of the best answer.

        Args:
            kinds: the kinds of attention that are open.
        """
        best, here = self.best, self.here
        if best.trial.devices != best.state.devices:
            # the last layer alone: micro batches say nothing
            kinds = [kind for kind in kinds if kind != here.kind]
        tried = set[Variant]()
        while True:
            promised = dict(self._promised(kinds))
            if not promised:
                return None
            chosen = min(promised, key=lambda variant: self._order(variant, promised[variant]))
            if chosen in tried or self._is_known(chosen, best.trial):
                return self._next(chosen)
            tried.add(chosen)
            placement = _first_placement(self.state(chosen)) if chosen.differs(here) else best.trial.placement
            if placement is None or self.measure(chosen, placement) is None:
                self._asked.add(chosen)

    def state(self, variant: Variant) -> SearchState:
        """Return the state of a variant, whose compute buffers are guessed until it is asked for."""
        if variant not in self._states:
            is_first = variant.kind == self.first.kind
            state = self._first_state if is_first else self._of_kind(variant.kind)
            if state.open != variant.devices and not variant.last_layer:
                state = state.on(variant.devices)
            is_same = state.request.params.n_ubatch == variant.n_ubatch
            self._states[variant] = state if is_same else state.with_micro_batch(variant.n_ubatch)
        state = self._states[variant]
        if not self._is_asked(variant):
            state.buffers.guess(variant.n_ubatch, self._buffers_like(variant))
        return state

    def _buffers_like(self, variant: Variant) -> dict[int, Buffers]:
        """Return measured buffers by micro batch, most like a variant's; none where no measurement tells them.

        Those with more devices tell them, too. Without flash attention they are no smaller than with it; where
        llama.cpp turned it off, they tell nothing.
        """
        flash = variant.kind.flash_attn

        def tells(each: Variant, trial: Trial | None, kind: Kind) -> bool:
            has_flash = trial is not None and trial.breakdown.flash_attn and not self._states[each].has_lost_flash
            return each.kind == kind and (kind.flash_attn == flash or (flash == "off" and bool(has_flash)))

        for kind, is_same in product((variant.kind, self.first.kind), (True, False)):
            known = {
                each.n_ubatch: self._states[each].buffers
                for each, trial in self._measured.items()
                if tells(each, trial, kind)
                and (each.devices == variant.devices if is_same else {*each.devices} >= {*variant.devices})
            }
            if known:
                return known
        return {}

    def measure(self, variant: Variant, placement: Placement) -> Trial | None:
        """Measure a placement with a variant; ``None`` where llama.cpp refuses it."""
        state = self.state(variant)
        with suppress(LlamaCppError):
            self._measured[variant] = state.trial(placement, self._n_ctx)
            return self._measured[variant]
        return None

    def _choices(self, kind: Kind) -> list[tuple[DeviceLimit, ...]]:
        """List the devices on which a kind may be better than the best answer.

        Another kind than that may have a use for all devices, for those alone that have something, and where a device
        lacks memory with it, for the others.
        """
        here, found = self.here, list[tuple[DeviceLimit, ...]]()
        if kind == here.kind and here.devices:
            return [here.devices]
        for devices in (here.devices, self.devices, self.first_of_equal(self.best.trial.used[0])):
            while devices and devices not in found:
                found.append(devices)
                measured = (
                    trial for each, trial in self._measured.items() if (each.kind, each.devices) == (kind, devices)
                )
                if trial := self._measured.get(Variant(kind, here.n_ubatch, devices)) or next(measured, None):
                    if not trial.fits and rank(replace(trial, missing=())) <= rank(self.best.trial):
                        # slower even with memory that there is not
                        break
                    used = trial.used[0]
                    useless = _useless(self.request, used, trial) if used == devices else []
                    devices = self.first_of_equal(device for device in used if device not in useless)
        return found

    def _is_asked(self, variant: Variant) -> bool:
        """Whether a variant was asked for, as the kind of the first one and of the best answer is on any devices."""
        if variant.kind in (self.first.kind, self._best and self.here.kind):
            return any(variant[:2] == each[:2] for each in self._asked)
        return variant in self._asked

    def _is_for_speed(self, variant: Variant) -> bool:
        return variant.n_ubatch >= min(self.first.n_ubatch, LEAST_FOR_SPEED)

    def _order(self, variant: Variant, seconds: float) -> tuple[bool, float]:
        is_as_asked = variant.kind.offload_kqv == self.first.kind.offload_kqv
        return variant.n_ubatch < LEAST_FOR_SPEED, seconds if is_as_asked else seconds * (1 + GAIN)

    def _is_known(self, variant: Variant, trial: Trial) -> bool:
        """Whether compute buffers of a variant were measured with a placement like the one of ``trial``."""
        if variant.kind != variant_of(trial.params).kind:
            return variant in self._measured
        state = self._states[variant]
        return state.buffers.has_measured(is_whole(state.request, trial.devices, trial.placement))

    def _next(self, variant: Variant) -> Variant:
        self._asked.add(variant)
        self.state(variant)
        self._measured.setdefault(variant, None)
        return variant

    def begin(self) -> Variant:
        """Return the variant with the micro batch that promises the least time, by a load or two."""
        start = self.state(self.first)
        if len(self._sizes) < 2:
            return self._next(self.first)
        start.prices()
        placement = _first_placement(start)
        if placement is None or self.measure(self.first, placement) is None:
            return self._next(self.first)
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
        return self._next(best)

    def _others(self, n_ubatch: int) -> tuple[list[int], list[int]]:
        """List the larger and the smaller micro batches, the nearest first."""
        larger = [size for size in self._sizes if size > n_ubatch]
        return larger, [size for size in reversed(self._sizes) if size < n_ubatch]

    def _promised(self, kinds: Iterable[Kind]) -> Iterable[tuple[Variant, float]]:
        """Yield the variants that promise a better trial than the best, each with its expected seconds."""
        trial, here = self.best.trial, self.here
        for kind, devices in ((each, devices) for each in kinds for devices in self._choices(each)):
            is_other = Variant(kind, here.n_ubatch, devices).differs(here)
            least = math.inf
            if trial.fits and trial.expected is not None and trial.seconds is not None:
                # what an estimate misses in one kind of attention, such as splits of graphs, another kind may not have
                least = (max(trial.seconds, trial.expected) if is_other else trial.expected) * (1 - WORTH)
            for sizes in ([here.n_ubatch], *self._others(here.n_ubatch)):
                for size in sizes:
                    variant = Variant(kind, size, devices)
                    if self._is_asked(variant) or (trial.fits and not self._is_for_speed(variant)):
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
        if variant.differs(here):
            is_wider = variant.devices != here.devices and not variant.kind.offload_kqv
            if variant not in self._measured and (is_wider or not self._buffers_like(variant)):
                # nothing that was measured tells its buffers, and one micro batch little of another's
                if variant.n_ubatch == here.n_ubatch:
                    return 0.0
                if not any(each.kind == variant.kind and each.devices == variant.devices for each in self._measured):
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
            units = start.units(self._n_ctx, in_whole)
            rooms = (each.room(self._n_ctx, in_whole).of(units, placement) for each in (state, start))
            freed = sum(max(0, more - less) for more, less in zip(*rooms, strict=True))
            seconds -= 2 * most_saved_by(start.situation(self._n_ctx, in_whole), placement, freed)
        return seconds < least * (1 - WORTH)


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
        if not is_alone or not state.has_room_idle(n_ctx):
            return math.inf
    return state.seconds(placement)


def _with_last_layer(state: SearchState, devices: tuple[DeviceLimit, ...]) -> SearchState:
    """Return the state of the same search with the last layer alone on ``devices``."""
    request = state.original_request
    params, fixed = replace(request.params, n_gpu_layers=1), request.fixed | {"n_gpu_layers"}
    return state.on(devices, replace(request, params=params, fixed=fixed, context_limits={}))


def _first_placement(state: SearchState) -> Placement | None:
    """Return the placement that a search measures first."""
    n_ctx = state.request.params.n_ctx
    if not is_too_large(state, n_ctx):
        at = state.situation(n_ctx, is_whole=True)
        return place_whole(at) or state.default
    return state.place_partial(state.situation(n_ctx, is_whole=False))


def _useless(request: Request, devices: tuple[DeviceLimit, ...], trial: Trial) -> list[DeviceLimit]:
    """List devices on which ``trial`` has nothing, or which cannot hold even their compute buffer.

    Such a device would still cost its context, and take part in every graph.
    """
    lacking = {name for name, _ in trial.missing}
    # those that are not named, too: their room decides on other micro batches; remote ones leave on their own
    named, idle = trial.params.devices or (), [devices[d] for d in trial.placement.idle]
    idle = [each for each in idle if each.name in named or not _is_remote(request, each)]
    useless = idle or [device for device in devices if device.name in lacking]
    if useless and len(idle) == len(devices):
        # all devices are idle: fewer of them need smaller compute buffers, and may be of use
        return sorted(idle, key=lambda device: device.target)[: (len(idle) + 1) // 2]
    return useless if trial.fits or not useless else [min(useless, key=lambda device: device.target)]


def _is_remote(request: Request, device: DeviceLimit) -> bool:
    return device.name in request.speeds and request.speeds[device.name].is_remote
