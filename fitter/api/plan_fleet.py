"""Plan several models on one machine: which are in memory together, with which parameters, and what makes room.

``fleet_candidates`` plans each model in several ways, ``planning.fleet`` chooses one of them, and what a set leaves
goes to its models. Then each model is measured again beside the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fitter.api.checked_call import checked_call
from fitter.api.fleet_candidates import (
    FleetCase,
    ModelPlanner,
    PlannedWay,
    beyond_its_budget,
    context_of,
    room_of,
    why_not,
)
from fitter.api.measure_load import fit_keywords_of
from fitter.errors import LlamaCppError, PlanError, UsageError
from fitter.machine.bandwidth import parse_bandwidth
from fitter.machine.host import default_disk_bandwidth, disk_bandwidth
from fitter.model.files.source import show
from fitter.model.location import is_address, model_files
from fitter.parameters.table import GOALS, Fitting
from fitter.parameters.values import items, shown
from fitter.planning.fleet.assignment import assign
from fitter.planning.fleet.fleet import Disk, Fleet, FleetModel, PlaceUse, ResidentSet, Swap
from fitter.planning.fleet.residency import MOST_MODELS, FleetRoom, Member, Residency, Rules, Runs, Way, models_of
from fitter.planning.pricing.objective import GAIN
from fitter.planning.request.shared import HOST_NAME
from fitter.system import processors

if TYPE_CHECKING:
    from typing_extensions import Unpack

OnStep = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and the step's name."""

_T = TypeVar("_T")

_UNUSED = 1e-9
"""Shares of requests below this are none."""


@dataclass(frozen=True)
class FleetRequest:
    """What a fleet must achieve.

    Attributes:
        cases: The models, all on the same machine.
        goal: ``time``, ``resident`` or ``alone``.
        disk: Bytes per second that models are loaded with; ``None`` to measure this machine's, or to take a common one.
        is_here: Whether the machine is this one.
        in_a_row: Requests for a model one after the other, on average.
        order: Names of the models in the order in which they were asked for, in place of shares and a random order.
    """

    cases: tuple[FleetCase, ...]
    goal: str = "time"
    disk: float | None = None
    is_here: bool = False
    in_a_row: float = 1.0
    order: tuple[str, ...] = ()


@checked_call(Fitting)
def fleet(
    members: Mapping[str, Mapping[str, Any]],
    *,
    goal: str = GOALS[0],
    disk_bandwidth: float | str | None = None,
    in_a_row: float = 1.0,
    jobs: int | None = None,
    on_step: OnStep | None = None,
    **parameters: Unpack[Fitting],
) -> Fleet:
    """Plan several models on one machine: which are in memory together, and what makes room for what.

    Each model gets one plan. Every set of models that can be in memory is within the margin of every device and of the
    host, by the bytes that llama.cpp measured for each.

    Args:
        members: For each name ``model``, a path or an address, and keywords of ``fit``; also ``share`` of the requests
            (relative to the others, 1), ``resident`` (always in memory, false), ``evict`` (may make room, true) and
            ``never_with`` (names of models that are never in memory at the same time).
        goal: ``time``: the least seconds of a request, with loads; ``resident``: the most models in memory;
            ``alone``: each as fast as alone, in turns.
        disk_bandwidth: How fast models are loaded, in bytes per second or as ``3.4GB/s``; by default measured on this
            machine, or that of a common disk for devices that are described.
        in_a_row: Requests for a model one after the other, on average, beyond chance; 1 for requests in random order.
        jobs: Models that are measured at the same time; by default one per processor.
        on_step: Called after each step with the steps done, all steps and a text.
        parameters: Keywords of ``fit`` for all models, such as those of the machine.

    Returns:
        The fleet; ``Fleet.fits`` is false where the models cannot run, and ``Fleet.problems`` says why.

    Raises:
        UsageError: A keyword makes no sense.
        FitterError: As ``fit`` raises it.
    """
    rate = parse_bandwidth(disk_bandwidth) if isinstance(disk_bandwidth, str) else disk_bandwidth
    if not isinstance(members, Mapping) or not all(isinstance(each, Mapping) for each in members.values()):
        raise UsageError('the members are keywords by name: give a mapping such as {"chat": {"model": "chat.gguf"}}')
    shares = {name: _share(name, each.get("share", 1)) for name, each in members.items()}
    if members and not sum(shares.values()):
        raise UsageError("every model has a share of 0: nothing would be asked for")
    cases = []
    for name, each in members.items():
        words = {**parameters, **{word: value for word, value in each.items() if word != "share"}}
        if not words.get("model"):
            raise UsageError(f"'{name}' has no model: give a path or an address as model")
        never = items(f"never_with of '{name}'", words.pop("never_with", ()), "names")
        if unknown := next((other for other in never if other not in members), None):
            raise UsageError(f"'{name}' is never with '{unknown}', which is no model of the fleet")
        member = Member(
            name,
            shares[name] / sum(shares.values()),
            bool(words.pop("resident", False)),
            bool(words.pop("evict", True)),
            frozenset(never) - {name},
        )
        cases.append(FleetCase(member, os.fsdecode(words.pop("model")), words))
    is_here = not any(case.keywords.get("gpus") for case in cases)
    request = FleetRequest(tuple(cases), goal, rate, is_here, in_a_row)
    return plan_fleet(request, on_step=on_step, jobs=jobs)


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"the share of '{name}' is {shown(value)}: give a number of at least 0")
    return float(value)


