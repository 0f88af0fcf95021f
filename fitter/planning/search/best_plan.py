"""The best plan of a request: search, confirm the winner, and sum up its memory. Bytes.

The top of the search: it calls ``search_order`` for each place of draft models and for each concession (``levers``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from fitter.errors import LlamaCppError, Remedy, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Layout, Params, Row
from fitter.model.tensors import smaller_type
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.pool_use import pool_uses
from fitter.planning.pricing.objective import best_of, objective_seconds, rank
from fitter.planning.pricing.pricing import MeasuredPlacement, bound_of, reasons_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import context_limit
from fitter.planning.request.given import is_whole, smallest_context, with_micro_batch
from fitter.planning.request.pool_margin import within_pools
from fitter.planning.request.request import DeviceLimit, Measure, Progress, Record, Request
from fitter.planning.request.shared import (
    Companions,
    beyond,
    draft_seconds,
    lacking,
    lowered,
    remembered,
    taken,
)
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, Search, SharedUse
from fitter.planning.search import flash_attention, scratch
from fitter.planning.search.alternatives import SHARE, SHARE_OF_FAILURE, Budget, alternatives
from fitter.planning.search.levers import Candidate, changed_params, changes, concessions, improve
from fitter.planning.search.load_reserve import reserve_for, with_reserve
from fitter.planning.search.problems import problems_of
from fitter.planning.search.search_order import search
from fitter.planning.search.search_state import Callbacks
from fitter.planning.search.tensor_split_search import split_candidate
from fitter.planning.speed.explain import Alternative, Choice
from fitter.planning.speed.work import resized_layout
from fitter.text import mib_up

_T = TypeVar("_T")

_MAX_WITHOUT_ROOM = 3
"""After so many plans that a real load has no room for, margins are raised on every device.

