"""From a request to a plan: search, have the winner confirmed, and say what it takes. Bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params, Row
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.pool_use import pool_problem, pool_uses
from fitter.planning.pricing.objective import objective_seconds, rank
from fitter.planning.pricing.pricing import bound_of, host_only_everywhere, host_only_notes, price_placement, reasons_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import context_limit
from fitter.planning.request.context_limit import Excess
from fitter.planning.request.request import DeviceLimit, Measure, Progress, Request
from fitter.planning.request.shared import (
    Companions,
    beyond,
    draft_seconds,
    lacking,
    later_of,
    lowered,
    remembered,
    taken,
)
from fitter.planning.request.shared_margin import within_pools
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, PoolUse, Problem, Search, SharedUse
from fitter.planning.search.levers import Candidate, changed_params, changes, concessions, improve
from fitter.planning.search.load_calls import DummyLoads as DummyLoads
from fitter.planning.search.load_calls import LoadCalls as LoadCalls
from fitter.planning.search.load_reserve import reserve_for, with_reserve
from fitter.planning.search.search_order import search
from fitter.planning.search.tensor_split_search import split_candidate
from fitter.planning.speed.explain import Choice
from fitter.text import mib, mib_up

_T = TypeVar("_T")

OnProgress = Callable[[Progress], None]
OnCandidate = Callable[[Params], None]


def fit(
    request: Request,
    summary: ModelSummary,
    llama: LoadCalls,
    on_progress: OnProgress,
    virtual: bool,
    companions: Sequence[Companions] = (),
    others: Sequence[DeviceLimit] = (),
    deadline: float | None = None,
) -> Plan:
    """The plan for ``request``, measured on the user's own file. Raises what asking llama.cpp raises.

    ``companions`` share the memory with the model: of several choices the plan has the best one. ``others`` are devices
    for those alone. At ``deadline`` (on the monotonic clock) the search ends: what it has found that fits is then
    confirmed, and where that is nothing, ``TimeLimitError`` is raised.
    """
    started = time.monotonic()
    running = _Fit(request, llama, on_progress, companions, others, deadline)
    found, chosen, breakdown, uses = running.run()
    trial, loads = found.trial, llama.dummy_loads()
    on_progress(Progress(loads, "done"))
    occupied = tuple(device for device in others if taken(uses, device.name))
    devices = _device_uses((*request.devices, *occupied), breakdown, uses)
    host = _host_use(request, breakdown, uses)
    pools = pool_uses(request, trial, breakdown, devices, host)
    return Plan(
        model=summary,
        params=trial.params,
        breakdown=breakdown,
        devices=devices,
        host=host,
        search=Search(loads, time.monotonic() - started, llama.shared_loads(), running.is_cut_short),
        problems=_problems(found.request, trial, devices, host, found.excess, running.room, uses, pools),
        n_layer=request.n_layer,
        virtual=virtual,
        estimate=found.price,
        choices=found.choices,
        bound=found.bound,
        levers=concessions(chosen.request, found),
        shared=uses,
        pools=pools,
        notes=(*request.notes, *found.notes),
    )


@dataclass(frozen=True)
class _SharedChoice:
    """One choice of what shares the memory, what is ``known`` of it, and the ``request`` on what that leaves.

    ``lacks``: bytes that what is known lacks by itself. ``seconds``: what drafting takes of the request.
    """

    companions: Companions
    known: tuple[SharedUse, ...]
    request: Request
    lacks: int = 0
    seconds: float = 0.0

    def rank(self, found: Candidate) -> tuple[bool, int, int, float]:
        """What is larger is the better plan; the time is that of the request with the drafting of its tokens."""
        return rank(replace(found.trial, seconds=None if found.seconds is None else found.seconds + self.seconds))


_Found = tuple[Candidate, _SharedChoice, Breakdown, tuple[SharedUse, ...]]


class _Fit:
    """One fit: the search on whatever loads fastest, and the confirmation on the user's own file."""

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
        self._own: dict[Params, Breakdown] = {}
        self._own_loads = DummyLoads(remembered(self._measure_own), cache(llama.own.record))
        self.room: dict[str, int] = {}
        skeleton = llama.skeleton
        # a search that is made again asks much of the same
        self._skeleton = None if skeleton is None else DummyLoads(remembered(skeleton.measure), cache(skeleton.record))

    def run(self) -> _Found:
        """The best plan, what shares its memory and why so, and what both take on the user's own files."""
        try:
            return self._run()
        except TimeLimitError:
            seconds = time.monotonic() - self._since
            raise TimeLimitError(
                f"no plan that fits was found within the time limit (in its last {seconds:.1f} seconds: "
                f"{self._doing}): raise --time-limit, or set more parameters yourself, such as -c"
            ) from None

    def _run(self) -> _Found:
        found = self._found()
        while room := self._room_for(found):
            # twice as much as last time, so that few searches are enough where each finds one that takes a little more
            self.room = {name: max(size, 2 * self.room.get(name, 0)) for name, size in room.items()}
            self._say(f"searching again: in use, it would take {mib_up(max(room.values()))} MiB more")
            found = self._found()
        return found

    def _room_for(self, found: _Found) -> dict[str, int]:
        """What is to stay free at least, so that a plan has room when it is loaded for real."""
        candidate, choice, breakdown, uses = found
        if not candidate.trial.fits:
            return {}
        asked = lowered(self._request, choice.known, self._others)
        return reserve_for(asked, _joined(choice, breakdown, uses), candidate.trial.params)

    def _found(self) -> _Found:
        skeleton = self._skeleton
        if skeleton is not None:
            try:
                found, choice = self._best_of(skeleton, self._suggest)
                breakdown = self._confirm(found.trial.params)
                uses = self._uses(choice, found.trial.params, breakdown, self._confirm)
                if _joined(choice, breakdown, uses) == found.trial.breakdown:
                    return found, choice, breakdown, uses
            except LlamaCppError:
                # Whatever there is to say is to be said of the user's own file.
                pass
        loads = self._own_loads
        found, choice = self._best_of(loads, lambda params: None)
        breakdown = self._measure_own(found.trial.params)
        return found, choice, breakdown, self._uses(choice, found.trial.params, breakdown, self._measure_own)

    def _choice(self, companions: Companions) -> _SharedChoice:
        request = self._request
        if companions.places:
            self._say(", ".join(f"{what} on {place}" for what, place in companions.places))
        known = companions.known(request)
        lacks = lacking(known, (*request.devices, *self._others), request.host, request.pools)
        left = within_pools(with_reserve(lowered(request, known, self._others), self.room))
        return _SharedChoice(companions, known, left, lacks)

    def _best_of(self, loads: DummyLoads, on_candidate: OnCandidate) -> tuple[Candidate, _SharedChoice]:
        """The best plan with what shares the memory in any of its places, the lowest rank of them first."""
        self._llama.until(self._deadline)
        try:
            return self._best_until(loads, on_candidate)
        finally:
            # what was found is still to be confirmed
            self._llama.until(None)

    def _best_until(self, loads: DummyLoads, on_candidate: OnCandidate) -> tuple[Candidate, _SharedChoice]:
        every = self._companions or (Companions(),)
        if len(every) == 1:
            choice = self._choice(every[0])
            return self._best(choice, loads, on_candidate), choice
        ranked: list[tuple[Candidate, _SharedChoice]] = []
        without_room: list[_SharedChoice] = []
        failed: list[LlamaCppError | TimeLimitError] = []

        def attempt(choice: _SharedChoice) -> None:
            try:
                found = self._best(choice, loads, lambda params: None)
                uses = self._uses(choice, found.trial.params, loads.measure(found.trial.params), loads.measure)
            except (LlamaCppError, TimeLimitError) as error:
                failed.append(error)
                return
            ranked.append((found, replace(choice, seconds=self._draft_seconds(uses))))
            ranked.sort(key=lambda pair: pair[1].rank(pair[0]), reverse=True)

        for companions in sorted(every, key=lambda companions: companions.rank):
            if ranked and not self._is_wanted(companions, ranked[0][0]):
                break
            try:
                choice = self._choice(companions)
            except (LlamaCppError, TimeLimitError) as error:
                failed.append(error)
                continue
            if choice.lacks:
                without_room.append(choice)
            else:
                attempt(choice)
        if not ranked and without_room:
            attempt(min(without_room, key=lambda choice: choice.lacks))
        if not ranked:
            raise failed[0]
        winner, choice = ranked[0]
        on_candidate(winner.trial.params)
        return replace(winner, choices=(*winner.choices, *_between(ranked))), choice

    def _is_wanted(self, companions: Companions, best: Candidate) -> bool:
        """Whether ``companions`` are tried: rank 0 always, 1 if the context could be larger, 2 if nothing fits."""
        is_widest = "n_ctx" in self._request.fixed or best.trial.params.n_ctx >= self._request.n_ctx_max
        return companions.rank == 0 or not best.trial.fits or (companions.rank == 1 and not is_widest)

    def _draft_seconds(self, uses: Sequence[SharedUse]) -> float:
        request = self._request
        return draft_seconds(uses, request.speeds, request.host_speed, request.workload.generate)

    def _best(self, choice: _SharedChoice, loads: DummyLoads, on_candidate: OnCandidate) -> Candidate:
        """The best plan, with what the user lets be given up where that makes it better."""

        def attempt(request: Request) -> Candidate | None:
            try:
                return self._search(request, choice, loads, lambda params: None)
            except (LlamaCppError, TimeLimitError):
                # nobody asked for these parameters
                return None

        first = self._search(choice.request, choice, loads, on_candidate)
        return improve(first, attempt, lambda found: on_candidate(found.trial.params))

    def _uses(self, choice: _SharedChoice, params: Params, own: Breakdown, measure: Measure) -> tuple[SharedUse, ...]:
        return choice.companions.uses(params, own, measure)

    def _search(
        self, request: Request, choice: _SharedChoice, loads: DummyLoads, on_candidate: OnCandidate
    ) -> Candidate:
        layouts: list[Layout] = []
        choices: list[Choice] = []
        latest: dict[str, int] = {}

        def measure(params: Params) -> Breakdown:
            self._say(f"loading with {_attempt(params, self._request)}")
            own = self._timed(loads.measure)(params)
            latest.update(
                {row.device: row.compute for row in own.rows if row.device and row.compute and not row.is_host}
            )
            return _joined(choice, own, self._uses(choice, params, own, loads.measure))

        def record(params: Params) -> Layout:
            self._say(f"measuring the sizes of all tensors at a context of {params.n_ctx}")
            layouts.append(self._timed(loads.record)(params))
            return layouts[-1]

        def sizes(params: Params) -> Layout:
            self._say(f"measuring the sizes of the caches at a context of {params.n_ctx}")
            return self._timed(loads.record)(params)

        searched, excess = context_limit.limited(request, sizes)
        is_split = request.params.split_mode == "tensor"
        if is_split:
            split = split_candidate(searched, measure, record, on_candidate)
            trial = split.trial
        else:
            trial = search(searched, measure, record, on_candidate, choices.append)
        if excess is not None:
            return Candidate(request, replace(trial, missing=((excess.device, excess.missing),)), excess=excess)
        if is_split:
            return split
        if not trial.fits or request.facts is None:
            return Candidate(request, trial)
        on_candidate(trial.params)
        if on_candidate == self._suggest and not changes(request):
            self._suggest(trial.params, is_found=True)
        try:
            # what a token takes in the cache is the same at every context that was recorded
            layout = layouts[-1] if layouts else loads.record(replace(trial.params, tensor_buft_overrides=()))
        except (LlamaCppError, TimeLimitError):
            # the plan holds without a price
            return Candidate(request, trial)
        devices, placement = trial.used
        price = price_placement(request, devices, placement, trial.params, loads.measure(trial.params), layout)
        if price is None:
            return Candidate(request, trial)
        bound = None
        if not changes(request):
            smallest = min(layouts or [layout], key=lambda layout: layout.n_ctx)
            kept = host_only_everywhere(request, devices, placement, price.breakdown, layout)
            bound = bound_of(request, smallest, objective_seconds(request, price.estimate), None, kept)
        if bound is not None and bound.is_far:
            compute = latest | {device.name: price.breakdown.on(device.name).compute for device in devices}
            recorded = record(replace(trial.params, tensor_buft_overrides=()))
            bound = replace(bound, reasons=reasons_of(request, bound, recorded, compute, kept))
        notes = host_only_notes(request, devices, placement, price.breakdown, layout)
        return Candidate(request, trial, price, tuple(choices[-3:]), bound, notes=notes)

    def _timed(self, question: Callable[[Params], _T]) -> Callable[[Params], _T]:
        """``question``, which notes where the time limit has ended it."""

        def ask(params: Params) -> _T:
            try:
                return question(params)
            except TimeLimitError:
                self.is_cut_short = True
                raise

        return ask

    def _say(self, text: str) -> None:
        self._doing, self._since = text, time.monotonic()
        self._on_progress(Progress(self._llama.dummy_loads(), text))

    def _suggest(self, params: Params, *, is_found: bool = False) -> None:
        if self._llama.beside is not None:
            self._llama.beside.suggest(params, is_found=is_found)

    def _confirm(self, params: Params) -> Breakdown:
        """What ``params`` take on the user's own file."""
        self._say(f"loading the model's own file with {_attempt(params, self._request)}")
        beside = self._llama.beside
        confirmed = None if beside is None else beside.confirm(params)
        if confirmed is not None:
            self._own[params] = confirmed
        return self._measure_own(params)

    def _measure_own(self, params: Params) -> Breakdown:
        if params not in self._own:
            self._own[params] = self._llama.own.measure(params)
        return self._own[params]


