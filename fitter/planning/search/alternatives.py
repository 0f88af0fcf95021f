"""Alternatives to a plan: other parameters that the user could ask for, with a part of the search's loads. Bytes.

The plan stands before they are looked for, and they never change it. Parameters that the user set stay, except a
context that does not fit. A proposal near the plan's placement says what each could bring; a dummy load then accepts
it, while some are left. Without one it stays an estimate, and where the plan does not fit it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fitter.errors import FitterError, LlamaCppError, TimeLimitError, UsageError
from fitter.llama.types import Layout, Params
from fitter.model.tensors import SmallerType
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.layer_sizes import units_of
from fitter.planning.placing.placement import Placement, on_host
from fitter.planning.pricing.objective import objective_seconds
from fitter.planning.pricing.pricing import MeasuredPlacement
from fitter.planning.pricing.split_price import pipelined
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.context_limit import EXPENSIVE, limited
from fitter.planning.request.given import is_priced, is_whole, smallest_context, usable_devices
from fitter.planning.request.request import Measure, Request
from fitter.planning.search.corrections import settle
from fitter.planning.search.expectations import likely_fits_host
from fitter.planning.search.levers import Candidate, changes, expert_caches
from fitter.planning.search.proposals import place_whole
from fitter.planning.search.search_state import Callbacks, CutShort, SearchState
from fitter.planning.search.tensor_split_search import split_candidate
from fitter.planning.speed.explain import Alternative
from fitter.planning.speed.model_facts import scaled
from fitter.planning.speed.work import resized_layout

_T = TypeVar("_T")

SHARE = 1 / 4
"""Alternatives take at most this share of the search's dummy loads: a fit stays about as quick as without them."""

SHARE_OF_FAILURE = 1 / 2
"""The same where the plan does not fit: there an alternative is the answer, and each needs a dummy load."""

WORTH = 0.1
"""An alternative saves at least this share of the time. For less, nobody gives up the quality of a cache or slots."""

MOST = 3
"""At most so many alternatives are listed."""

MUCH_LONGER = 1.25
"""A longer context has at least so many times the tokens: a user who has too few needs clearly more."""

LONGER_IN_Q8_0 = 1.75
"""So many times the context in ``q8_0``: 64 / 34 times the cells have the same bytes, and compute buffers grow too."""

MOST_SLOWER = 2
"""A longer context takes at most so many times as long: at half the speed, other models are the better choice."""

_LIKE = 1.25
"""Devices whose bandwidths differ by at most this factor may split every tensor: the slowest one sets the speed."""

_MICRO_BATCHES = (2048, 512)
"""Micro batches to name to a user who set another: for prompts with weights on the host, and for room on devices."""

_WORDS = ("n_ctx", "split_mode", "type_k", "type_v", "n_ubatch", "n_seq_max", "moe_cache_size")
"""Parameters that an alternative may name, in the order of its words."""


@dataclass(frozen=True)
class Idea:
    """Changed fields of ``Params``, whether they are for more context instead of less time, and a smaller file type."""

    params: tuple[tuple[str, Any], ...]
    is_longer: bool = False
    smaller: SmallerType | None = None

    def of(self, request: Request) -> Request:
        """Return ``request`` with the changes, and without further concessions."""
        changed = replace(request.params, **dict(self.params))
        facts = scaled(request.facts, self.share)
        return replace(request, params=changed, fixed=request.fixed | {"n_ctx"}, allow=frozenset(), facts=facts)

    @property
    def share(self) -> float:
        """The share of the weights' bytes."""
        return 1.0 if self.smaller is None else self.smaller.share