With one, Qwen3 Next 80B on two nearly full MI300X, margins of 0 (machine 5224 of ``tools.search``), is 28 % slower."""

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class LoadCalls:
    """Calls by which a fit has llama.cpp load one model.

    Attributes:
        measure: makes a dummy load.
        record: makes a dummy load and returns the size of every tensor.
        confirm: measures the plan, with the compute buffers that a real load reserves.
        dummy_loads: returns how often the model was loaded.
        shared_loads: returns how often other models were loaded.
        until: sets the time after which loads raise ``TimeLimitError``; ``None`` for never.
    """

    measure: Measure
    record: Record
    confirm: Measure
    dummy_loads: Callable[[], int]
    shared_loads: Callable[[], int] = lambda: 0
    until: Callable[[float | None], None] = lambda deadline: None


def fit(
    request: Request,
    summary: ModelSummary,
    llama: LoadCalls,
    on_progress: OnProgress,
    virtual: bool,
    companions: Sequence[Companions] = (),
    others: Sequence[DeviceLimit] = (),
    deadline: float | None = None,
    with_alternatives: bool = False,
    one_slot: Params | None = None,
) -> Plan:
    """Find the best plan for ``request``, and confirm it by one more load.

    Args:
        companions: models and programs that share the memory. Of several choices the plan has the best one.
        others: devices for companions alone.
        deadline: end of the search, on the monotonic clock. The best plan so far is then confirmed.
        with_alternatives: whether to look for alternatives afterwards, for a quarter of the search's loads.
        one_slot: the parameters with one sequence, as an alternative; ``None`` if their number is the user's.

    Raises:
        TimeLimitError: no plan that fits was found before ``deadline``.
        LlamaCppError: llama.cpp refuses the user's own parameters.
    """
    started = time.monotonic()
    running = _Fit(request, llama, on_progress, companions, others, deadline)
    best, choice, breakdown, uses = running.run()
    trial, loads = best.trial, llama.dummy_loads()
    effort = Search(loads, time.monotonic() - started, llama.shared_loads(), running.is_cut_short)
    alternative_plans = running.alternatives(best, choice, one_slot, summary) if with_alternatives else ()
    occupied = tuple(device for device in others if taken(uses, device.name))
    request = _without_unused(request, trial, {device.name for device in occupied})
    devices = tuple(
        _device_use(device, breakdown.on(device.name), taken(uses, device.name))
        for device in (*request.devices, *occupied)
    )
    limit, row = request.host, breakdown.host
    host = HostUse(limit.total, limit.free, limit.margin, row.model, row.context, row.compute, taken(uses, None))
    pools = pool_uses(request, trial, breakdown, devices, host)
    return Plan(
        model=summary,
        params=trial.params,
        breakdown=breakdown,
        devices=devices,
        host=host,
        search=effort,
        problems=problems_of(
            best.request, trial, devices, host, best.excess, running.reserve, uses, pools, summary, best.layout
        ),
        n_layer=request.n_layer,
        virtual=virtual,
        default_devices=_default_devices(request),
        estimate=best.price,
        choices=best.choices,
        bound=best.bound,
        levers=concessions(choice.request, best),
        shared=uses,
        pools=pools,
        notes=(*request.notes, *best.notes),
        alternatives=alternative_plans,
    )


@dataclass(frozen=True)
class _SharedChoice:
    """One choice of companions, with the request for the memory that they leave.

    Attributes:
        fixed_uses: memory of companions that does not depend on the plan.
        lacks: bytes that ``fixed_uses`` alone lack.
        seconds: seconds of drafting in the request.
    """

    companions: Companions
    fixed_uses: tuple[SharedUse, ...]
    request: Request
    lacks: int = 0
    seconds: float = 0.0

    def rank(self, candidate: Candidate) -> tuple[bool, int, int, float]:
        """Sort key (larger is better). Its time includes drafting."""
        seconds = None if candidate.seconds is None else candidate.seconds + self.seconds
        return rank(replace(candidate.trial, seconds=seconds))


_Result = tuple[Candidate, _SharedChoice, Breakdown, tuple[SharedUse, ...]]


class _Fit:
    """One fit: the search, and the confirmation."""

    def __init__(
        self,
        request: Request,
        llama: LoadCalls,
        on_progress: OnProgress,
        companions: Sequence[Companions],
        others: Sequence[DeviceLimit],
        deadline: float | None,
    ) -> None:
        self.is_cut_short = False
        self._deadline = deadline
        self._doing, self._since = "", time.monotonic()
        self._request = request
        self._llama = llama
        self._on_progress = on_progress
        self._companions = companions
        self._others = others
        self.reserve: dict[str, int] = {}
        self._without_room = set[Params]()
        self._tried: set[Params] = set()
        # a repeated search makes many of the same loads
        self._measure = self._timed(remembered(llama.measure))
        self._record = self._timed(cache(llama.record))
        self._confirm = cache(llama.confirm)

    def run(self) -> _Result:
        """Find the best plan and its companions, with the memory of both."""
        try:
            return self._run()
        except TimeLimitError:
            seconds = time.monotonic() - self._since
            last = f"in its last {seconds:.1f} seconds: {self._doing}"
            raise TimeLimitError(
                f"no plan that fits was found within the time limit ({last}): ",
                Remedy("raise --time-limit, or set more parameters yourself, such as -c", "time_limit", "raise"),
            ) from None

    def _run(self) -> _Result:
        result = self._best_confirmed()
        if not self._reserve_for(result):
            return result
        # another plan may need no reserve
        other = result
        while other[0].trial.fits and self._reserve_for(other) and len(self._without_room) < _MAX_WITHOUT_ROOM:
            self._without_room.add(other[0].trial.params)
            other = self._best_confirmed()
        self._without_room.clear()
        is_possible = other[0].trial.fits and not self._reserve_for(other)
        while reserve := self._reserve_for(result):
            # twice the last reserve, so that few searches are enough where each result needs a little more
            self.reserve = {name: max(size, 2 * self.reserve.get(name, 0)) for name, size in reserve.items()}
            self._say(f"searching again: in use, it would take {mib_up(max(reserve.values()))} MiB more")
            result = self._best_confirmed()
        found = {each[0].priced: each for each in ((other, result) if is_possible else (result,))}
        return found[best_of([*found], self._request)]

    def _has_room(self, params: Params) -> bool:
        return params not in self._without_room

    def alternatives(
        self, best: Candidate, choice: _SharedChoice, one_slot: Params | None, summary: ModelSummary
    ) -> tuple[Alternative, ...]:
        """Find alternatives to the result of a search."""

        def measure(params: Params) -> Breakdown:
            breakdown = self._measure(params)
            return _add_companions(choice, breakdown, choice.companions.uses(params, breakdown, self._measure))

        self._say("looking for alternatives")
        share = SHARE if best.trial.fits else SHARE_OF_FAILURE
        # the search's own loads: how many more a second process makes differs from run to run
        budget = Budget(max(1, int(share * len(self._tried))), self._deadline)
        asked, facts = choice.request, choice.request.facts
        smaller = smaller_type(summary.path, summary.architecture, facts.type, facts.bits_per_weight)
        callbacks = Callbacks(measure, self._record)
        return alternatives(asked, best, callbacks, self._measure, one_slot, smaller, budget)

    def _reserve_for(self, result: _Result) -> dict[str, int]:
        """Compute the bytes that must stay free for a real load of the result."""
        candidate, choice, breakdown, uses = result
        if not candidate.trial.fits:
            return {}
        asked = lowered(self._request, choice.fixed_uses, self._others)
        return reserve_for(asked, _add_companions(choice, breakdown, uses), candidate.trial.params)

    def _best_confirmed(self) -> _Result:
        candidate, choice = self._best_of_companions()
        params = candidate.trial.params
        self._say(f"confirming {_attempt(params, self._request)}")
        breakdown = self._confirm(params)
        return candidate, choice, breakdown, choice.companions.uses(params, breakdown, self._confirm)

    def _choice(self, companions: Companions) -> _SharedChoice:
        request = self._request
        if companions.places:
            self._say(", ".join(f"{what} on {place}" for what, place in companions.places))
        fixed_uses = companions.known(request)
        lacks = lacking(fixed_uses, (*request.devices, *self._others), request.host, request.pools)
        remaining = within_pools(with_reserve(lowered(request, fixed_uses, self._others), self.reserve))
        return _SharedChoice(companions, fixed_uses, remaining, lacks)

    def _best_of_companions(self) -> tuple[Candidate, _SharedChoice]:
        """Find the best plan over all choices of companions, the lowest rank first."""
        self._llama.until(self._deadline)
        try:
            return self._best_until()
        finally:
            # the confirmation may still load
            self._llama.until(None)

    def _best_until(self) -> tuple[Candidate, _SharedChoice]:
        all_companions = self._companions or (Companions(),)
        if len(all_companions) == 1 and not all_companions[0].smaller:
            choice = self._choice(all_companions[0])
            return self._best(choice), choice
        ranked: list[tuple[Candidate, _SharedChoice]] = []
        without_room: list[_SharedChoice] = []
        failed: list[LlamaCppError | TimeLimitError] = []

        def attempt(choice: _SharedChoice) -> None:
            try:
                candidate = self._best(choice)
                params = candidate.trial.params
                uses = choice.companions.uses(params, self._measure(params), self._measure)
            except (LlamaCppError, TimeLimitError) as error:
                failed.append(error)
                return
            request = self._request
            drafting = draft_seconds(uses, request.speeds, request.host_speed, request.workload.generate)
            ranked.append((candidate, replace(choice, seconds=drafting)))
            ranked.sort(key=lambda pair: pair[1].rank(pair[0]), reverse=True)

        def consider(companions: Companions) -> None:
            try:
                choice = self._choice(companions)
            except (LlamaCppError, TimeLimitError) as error:
                failed.append(error)
                return
            if choice.lacks:
                without_room.append(choice)
            else:
                attempt(choice)

        for companions in sorted(all_companions, key=lambda companions: companions.rank):
            if ranked and not self._is_wanted(companions, ranked[0][0]):
                break
            consider(companions)
        if not ranked and without_room:
            attempt(min(without_room, key=lambda choice: choice.lacks))
        if ranked and (smaller := ranked[0][1].companions.smaller) and self._is_short_of_memory(ranked[0][0]):
            consider(smaller)
        if not ranked:
            raise failed[0]
        winner, choice = ranked[0]
        return replace(winner, choices=(*winner.choices, *_between(ranked))), choice

    def _is_wanted(self, companions: Companions, best: Candidate) -> bool:
        """Whether to try ``companions``: of rank 0 always, 1 if the context could be larger, 2 if nothing fits."""
        return companions.rank == 0 or not best.trial.fits or (companions.rank == 1 and not self._is_widest(best))

    def _is_widest(self, best: Candidate) -> bool:
        return "n_ctx" in self._request.fixed or best.trial.params.n_ctx >= self._request.n_ctx_max

    def _is_short_of_memory(self, best: Candidate) -> bool:
        trial = best.trial
        return not (trial.fits and self._is_widest(best) and is_whole(self._request, trial.devices, trial.placement))

    def _best(self, choice: _SharedChoice) -> Candidate:
        """Find the best plan with this choice of companions, with the concessions that make it better."""

        lacking: dict[str, None] = {}

        def attempt(request: Request) -> Candidate | None:
            try:
                return self._search(request, choice)
            except (LlamaCppError, TimeLimitError):
                # not the user's own parameters
                return None
            except UsageError as error:
                # this llama.cpp lacks what a lever would set
                lacking[f"a lever of --allow has no effect: {error}"] = None
                return None

        best = improve(self._search(choice.request, choice), attempt)
        return replace(best, notes=(*best.notes, *lacking))

    def _search(self, request: Request, choice: _SharedChoice) -> Candidate:
        layouts: list[Layout] = []
        choices: list[Choice] = []
        notes: list[str] = []
        latest: dict[str, int] = {}

        def measure(params: Params) -> Breakdown:
            self._say(f"loading with {_attempt(params, self._request)}")
            self._tried.add(params)
            breakdown = self._measure(params)
            latest.update(
                {row.device: row.compute for row in breakdown.rows if row.device and row.compute and not row.is_host}
            )
            uses = choice.companions.uses(params, breakdown, self._measure)
            # scratch memory, too, where a margin does not hold it
            return scratch.beyond_margins(choice.request, params, _add_companions(choice, breakdown, uses))

        def record(params: Params) -> Layout:
            self._say(f"measuring the sizes of all tensors at a context of {params.n_ctx}")
            layouts.append(self._record(params))
            return layouts[-1]

        def sizes(params: Params) -> Layout:
            self._say(f"measuring the sizes of the caches at a context of {params.n_ctx}")
            return self._record(params)

        searched, excess = context_limit.limited(request, sizes)
        is_split = request.params.split_mode == "tensor"
        if is_split:
            split = split_candidate(searched, measure, record)
            trial = split.trial
        else:
            trial = search(searched, measure, record, choices.append, self._has_room, notes.append)
        # caches of sliding windows hold a micro batch more, so their sizes follow it
        recorded, request = request.params, with_micro_batch(request, trial.params.n_ubatch)
        smallest = layouts[0] if layouts else None
        if smallest is not None:
            least = replace(request.params, n_ctx=smallest_context(searched))
            smallest = resized_layout(request.facts, smallest, recorded, least)
        if excess is not None:
            return Candidate(request, replace(trial, missing=((excess.device, excess.missing),)), excess=excess)
        if is_split:
            return split
        if not trial.fits:
            return Candidate(request, trial, layout=smallest)
        try:
            # a token's bytes in the cache are the same at every recorded context
            layout = layouts[-1] if layouts else self._record(replace(trial.params, tensor_buft_overrides=()))
            if layouts and request.params != recorded:
                at_its_context = replace(request.params, n_ctx=layout.n_ctx)
                layout = resized_layout(request.facts, layout, recorded, at_its_context)
        except (LlamaCppError, TimeLimitError):
            # the plan holds without a price
            return Candidate(request, trial)
        measured = MeasuredPlacement(request, *trial.used, trial.params, self._measure(trial.params), layout)
        price = measured.price()
        if price is None:
            return Candidate(request, trial)
        bound = None
        if not changes(request):
            kept = measured.host_only_everywhere
            seconds = objective_seconds(request, price.estimate)
            is_off = price.breakdown.flash_attn is False or flash_attention.may_be_off(request)
            bound = bound_of(request, smallest or layout, seconds, None, kept, is_without_flash=is_off)
        if bound is not None and bound.is_far:
            compute = latest | {device.name: price.breakdown.on(device.name).compute for device in measured.devices}
            at_plan = record(replace(trial.params, tensor_buft_overrides=()))
            bound = replace(bound, reasons=reasons_of(request, bound, at_plan, compute, kept, is_without_flash=is_off))
        notes += measured.notes()
        return Candidate(
            request, trial, price, tuple(choices[-3:]), bound, notes=tuple(notes), layout=smallest or layout
        )

    def _timed(self, load: Callable[[Params], _T]) -> Callable[[Params], _T]:
        """Wrap loads to note that the time limit has ended one."""

        def timed(params: Params) -> _T:
            try:
                return load(params)
            except TimeLimitError:
                self.is_cut_short = True
                raise

        return timed

    def _say(self, text: str) -> None:
        self._doing, self._since = text, time.monotonic()
        self._on_progress(Progress(self._llama.dummy_loads(), text))


def _without_unused(request: Request, trial: Trial, occupied: Set[str]) -> Request:
    """Leave out devices that neither llama.cpp uses by default nor the plan, and pools without another device."""
    used = occupied | {*(trial.params.devices or ())}
    devices = tuple(device for device in request.devices if device.is_default or device.name in used)
    names = {device.name for device in devices} | occupied
    names |= {name for name, _ in trial.missing}
    pools = tuple(pool for pool in request.pools if names.intersection((*pool.devices, pool.name)))
    return replace(request, devices=devices, pools=pools)


def _add_companions(choice: _SharedChoice, breakdown: Breakdown, uses: Sequence[SharedUse]) -> Breakdown:
    """Add to the model's breakdown a row for each device with the uses beyond the fixed ones."""
    rows: tuple[Row, ...] = beyond(choice.fixed_uses, uses)
    return replace(breakdown, rows=(*breakdown.rows, *rows)) if rows else breakdown