def _joined(choice: _SharedChoice, own: Breakdown, uses: Sequence[SharedUse]) -> Breakdown:
    """What the search is told: the model's own rows, and in one for each device what ``uses`` take beyond the known."""
    rows: tuple[Row, ...] = beyond(choice.known, uses)
    return replace(own, rows=(*own.rows, *rows)) if rows else own


def _between(ranked: Sequence[tuple[Candidate, _SharedChoice]]) -> tuple[Choice, ...]:
    """What is said of the choice of places for what shares the memory, where its time is estimated."""

    def place(choice: _SharedChoice) -> str:
        return ", ".join(dict.fromkeys(place for _, place in choice.companions.places))

    def seconds(found: Candidate, choice: _SharedChoice) -> float | None:
        return None if found.seconds is None else found.seconds + choice.seconds

    times = [seconds(*pair) for pair in ranked[:2]]
    if len(times) < 2 or times[0] is None:
        return ()
    what = " and ".join(what for what, _ in ranked[0][1].companions.places)
    subject = f"where {what} {'are' if ' and ' in what else 'is'}"
    return (Choice(subject, place(ranked[0][1]), times[0], place(ranked[1][1]), times[1]),)


def _attempt(params: Params, request: Request) -> str:
    context = ", ".join([*changed_params(request, params), f"context {params.n_ctx}"])
    if not params.devices:
        return f"{context}, all on the host"
    n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else request.n_layer + 1
    return f"{context}, {n_gpu_layers} of {request.n_layer + 1} layers on {', '.join(params.devices)}"


