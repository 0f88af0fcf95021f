"""The order of a search: which plan is asked for first, and which others before one goes out. Bytes.

Each step takes the best plan so far and returns it, or a better one. ``objective`` compares plans, ``search_state``
holds the facts, ``proposals`` makes placements, ``corrections`` measures and corrects them, ``context_choice`` chooses
the context, ``device_choice`` and ``remote_devices`` the devices. ``levers`` makes concessions after all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Params
from fitter.planning.pricing.objective import GAIN, best_of, rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import usable_devices
from fitter.planning.request.request import Measure, Record, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search import choices, flash_attention, micro_batch
from fitter.planning.search.context_choice import Answer, ContextChoice
from fitter.planning.search.device_choice import Devices, in_better_order
from fitter.planning.search.micro_batch import MicroBatches, is_little
from fitter.planning.search.remote_devices import worth_their_network
from fitter.planning.search.search_state import Callbacks, CutShort, SearchState
from fitter.planning.speed.explain import Choice

_MAX_OTHERS = 2
"""So many other micro batches are tried at most where the one that promised most turns out slower."""


def search(
    request: Request,
    measure: Measure,
    record: Record,
    on_candidate: Callable[[Params], None] = lambda params: None,
    on_choice: Callable[[Choice], None] = lambda choice: None,
    has_room: Callable[[Params], bool] = lambda params: True,
) -> Trial:
    """Find the best trial that fits, or where none does the one that lacks least.

    Args:
        measure: makes a dummy load.
        record: makes a dummy load and returns the size of every tensor.
        on_candidate: gets parameters that may turn out to be the answer, as early as possible.
        on_choice: gets every choice by price.
        has_room: as in ``Callbacks``.

    Raises:
        TimeLimitError: the time limit was reached before a trial fitted. After one, the best so far is returned.
        LlamaCppError: llama.cpp refuses the user's own parameters.
    """
    order = _SearchOrder(request, measure, record, on_candidate, has_room)
    try:
        if order.is_last:
            best = order.at(request.params.n_ctx).trial
        else:
            contexts = ContextChoice(order.state, order.at)
            best = contexts.best()
            if (improved := order.at_last(best)) is not None:
                best = contexts.larger_than(improved)
    except CutShort as cut:
        best = cut.best
    if best.fits and best.seconds is not None:
        # a trial on the way may be better than the last one
        other = order.state.answer.best(request)
        best = best if other is None or is_little(other, best) else best_of((best, other), request)
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
        on_candidate: Callable[[Params], None],
        has_room: Callable[[Params], bool],
    ) -> None:
        self._request = request
        self._choices: list[Choice] = []
        self._choices_at: dict[int, list[Choice]] = {}
        self._states: dict[tuple[str, int], SearchState] = {}
        self._answers: dict[int, Answer] = {}
        self.is_last = "n_ctx" in request.fixed
        self._seen = set[bool | None]()
        loads = remembered(measure)

        def noted(params: Params) -> Breakdown:
            breakdown = loads(params)
            self._seen.add(breakdown.flash_attn)
            return breakdown

        callbacks = Callbacks(noted, record, on_candidate, lambda choice: self._choices.append(choice), has_room)
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
        """Find the best trial at ``n_ctx``, with flash attention on or off where that is better."""
        self._seen.clear()
        self._choices = self._choices_at[n_ctx] = []
        batches = MicroBatches(self.state.at(n_ctx))
        best = _quickest(batches, n_ctx)
        best = self._with_attention(batches.state(best.trial.params.n_ubatch), best, n_ctx)
        best = self._answers[n_ctx] = MicroBatches(best.state).improved(best)
        if choice := micro_batch.choice_of(best.trial, batches):
            self._choices.append(choice)
        return best

    def at_last(self, best: Trial) -> Answer | None:
        """Improve the trial at the chosen context as if the user had set that; ``None`` where nothing is better."""
        n_ctx, self.is_last = best.params.n_ctx, True
        answer = self._answers.get(n_ctx)
        if answer is None or answer.trial != best:
            return None
        state = self.state.at(n_ctx).with_micro_batch(best.params.n_ubatch)
        improved = self._with_attention(state, answer, n_ctx)
        return None if improved is answer else improved

    def _with_attention(self, state: SearchState, best: Answer, n_ctx: int) -> Answer:
        if not flash_attention.is_open(self._request) or not best.trial.fits or best.trial.seconds is None:
            return best
        if self._seen == {False}:
            # learn whether the devices can compute it at all
            with suppress(LlamaCppError, CutShort):
                state.trial(state.default, n_ctx)
        for with_flash in (True, False):
            other = flash_attention.alternative(
                state.request,
                best.trial,
                best.distance,
                self._seen,
                with_flash=with_flash,
                is_last=self.is_last,
            )
            best = best if other is None else self._better_with(other, best, n_ctx)
        return best

    def _better_with(self, other: Request, best: Answer, n_ctx: int) -> Answer:
        """Search for the request ``other``, with flash attention on or off; return the better answer."""
        key = other.params.flash_attn, other.params.n_ubatch
        if key not in self._states:
            params = replace(self._request.params, flash_attn=key[0], n_ubatch=key[1])
            self._states[key] = self.state.on(self.state.devices, replace(self._request, params=params))
        state = self._states[key]
        if key[0] == "off":
            # the buffers that are known are smaller than without flash attention
            likely = MicroBatches(state.at(n_ctx).with_buffers_of(best.state))
            if best.trial.expected is None or not likely.may_take((1 - GAIN) * best.trial.expected, n_ctx):
                return best
        try:
            here = state.at(n_ctx)
            # without flash attention a buffer for scores grows with the micro batch
            answer = _quickest(MicroBatches(here), n_ctx, can_grow=False) if key[0] == "off" else _best(here)
        except (LlamaCppError, TimeLimitError, CutShort):
            return best
        if rank(answer.trial) <= rank(best.trial):
            return best
        if choice := flash_attention.choice_of(answer.trial, best.trial):
            self._choices.append(choice)
        return answer


def _quickest(batches: MicroBatches, n_ctx: int, *, can_grow: bool = True) -> Answer:
    """Find the best trial at a context with the micro batch that promises most, or with another."""
    best = _best(batches.quickest(n_ctx, can_grow=can_grow))
    for _ in range(_MAX_OTHERS):
        if (other := batches.another(best.trial, n_ctx)) is None:
            break
        with suppress(LlamaCppError, TimeLimitError, CutShort):
            best = max(best, _best(other), key=lambda answer: rank(answer.trial))
    return best


def _best(state: SearchState) -> Answer:
    """Find the best trial at the context of ``state``."""
    state = in_better_order(state)
    devices = Devices(state)
    best = devices.without_idle(state)
    best = worth_their_network(state, best)
    devices.forget_remotes(best)
    best = devices.without_doubtful(best)
    best = devices.on_others(best)
    best = devices.with_the_last_layer(best)
    best = devices.with_few_layers(best)
    return Answer(best, devices.distance(best), devices.state_of(best))
