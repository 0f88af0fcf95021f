"""The order of a search: which plan is asked for first, and which others before one goes out. Bytes.

``objective`` compares plans, ``search_state`` holds the facts, ``proposals`` makes placements, ``corrections`` measures
and corrects them. At one context, ``variants`` and ``device_choice`` list what to ask for next; ``context_choice``
chooses the context. ``levers`` makes concessions after all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Params
from fitter.planning.pricing.objective import WORTH_SHARING, best_of, rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import other_devices, usable_devices
from fitter.planning.request.request import Measure, Record, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search import choices, device_choice, flash_attention
from fitter.planning.search.context_choice import ContextChoice
from fitter.planning.search.idle_devices import idle_notes
from fitter.planning.search.proposals import READABLE, in_words
from fitter.planning.search.search_state import Callbacks, CutShort, SearchState
from fitter.planning.search.variants import Answer, Kind, Variant, Variants, choice_of, is_little, variant_of
from fitter.planning.speed.explain import Choice

_MAX_OTHERS = 5
"""So many further variants are tried at most: it ends a search that errs."""


def search(
    request: Request,
    measure: Measure,
    record: Record,
    on_choice: Callable[[Choice], None] = lambda choice: None,
    has_room: Callable[[Params], bool] = lambda params: True,
    on_note: Callable[[str], None] = lambda note: None,
) -> Trial:
    """Find the best trial that fits, or where none does the one that lacks least.

    Args:
        measure: makes a dummy load.
        record: makes a dummy load and returns the size of every tensor.
        on_choice: gets every choice by price.
        has_room: as in ``Callbacks``.
        on_note: gets notes for the plan.

    Raises:
        TimeLimitError: the time limit was reached before a trial fitted. After one, the best so far is returned.
        LlamaCppError: llama.cpp refuses the user's own parameters.
    """
    order = _SearchOrder(request, measure, record, has_room)
    try:
        if order.is_last:
            best = order.at(request.params.n_ctx).trial
        else:
            contexts = ContextChoice(order.state, order.at)
            answer = contexts.best()
            improved = order.at_last(answer)
            best = contexts.larger_than(improved) if rank(improved.trial) > rank(answer.trial) else answer.trial
    except CutShort as cut:
        best = cut.best
    if best.fits and best.seconds is not None:
        # a trial on the way may be better than the last one
        other = order.state.answer.best(request, best)
        best = best if other is None or is_little(other, best) else best_of((best, other), request)
    if best.fits and best.seconds is not None:
        best = order.in_words(best)
        for note in idle_notes(order.state_of(best).on(best.devices), best, order.state.answer.trials):
            on_note(note)
    for choice in order.choices_of(best):
        on_choice(choice)
    return best


class _SearchOrder:
    """The order of a search at one context, with the state that contexts share."""

    def __init__(
        self,
        request: Request,
        measure: Measure,
        record: Record,
        has_room: Callable[[Params], bool],
    ) -> None:
        self._request = request
        self._choices: list[Choice] = []
        self._choices_at: dict[int, list[Choice]] = {}
        self._states: dict[Kind, SearchState] = {}
        self._variants: dict[int, Variants] = {}
        self.is_last = "n_ctx" in request.fixed
        self._seen = set[bool | None]()
        loads = remembered(measure)

        def noted(params: Params) -> Breakdown:
            breakdown = loads(params)
            if params.flash_attn == "auto":
                self._seen.add(breakdown.flash_attn)
            return breakdown

        callbacks = Callbacks(noted, record, lambda choice: self._choices.append(choice), has_room)
        self.state = SearchState(request, usable_devices(request), callbacks)

    def choices_of(self, best: Trial) -> list[Choice]:
        """Return the choices by price at the context of ``best``, of each subject its own, or else the quickest."""
        found: dict[str, Choice] = {}
        said = self._choices_at.get(best.params.n_ctx, self._choices)
        for choice in sorted(said, key=lambda choice: (choice.seconds != best.seconds, choice.seconds)):
            if choice.subject != choices.WEIGHTS or choice.chosen == choices.style(self._request, best.placement):
                found.setdefault(choice.subject, choice)
        return list(found.values())

    def at(self, n_ctx: int) -> Answer:
        """Find the best trial at ``n_ctx`` of all variants."""
        self._seen.clear()
        self._choices = self._choices_at[n_ctx] = []
        variants = self._variants[n_ctx] = Variants(self.state.at(n_ctx), lambda kind: self._of_kind(kind, n_ctx))
        begun = variants.begin()
        ordered = device_choice.in_better_order(variants.state(begun)).open
        variants.take(variants.ask(begun._replace(devices=ordered)))
        self._ask_each(variants, device_choice.others(variants))
        best = self._improved(variants)
        if choice := choice_of(best.trial, variants):
            self._choices.append(choice)
        return best

    def at_last(self, best: Answer) -> Answer:
        """Improve the answer at the chosen context as if the user had set that."""
        self.is_last = True
        variants = self._variants.get(best.trial.params.n_ctx)
        if variants is None:
            return best
        variants.take(best)
        return self._improved(variants)

    def _improved(self, variants: Variants) -> Answer:
        """Ask for other micro batches, kinds of attention and then devices while one promises a better trial."""
        # the best on devices that llama.cpp uses by default, once there are others
        plain = best = variants.best
        if self._seen == {False} and flash_attention.is_open(self._request) and best.trial.fits:
            # learn whether the devices can compute it at all
            with suppress(LlamaCppError, CutShort):
                best.state.trial(best.state.default, best.trial.params.n_ctx)
        for variant in self._others(variants):
            if not variants.best.trial.uses_integrated:
                plain = variants.best
            self._ask_each(variants, [variant])
        best = variants.best
        is_enough = (best.trial.seconds or 0.0) < (1 - WORTH_SHARING) * (plain.trial.seconds or math.inf)
        is_lent = best.trial.uses_integrated and not plain.trial.uses_integrated and plain.trial.fits
        return plain if is_lent and not is_enough else best

    def _others(self, variants: Variants) -> Iterator[Variant]:
        """Yield what to ask for next; where nothing else promises more, the variant of the best answer elsewhere."""
        for _ in range(_MAX_OTHERS):
            best = variants.best
            if (variant := variants.next(self._kinds(best))) is not None:
                yield variant
                continue
            others = [device for device in other_devices(self._request) if device not in best.trial.devices]
            if not variants.may_change_devices(others):
                break
            variants.devices = tuple(dict.fromkeys((*variants.devices, *others)))
            yield from device_choice.with_others(variants)
            if variants.best is best:
                break

    def _ask_each(self, variants: Variants, others: Iterable[Variant]) -> None:
        """Ask for each variant, which may follow from the answer before it, and keep the best answer."""
        for variant in others:
            before = variants.best.trial
            with suppress(LlamaCppError, CutShort):
                if variants.take(variants.ask(variant)) and (choice := _between(variants.best.trial, before)):
                    self._choices.append(choice)

    def state_of(self, best: Trial) -> SearchState:
        """Return the state of the variant of ``best``, on all devices."""
        variant = variant_of(best.params)
        state = self._of_kind(variant.kind, best.params.n_ctx)
        return state if state.request.params.n_ubatch == variant.n_ubatch else state.with_micro_batch(variant.n_ubatch)

    def in_words(self, best: Trial) -> Trial:
        """Return a trial whose placement is easier to read, if one takes hardly longer."""
        n_ctx, state = best.params.n_ctx, self.state_of(best).on(best.devices)
        if placement := in_words(state.situation(n_ctx, is_whole=False), best):
            with suppress(LlamaCppError, TimeLimitError, CutShort):
                trial = state.trial(placement, n_ctx)
                if trial.fits and (trial.seconds or math.inf) <= (1 + READABLE) * (best.seconds or 0.0):
                    return trial
        return best

    def _kinds(self, best: Answer) -> list[Kind]:
        """List the kinds of attention that may be better than in ``best``."""
        kinds = [variant_of(self._request.params).kind, variant_of(best.trial.params).kind]
        if best.trial.fits and best.trial.seconds is not None:
            kinds += flash_attention.kinds(self._request, best.trial, best.distance, self._seen, is_last=self.is_last)
        elif self._may_fit_elsewhere(best.trial):
            # with all caches on the host, devices have room for more weights, and the host may have it for caches
            kinds.append(kinds[0]._replace(offload_kqv=False))
        return [*dict.fromkeys(kinds)]

    def _may_fit_elsewhere(self, best: Trial) -> bool:
        """Whether a trial that lacks memory may fit with its caches on the host.

        Who puts layers on devices means their caches, too: without ``-ngl`` there are quicker plans.
        """
        is_open = not {"offload_kqv", "n_gpu_layers"} & self._request.fixed and bool(best.devices)
        return is_open and not best.fits and self.is_last and self.state.can_price

    def _of_kind(self, kind: Kind, n_ctx: int) -> SearchState:
        if kind not in self._states:
            params = replace(self._request.params, flash_attn=kind.flash_attn, offload_kqv=kind.offload_kqv)
            self._states[kind] = self.state.on(self.state.devices, replace(self._request, params=params))
        return self._states[kind].at(n_ctx)


def _between(chosen: Trial, other: Trial) -> Choice | None:
    """Describe the choice between trials of two variants."""
    if chosen.params.flash_attn != other.params.flash_attn:
        return flash_attention.choice_of(chosen, other)
    return choices.which_devices_take_part(chosen, other) if chosen.devices != other.devices else None