def _device_uses(
    devices: Sequence[DeviceLimit], breakdown: Breakdown, shared: Sequence[SharedUse]
) -> tuple[DeviceUse, ...]:
    uses = []
    for device in devices:
        row = breakdown.on(device.name)
        uses.append(
            DeviceUse(
                device.name,
                device.description,
                device.total,
                device.free,
                device.margin,
                row.model,
                row.context,
                row.compute,
                taken(shared, device.name),
            )
        )
    return tuple(uses)


def _host_use(request: Request, breakdown: Breakdown, shared: Sequence[SharedUse]) -> HostUse:
    host, row = request.host, breakdown.host
    return HostUse(host.total, host.free, host.margin, row.model, row.context, row.compute, taken(shared, None))


_KEPT = {"cache_ram": "-cram", "ctx_checkpoints": "-ctxcp"}
"""What a user may set of what a program keeps later, and the option of each."""


def _problems(
    request: Request,
    trial: Trial,
    devices: Sequence[DeviceUse],
    host: HostUse,
    excess: Excess | None,
    room: Mapping[str, int],
    uses: Sequence[SharedUse] = (),
    pools: Sequence[PoolUse] = (),
) -> tuple[Problem, ...]:
    problems = []
    if excess is not None:
        return (Problem(excess.device, excess.missing, excess.message),)
    lacking_pools = {pool.name: pool for pool in pools if pool.name in dict(trial.missing)}
    for name, missing in trial.missing:
        if name in lacking_pools:
            problems.append(pool_problem(request, lacking_pools[name], missing, trial.params, uses))
            continue
        if any(name in pool.members and _is_of(pool, name, devices, host) for pool in lacking_pools.values()):
            # what it has left is the pool's, of which that is said
            continue
        if name == "host":
            remedy = "free host memory or put more of the model on devices"
            if "n_ctx" in request.fixed and trial.params.n_ctx > request.n_ctx_min:
                remedy = "use a smaller -c, " + remedy
            if kept := [option for name, option in _KEPT.items() if dict(request.params.more).get(name)]:
                remedy = f"use a smaller {' or '.join(kept)}, " + remedy
            if not request.host.paging:
                remedy += ", or let weights be read from disk again and again with --allow paging"
            used, shared, free, margin = host.used, host.shared, host.free or 0, host.margin
            where = "the host"
        else:
            device = next(device for device in devices if device.name == name)
            used, shared, free, margin = device.used, device.shared, device.free, device.margin
            where = name
            freed = [
                f"leave {flag} out"
                for flag, field in (("-ngl", "n_gpu_layers"), ("-ts", "tensor_split"), ("-c", "n_ctx"))
                if field in request.fixed
            ]
            if request.params.tensor_buft_overrides:
                freed.append("put fewer tensors there with -ot")
            remedy = " or ".join([*freed, "use a smaller margin with --fit-target"])
        on_host = later_of(uses) if name == "host" else 0
        parts = ((shared - on_host, "beside the model"), (on_host, "for what the program keeps later"))
        named = " and ".join(f"{mib_up(size)} MiB of them {what}" for size, what in parts if size)
        needed = f"{mib_up(used)} MiB are needed" + (f" ({named})" if named else "")
        extra = f"a margin of {mib(margin)} MiB"
        if room.get(name, 0) > margin:
            extra = f"up to {mib_up(room[name])} MiB more in use"
        problems.append(
            Problem(
                name,
                missing,
                f"{where} lacks {mib_up(missing)} MiB: {needed} plus {extra}, but {mib(free)} MiB are free; {remedy}",
            )
        )
    return tuple(problems)


def _is_of(pool: PoolUse, name: str, devices: Sequence[DeviceUse], host: HostUse) -> bool:
    """Whether what lacks there is the pool's: a device has no less by its own limit, the host no less than that."""
    return next((device.fits for device in devices if device.name == name), host.free == pool.free or host.fits)