def _between(ranked: Sequence[tuple[Candidate, _SharedChoice]]) -> tuple[Choice, ...]:
    """Describe the choice of places for companions, where its time is estimated."""

    def place(choice: _SharedChoice) -> str:
        return ", ".join(dict.fromkeys(place for _, place in choice.companions.places))

    def seconds(candidate: Candidate, choice: _SharedChoice) -> float | None:
        return None if candidate.seconds is None else candidate.seconds + choice.seconds

    other = next((pair for pair in ranked[1:] if place(pair[1]) != place(ranked[0][1])), None)
    if other is None or (best := seconds(*ranked[0])) is None:
        return ()
    what = " and ".join(what for what, _ in ranked[0][1].companions.places)
    subject = f"where {what} {'are' if ' and ' in what else 'is'}"
    return (Choice(subject, place(ranked[0][1]), best, place(other[1]), seconds(*other)),)


def _attempt(params: Params, request: Request) -> str:
    context = ", ".join([*changed_params(request, params), f"context {params.n_ctx}"])
    if not params.devices:
        return f"{context}, all on the host"
    n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else request.n_layer + 1
    return f"{context}, {n_gpu_layers} of {request.n_layer + 1} layers on {', '.join(params.devices)}"


def _default_devices(request: Request) -> tuple[str, ...]:
    """Name the devices that llama.cpp uses without ``-dev``; none where the user names some."""
    if "devices" in request.fixed:
        return ()
    return tuple(device.name for device in request.devices if device.is_default)


def _device_use(device: DeviceLimit, row: Row, shared: int) -> DeviceUse:
    limits = device.name, device.description, device.total, device.free, device.margin
    return DeviceUse(*limits, row.model, row.context, row.compute, shared)