def plan_fleet(request: FleetRequest, *, on_step: OnStep | None = None, jobs: int | None = None) -> Fleet:
    """Choose parameters for every model, and which are in memory together.

    Args:
        request: What the fleet must achieve.
        on_step: Called after each step.
        jobs: Models that are measured at the same time; by default one per processor.

    Raises:
        UsageError: The request makes no sense.
        FitterError: As ``fit`` raises it.
    """
    cases = request.cases
    _check(request)
    disk = _disk(request)
    with ExitStack() as stack:
        planners = [ModelPlanner(case, disk.bandwidth) for case in cases]
        for planner in planners:
            stack.callback(planner.worker.close)
        return _FleetPlanner(request, planners, disk, on_step or (lambda done, total, text: None), jobs).plan()


def _check(request: FleetRequest) -> None:
    if not 2 <= len(request.cases) <= MOST_MODELS:
        count = len(request.cases)
        remedy = "leave some out" if count > MOST_MODELS else "add another one"
        raise UsageError(f"a fleet has 2 to {MOST_MODELS} models, and this one {count}: {remedy}")
    if request.goal not in GOALS:
        raise UsageError(f"'{request.goal}' is no goal of a fleet: choose from {', '.join(GOALS)}")
    if not 1 <= request.in_a_row < float("inf"):
        raise UsageError(f"{request.in_a_row:g} requests in a row make no sense: give a number of at least 1")
    for case in request.cases:
        if not is_address(case.model) and not Path(case.model).exists():
            raise UsageError(f"the model of '{case.member.name}' is gone: {show(Path(case.model))} does not exist")


def _disk(request: FleetRequest) -> Disk:
    if request.disk is not None:
        return Disk(request.disk, "given")
    if request.is_here:
        local = [file for case in request.cases if not is_address(case.model) for file in model_files(case.model)]
        for file in sorted(local, key=lambda file: -file.stat().st_size):
            if measured := disk_bandwidth(file):
                return Disk(measured, f"measured with {file.name}")
    return Disk(*default_disk_bandwidth())