class Budget:
    """Dummy loads for alternatives. Their number, not a time, so that the same question has the same answer.

    Args:
        loads: dummy loads that may be made.
        until: the end of the user's time limit, on the monotonic clock.
    """

    def __init__(self, loads: int, until: float | None = None) -> None:
        self._left, self._until = loads, until

    def is_over(self) -> bool:
        """Whether the user's time limit has passed."""
        return self._until is not None and time.monotonic() > self._until

    def counted(self, load: Callable[[Params], _T]) -> Callable[[Params], _T]:
        """Wrap a load to raise ``TimeLimitError`` instead, where none is left."""

        def ask(params: Params) -> _T:
            if not self._left or self.is_over():
                raise TimeLimitError("no dummy load is left for alternatives")
            self._left -= 1
            try:
                return load(params)
            except UsageError:
                # refused before any load
                self._left += 1
                raise

        return ask


def alternatives(
    asked: Request,
    plan: Candidate,
    loads: Callbacks,
    measure: Measure,
    one_slot: Params | None,
    smaller: SmallerType | None,
    budget: Budget,
) -> tuple[Alternative, ...]:
    """Find alternatives to ``plan``, the answer to ``asked``; at most one of each kind.

    Args:
        loads: make dummy loads, with the memory of everything that shares the devices.
        measure: makes a dummy load of the model alone.
        one_slot: the parameters with one sequence instead of several; ``None`` if the user set their number.
        smaller: the next smaller file type, if there is one.
        budget: the loads for all of it.
    """
    # a model that only reads texts needs no long cache, and its tokens have no speed of generation; shares of every
    # tensor (split mode tensor) have another search and other prices
    is_unlike = asked.params.embeddings or asked.params.split_mode == "tensor"
    if not is_priced(asked) or is_unlike or (plan.trial.fits and plan.seconds is None):
        return ()
    counted = replace(loads, measure=budget.counted(loads.measure), record=budget.counted(loads.record))
    found: list[Alternative] = []
    try:
        near = _Near(asked, plan, counted, measure)
    except FitterError:
        return ()
    for ideas in _ideas(asked, plan, one_slot, smaller):
        for idea in ideas:
            if len(found) == MOST or budget.is_over():
                return tuple(found)
            try:
                alternative = near.attempt(idea)
            except (LlamaCppError, UsageError):
                # not the user's own parameters, or this llama.cpp lacks them
                continue
            except FitterError:
                # no load is left, or the worker ended: the plan stands
                break
            if alternative is not None:
                found.append(alternative)
                break
    return tuple(found)


def _ideas(asked: Request, plan: Candidate, one_slot: Params | None, smaller: SmallerType | None) -> list[list[Idea]]:
    """List kinds of ideas, the most useful first. The first idea of a kind that is worth it is the alternative."""
    base, trial, is_set = plan.request, plan.trial, "n_ctx" in asked.fixed
    n_ctx = asked.params.n_ctx if is_set and not trial.fits else trial.params.n_ctx
    longer = _longer(asked, n_ctx) if trial.fits and not is_set else []
    is_on_devices = trial.fits and is_whole(base, *trial.used)
    caches = expert_caches(replace(base, allow=frozenset({"moe-cache"})), trial) if trial.fits else ()
    kinds = [[Idea((("n_ctx", n_ctx), *change.params[:1])) for change in caches]]
    kinds.append(longer[:1] if trial.fits else list(_shorter(asked, plan)) if is_set else [])
    for change in changes(replace(base, allow=frozenset({"kv-q8_0"}))):
        if replace(base.params, **dict(change.params)) != base.params:
            # a smaller cache leaves room for weights, or for more context
            more = _with_smaller_cache(asked, n_ctx) if is_on_devices and not is_set else longer
            at = (Idea((("n_ctx", n_ctx),)), *more[:1])
            kinds.append([replace(idea, params=(*idea.params, *change.params)) for idea in at])
    if is_on_devices:
        # all weights stay on devices with a smaller cache, which is found sooner than a way to spill
        kinds = [*kinds[2:], kinds[1]]
    if one_slot is not None and base.params.n_seq_max > 1:
        fewer = tuple((name, getattr(one_slot, name)) for name in ("n_seq_max", "kv_unified", "n_outputs_max"))
        kinds.append([Idea((("n_ctx", n_ctx // base.n_streams), *fewer))])
    if smaller is not None and trial.fits and not is_on_devices:
        kinds.append([Idea((("n_ctx", n_ctx),), smaller=smaller)])
    split = [Idea((("n_ctx", n_ctx), ("split_mode", "tensor")))] if is_on_devices and _may_split(asked) else []
    batches = [Idea((("n_ctx", n_ctx), *batch)) for batch in _batches(asked)] if trial.fits else []
    return [split, batches, *kinds, longer[1:]]


def _may_split(asked: Request) -> bool:
    """Whether split mode ``tensor`` may be faster: two or more local devices that are about alike, and no word of the
    user's against it.
    """
    params, speeds = asked.params, [asked.speeds[device.name] for device in usable_devices(asked)]
    is_refused = params.lora or params.load_mtp or asked.most_drafted or params.flash_attn == "off"
    if is_refused or not params.offload_kqv or asked.pools or asked.pinned or len(speeds) < 2:
        return False
    if asked.fixed & {"split_mode", "tensor_split", "n_gpu_layers"} or params.split_mode != "layer":
        return False
    bandwidths = [speed.bandwidth for speed in speeds]
    are_alike = len({speed.kind for speed in speeds}) == 1 and max(bandwidths) <= _LIKE * min(bandwidths)
    return are_alike and not speeds[0].is_remote


def _batches(asked: Request) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield other micro batches than the user's, with a batch that holds them."""
    params = asked.params
    for size in _MICRO_BATCHES if "n_ubatch" in asked.fixed else ():
        if size != params.n_ubatch and (size <= params.n_batch or "n_batch" not in asked.fixed):
            yield ("n_ubatch", size), ("n_batch", max(size, params.n_batch))


def _longer(asked: Request, n_ctx: int) -> list[Idea]:
    """List the next longer context, a power of two or the longest, and then the longest."""
    power = 1 << (n_ctx - 1).bit_length()
    power = power if power >= MUCH_LONGER * n_ctx else 2 * power
    return _much_longer(asked, n_ctx, power, asked.n_ctx_max)


def _with_smaller_cache(asked: Request, n_ctx: int) -> list[Idea]:
    """List the context for which a ``q8_0`` cache takes about the bytes of an ``f16`` cache for ``n_ctx``."""
    step = 4 * asked.alignment
    return _much_longer(asked, n_ctx, int(LONGER_IN_Q8_0 * n_ctx) // step * step)


def _much_longer(asked: Request, n_ctx: int, *contexts: int) -> list[Idea]:
    most, step = min(asked.n_ctx_max, EXPENSIVE), asked.alignment
    able = dict.fromkeys(min(each, most) // step * step for each in contexts)
    return [Idea((("n_ctx", each),), is_longer=True) for each in able if each >= MUCH_LONGER * n_ctx]


def _shorter(asked: Request, plan: Candidate) -> Iterator[Idea]:
    """Yield halves of the user's context, from one whose cache saves what the plan lacks."""
    low = smallest_context(replace(asked, fixed=asked.fixed - {"n_ctx"}))
    cache = sum(row.context for row in plan.trial.breakdown.rows)
    n_ctx = asked.params.n_ctx // 2
    most = asked.params.n_ctx * max(0, cache - plan.trial.deficit) // max(1, cache)
    if plan.excess is not None:
        n_ctx = most = plan.excess.n_ctx
    while n_ctx >= low:
        if n_ctx <= most:
            yield Idea((("n_ctx", n_ctx // asked.alignment * asked.alignment),))
        n_ctx //= 2


class _Near:
    """Plans near the placement of one plan."""

    def __init__(self, asked: Request, plan: Candidate, loads: Callbacks, measure: Measure) -> None:
        self._asked, self._plan, self._loads, self._measure = asked, plan, loads, measure
        self._devices, self._placement = plan.trial.used
        self._fits = plan.trial.fits
        self._has_flash = plan.trial.breakdown.flash_attn is not False
        params = replace(plan.request.params, n_ctx=smallest_context(plan.request), tensor_buft_overrides=())
        self._layout = loads.record(params) if plan.layout is None else plan.layout
        self._seconds: dict[int, float] = {}
        """Times of longer contexts without other changes."""

    def attempt(self, idea: Idea) -> Alternative | None:
        """Return what ``idea`` brings; ``None`` where that is not worth saying.

        Raises:
            TimeLimitError: No load is left, and the answer needs one.
            LlamaCppError: llama.cpp refuses the parameters.
        """
        if "split_mode" in dict(idea.params):
            return self._split(idea)
        request, excess = limited(idea.of(self._plan.request), self._resized)
        if excess is not None:
            return None
        state = self._state(request, idea.share)
        placement = self._propose(state)
        if placement is None or not self._is_worth(self._plan.trial.expected, state.seconds(placement), idea):
            return None
        trial, is_measured = self._trial(state, placement, idea)
        # llama.cpp is only fast with a quantized cache where flash attention is on
        has_cache = not {"type_k", "type_v"}.isdisjoint(dict(idea.params))
        if trial is None or (has_cache and trial.breakdown.flash_attn is not True):
            return None
        layout, breakdown = state.smallest_layout, self._measure(trial.params) if is_measured else trial.breakdown
        assert layout is not None
        price = MeasuredPlacement(request, *trial.used, trial.params, breakdown, layout).price()
        if price is None or not self._is_worth(self._plan.seconds, objective_seconds(request, price.estimate), idea):
            return None
        if len(idea.params) == 1 and idea.smaller is None:
            self._seconds[trial.params.n_ctx] = objective_seconds(request, price.estimate)
        speeds = price.prompt_tokens_per_second, price.generation_tokens_per_second
        words, file_type = _words(self._asked, trial.params, idea), ""
        if idea.smaller is not None:
            words, file_type = idea.smaller.arguments, idea.smaller.name
        return Alternative(words, trial.params.n_ctx, *speeds, is_measured, file_type)

    def _split(self, idea: Idea) -> Alternative | None:
        """Return what split mode ``tensor`` brings at the plan's context; raises as ``attempt`` does."""
        asked, plan = self._asked, self._plan
        found = split_candidate(idea.of(asked), self._loads.measure, self._resized)
        if not found.trial.fits or found.price is None or plan.price is None or found.seconds is None:
            return None
        n_used = sum(1 for device in plan.trial.devices if plan.trial.breakdown.on(device.name).model) or 1
        # with split mode layer, devices work on several micro batches of a prompt at once
        before = pipelined(plan.price.estimate, n_used, asked.workload, plan.trial.params.n_ubatch)
        if found.seconds > objective_seconds(asked, before) * (1 - WORTH):
            return None
        params, price = found.trial.params, found.price
        speeds = price.prompt_tokens_per_second, price.generation_tokens_per_second
        return Alternative(_words(asked, params, idea), params.n_ctx, *speeds, True)

    def _trial(self, state: SearchState, placement: Placement, idea: Idea) -> tuple[Trial | None, bool]:
        """Return the best trial near ``placement``, and whether it was measured: a smaller file cannot be loaded."""
        if idea.smaller is not None:
            return self._estimated(state, True), False
        n_ctx = state.request.params.n_ctx
        is_in_place = is_whole(state.request, state.devices, placement)
        try:
            return settle(state, n_ctx, is_in_place, lambda at: self._propose(state)), True
        except CutShort as cut:
            return cut.best, True
        except TimeLimitError:
            # only a load tells whether this llama.cpp has a cache of experts, each device's part of it, and the compute
            # buffers of another micro batch
            is_known = {"moe_cache_size", "n_ubatch"}.isdisjoint(dict(idea.params))
            return self._estimated(state, False) if is_known else None, False

    def _is_worth(self, before: float | None, seconds: float, idea: Idea) -> bool:
        """Whether an alternative is worth saying to a user whose plan takes ``before``, or does not fit."""
        if not self._fits:
            return True
        alone = self._seconds.get(dict(idea.params)["n_ctx"])
        if len(idea.params) > 1 and alone is not None and seconds > alone * (1 - WORTH):
            return False
        return before is not None and seconds <= before * (MOST_SLOWER if idea.is_longer else 1 - WORTH)

    def _state(self, request: Request, share: float) -> SearchState:
        """Make a state with estimated sizes, and with the compute buffers of a plan with flash attention."""

        def record(params: Params) -> Layout:
            layout = self._resized(params)
            bytes_of = {"model": share, "context": 1.0}
            entries = (each._replace(bytes=int(bytes_of[each.kind] * each.bytes)) for each in layout.entries)
            return replace(layout, entries=tuple(entries))

        state = SearchState(request, self._devices, replace(self._loads, record=record))
        state.prices()
        if not self._has_flash:
            # its buffers are gigabytes larger
            return state
        # compute buffers grow about as the micro batch
        batch = request.params.n_ubatch / self._plan.request.params.n_ubatch
        rows = tuple(
            replace(row, model=int(share * row.model), compute=int(batch * row.compute))
            for row in self._plan.trial.breakdown.rows
        )
        breakdown = replace(self._plan.trial.breakdown, rows=rows)
        state.learn(replace(self._plan.trial, devices=self._devices, placement=self._placement, breakdown=breakdown))
        return state

    def _resized(self, params: Params) -> Layout:
        """Estimate the layout with ``params`` from the search's record."""
        return resized_layout(self._plan.request.facts, self._layout, self._plan.request.params, params)

    def _propose(self, state: SearchState) -> Placement | None:
        """Propose a placement without a dummy load: the whole model on devices, or spilled as in the plan."""
        n_ctx = state.request.params.n_ctx
        if not state.devices:
            return state.default
        is_in_place = n_ctx == self._plan.trial.params.n_ctx and is_whole(state.request, state.devices, self._placement)
        if is_in_place and self._fits:
            return self._placement
        if likely_fits_host(state, n_ctx) and (whole := place_whole(state.situation(n_ctx, is_whole=True))):
            return whole
        return state.place_partial(state.situation(n_ctx, is_whole=False))

    def _estimated(self, state: SearchState, is_any_kind: bool) -> Trial | None:
        """Describe the latest proposal without a measurement; ``None`` where too little is known of its memory.

        Compute buffers are known only of placements of the plan's kind; with ``is_any_kind`` they are taken for others.
        """
        request, plan, placement = state.request, self._plan.trial, self._propose(state)
        if placement is None or not self._fits or request.pools or state.keeps_on_host:
            return None
        is_other_kind = is_whole(request, state.devices, placement) != is_whole(request, state.devices, self._placement)
        if is_other_kind and not is_any_kind:
            return None
        units = state.units(request.params.n_ctx)
        planned = units_of(self._resized(plan.params), request.n_layer)
        more = on_host(units, placement) - on_host(planned, self._placement)
        target = None if request.host.paging else request.host.target
        if target is not None and plan.breakdown.host.used + more > target:
            return None
        params = state.params_of(placement, request.params.n_ctx)
        return Trial(placement, state.devices, params, replace(plan.breakdown, n_splits=None), ())


def _words(asked: Request, params: Params, idea: Idea) -> tuple[str, ...]:
    """Write the options that ask for ``params``: the changes, and the context where the plan's was fitted."""
    changed = {name for name, value in idea.params if value != getattr(asked.params, name)}
    if "n_ctx" not in asked.fixed:
        changed.add("n_ctx")
    named = [PARAMETERS[name] for name in _WORDS if name in changed]
    return tuple(word for each in named for word in (each.options[0], each.kind.word(params.of_parameter(each))))