class _FleetPlanner:
    """The steps of one fleet."""

    def __init__(
        self, request: FleetRequest, planners: Sequence[ModelPlanner], disk: Disk, on_step: OnStep, jobs: int | None
    ) -> None:
        self._request, self._planners, self._disk, self._say = request, planners, disk, on_step
        is_shared = request.is_here or any(case.keywords.get("rpc") for case in request.cases)
        # the free memory of real devices must not change while another load looks at it
        self._jobs = 1 if is_shared else min(jobs or processors(), len(planners))
        self._done, self._steps = 0, 4 * len(planners)
        members, order = tuple(case.member for case in request.cases), request.order
        if order:
            members = tuple(replace(each, share=order.count(each.name) / len(order)) for each in members)
        self._members = members

    def plan(self) -> Fleet:
        """Plan the fleet."""
        alone = self._each(ModelPlanner.plan_alone, "alone")
        problems = [
            f"'{planner.name}' does not fit on this machine, even alone: {one.plan.problems[0].message}"
            for planner, one in zip(self._planners, alone, strict=True)
            if one.plan.problems
        ]
        if problems:
            return self._failure(problems)
        number = {member.name: index for index, member in enumerate(self._members)}
        order = tuple(number[name] for name in self._request.order)
        self._rules = Rules(self._members, room_of([one.plan for one in alone]), self._request.in_a_row, order)
        rules = self._rules
        reloads = sum(one.way.reload_seconds for one in alone)
        self._candidates = [[one] for one in alone]
        has_all = all(planner.is_good(one.plan) for planner, one in zip(self._planners, alone, strict=True))
        is_enough = has_all and rules.room.holds([one.way for one in alone])
        if not is_enough:
            self._candidates = self._each(
                lambda planner: planner.ways(rules.room, reloads), "with parts of the machine"
            )
        if problems := [beyond_its_budget(planner) for planner, ways in self._by_model() if not ways]:
            return self._failure(problems)
        chosen = self._choose()
        if chosen is None:
            return self._failure([why_not(self._rules, [[one.way for one in ways] for ways in self._candidates])])
        chosen = self._confirm(self._grow(chosen))
        return self._fleet(chosen, self._runs(chosen).best(), alone)

    def _by_model(self) -> list[tuple[ModelPlanner, list[PlannedWay]]]:
        return list(zip(self._planners, self._candidates, strict=True))

    def _choose(self) -> list[PlannedWay] | None:
        """Choose a way for each model, and plan it on the very devices that were chosen; ``None`` if there is none."""
        while True:
            choice = assign(self._rules, [[one.way for one in ways] for ways in self._candidates], self._request.goal)
            if choice is None:
                return None
            is_as_expected = True
            chosen = []
            for planner, ways, index in zip(self._planners, self._candidates, choice.ways, strict=True):
                one = ways[index]
                if one.instead:
                    plan = planner.fit({}, one.devices, is_least=True)
                    real = planner.candidate(plan, one.devices)
                    is_as_expected &= real.way == one.way
                    ways[index : index + 1] = [real] if planner.is_good(plan) else []
                    one = real
                chosen.append(one)
            if is_as_expected:
                return chosen

    def _each(self, ask: Callable[[ModelPlanner], _T], text: str) -> list[_T]:
        """Ask about every model, several at a time."""
        with ThreadPoolExecutor(self._jobs) as pool:
            asked = [pool.submit(ask, planner) for planner in self._planners]
            try:
                found = []
                for planner, one in zip(self._planners, asked, strict=True):
                    found.append(_named(planner.name, one))
                    self._step(f"{planner.name} {text}")
                return found
            except BaseException:
                for one in asked:
                    one.cancel()
                for planner in self._planners:
                    planner.worker.dismiss()
                raise

    def _step(self, text: str) -> None:
        self._done += 1
        self._say(self._done, self._steps, text)

    # --- what each set leaves

    def _grow(self, chosen: list[PlannedWay]) -> list[PlannedWay]:
        """Give what the sets leave to their models: first where more memory saves most, then for longer contexts."""
        chosen = list(chosen)
        if self._request.goal == "alone":
            return chosen
        order = sorted(range(len(chosen)), key=lambda model: -self._lost(model, chosen[model]))
        for is_least in (True, False):
            slow = [model for model in order if self._lost(model, chosen[model]) > 0]
            waiting = set(slow if is_least else order)
            for model in slow if is_least else order:
                planner, now = self._planners[model], chosen[model]
                reserve = self._others(chosen, model, waiting)
                if is_least:
                    plan = planner.fit(reserve, is_least=True)
                else:
                    fixed = fit_keywords_of(now.plan)
                    # batches of an embedder follow the context
                    open_words = {"n_ctx", *(("n_batch", "n_ubatch") if now.plan.params.embeddings else ())}
                    plan = planner.repeat({word: fixed[word] for word in fixed if word not in open_words}, reserve)
                waiting.discard(model)
                one = planner.candidate(plan)
                if not planner.is_good(plan) or not self._keeps_sets(chosen, model, one.way):
                    continue
                is_quicker = one.way.seconds < now.way.seconds * (1 - GAIN)
                has_more = context_of(one.plan) > context_of(now.plan) and one.way.seconds <= now.way.seconds * (
                    1 + GAIN
                )
                if is_quicker or has_more:
                    chosen[model] = one
        return chosen

    def _lost(self, model: int, now: PlannedWay) -> float:
        alone = self._planners[model].alone
        assert alone is not None
        return self._members[model].share * (now.way.seconds - alone.way.seconds)

    def _runs(self, chosen: Sequence[PlannedWay]) -> Runs:
        return Runs(self._rules, [one.way for one in chosen])

    def _others(self, chosen: Sequence[PlannedWay], model: int, waiting: set[int]) -> dict[str, int]:
        """Return the bytes at each place that the model must leave to the others of its sets.

        What is left is divided among those that are ``waiting`` for it.
        """
        most: dict[str, int] = {}
        pools = {pool.name: pool.members for one in chosen for pool in one.plan.pools}
        pooled = {member for members in pools.values() for member in members}
        for each in self._runs(chosen).sets:
            if not each >> model & 1:
                continue
            others = [other for other in models_of(each) if other != model]
            n_waiting = 1 + sum(other in waiting for other in others)
            kept = {}
            for place in dict.fromkeys((*self._rules.room.bytes, *pooled)):
                taken = sum(chosen[other].way.needs.get(place, 0) for other in others)
                kept[place] = taken
                if place in self._rules.room.bytes and (place not in pooled):
                    left = self._rules.room.bytes[place] - taken - chosen[model].way.needs.get(place, 0)
                    # the rest of a pool is kept free on the host, which is in it
                    at = HOST_NAME if place in pools else place
                    kept[at] = kept.get(at, 0) + left - left // n_waiting
            most = {place: max(most.get(place, 0), size) for place, size in {**most, **kept}.items()}
        return {place: size for place, size in most.items() if place not in pools}

    def _keeps_sets(self, chosen: Sequence[PlannedWay], model: int, way: Way) -> bool:
        """Whether the same sets fit if the model runs in another ``way``."""
        ways = [way if index == model else one.way for index, one in enumerate(chosen)]
        return Runs(self._rules, ways).sets == self._runs(chosen).sets

    # --- the answer

    def _confirm(self, chosen: Sequence[PlannedWay]) -> list[PlannedWay]:
        """Measure each model again with its final parameters, beside what the others of its sets take.

        Raises:
            PlanError: The free memory has changed.
            LlamaCppError: llama.cpp measures something else than before.
        """
        confirmed = []
        for model, (planner, one) in enumerate(zip(self._planners, chosen, strict=True)):
            for reserve in self._beside(chosen, model):
                plan = planner.repeat(fit_keywords_of(one.plan), reserve)
                if not plan.fits:
                    raise PlanError(
                        f"'{planner.name}' no longer fits beside the other models, because memory was taken meanwhile: "
                        "plan again"
                    )
                if planner.candidate(plan).way.needs != one.way.needs:
                    raise LlamaCppError(
                        f"llama.cpp measures '{planner.name}' differently beside the other models: plan it alone, and "
                        "report this model"
                    )
            confirmed.append(replace(one, plan=plan))
            self._step(f"{planner.name} beside the others")
        return confirmed

    def _beside(self, chosen: Sequence[PlannedWay], model: int) -> list[dict[str, int]]:
        """List what the others take: the most at each place, or with pools of memory each set by itself."""
        if not any(one.plan.pools for one in chosen):
            return [self._others(chosen, model, set())]
        found = []
        for each in self._runs(chosen).sets:
            others = [other for other in models_of(each) if other != model]
            places = {place for other in others for place in chosen[other].way.needs} - self._pools(chosen)
            if each >> model & 1:
                sums = {place: sum(chosen[other].way.needs.get(place, 0) for other in others) for place in places}
                found.append(sums)
        return found

    def _pools(self, chosen: Sequence[PlannedWay]) -> set[str]:
        return {pool.name for one in chosen for pool in one.plan.pools}

    def _fleet(self, chosen: Sequence[PlannedWay], residency: Residency, alone: Sequence[PlannedWay]) -> Fleet:
        names = [member.name for member in self._members]
        models = tuple(
            FleetModel(
                member.name,
                one.plan,
                member.share,
                one.way.seconds,
                first.way.seconds,
                planner.load_seconds(one.plan),
                planner.lost_seconds(one.plan),
                one.way.needs,
                residency.misses[index],
                residency.evict_costs[index],
                member.is_resident,
                member.may_be_evicted,
            )
            for index, (member, planner, one, first) in enumerate(
                zip(self._members, self._planners, chosen, alone, strict=True)
            )
        )
        sets = tuple(
            ResidentSet(tuple(names[model] for model in models_of(each)), self._uses(chosen, models_of(each)))
            for each in residency.sets
        )
        return Fleet(
            self._request.goal,
            models,
            sets,
            _swaps(residency, names),
            residency.seconds,
            min(residency.seconds, self._bound(alone)),
            self._runs(chosen).any_together,
            self._disk,
            sum(planner.worker.dummy_loads for planner in self._planners),
        )

    def _uses(self, chosen: Sequence[PlannedWay], models: Sequence[int]) -> tuple[PlaceUse, ...]:
        room = self._rules.room.bytes
        places = list(dict.fromkeys((*room, HOST_NAME)))
        return tuple(
            PlaceUse(place, sum(chosen[model].way.needs.get(place, 0) for model in models), room.get(place))
            for place in places
        )

    def _bound(self, alone: Sequence[PlannedWay]) -> float:
        """Return seconds that no way to run these models beats: each as quick as any placement on the whole machine.

        A set of models whose weights are larger than the machine's whole memory cannot stay in memory.
        """
        rules = self._rules
        quickest = []
        for one in alone:
            plan, price = one.plan, one.plan.estimate
            share = plan.bound.seconds / price.seconds if plan.bound and price else 1.0
            # of some files, not every tensor is loaded
            loaded = sum(use.model for use in plan.devices) + plan.host.model
            weights = {HOST_NAME: min(plan.model.bytes, loaded)}
            quickest.append(Way(weights, share * one.way.seconds, one.way.reload_seconds))
        room = rules.room.bytes
        pools = {pool.name for one in alone for pool in one.plan.pools}
        all_of_it = {HOST_NAME: sum(size for place, size in room.items() if place not in pools)}
        whole = FleetRoom(all_of_it if HOST_NAME in room or pools else {})
        return Runs(Rules(rules.members, whole, rules.in_a_row, rules.order), quickest).static_seconds

    # --- what does not fit

    def _failure(self, problems: Sequence[str]) -> Fleet:
        return Fleet(self._request.goal, (), (), (), 0.0, 0.0, 0, self._disk, problems=tuple(problems))


def _named(name: str, asked: Future[_T]) -> _T:
    """Return the answer. Raises ``UsageError`` with the model's name before it."""
    try:
        return asked.result()
    except UsageError as error:
        raise UsageError(f"'{name}': {error}") from None


def _swaps(residency: Residency, names: Sequence[str]) -> tuple[Swap, ...]:
    """List what makes room for what, the most frequent first; what happens once at the start is left out."""

    def named(models: int) -> tuple[str, ...]:
        return tuple(names[model] for model in models_of(models))

    swaps = [
        Swap(names[load.model], named(load.before), named(load.before & ~load.after), load.share)
        for load in residency.loads
        if load.share > _UNUSED
    ]
    return tuple(sorted(swaps, key=lambda swap: -swap.share))
