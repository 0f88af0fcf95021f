"""Candidates for one model of a fleet: plans on all of a machine, on some devices, in less memory; why none fits.

Bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import le
from typing import Any

from fitter import api
from fitter.api.fits.shared_models import bytes_of_a_process, use_of
from fitter.errors import UsageError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.model.header import open_model
from fitter.parameters.table import PARAMETERS
from fitter.planning.fleet.assignment import assign
from fitter.planning.fleet.residency import FleetRoom, Member, Rules, Way
from fitter.planning.plan.plan import Plan
from fitter.planning.request.constraints import workload_of
from fitter.planning.request.request import DEFAULT_FIT_CTX
from fitter.planning.request.session import Session
from fitter.planning.request.shared import HOST_NAME, parse_reserve, taken
from fitter.planning.request.summary import DeviceUse
from fitter.text import mib_up

SERVER = "llama-server"
"""The program that runs a fleet."""

_PARTS = (1.0, 0.75, 0.5, 0.25)
"""Shares of the memory of its devices that a model is planned with."""

_PLACING = ("devices", "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "override_tensor")
"""Keywords with which the user places a model."""


@dataclass(frozen=True)
class FleetCase:
    """A model of a fleet, as ``fitter.toml`` describes it."""

    member: Member
    model: str
    """Path or address."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of ``fit``, without a worker."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """The most bytes that it may take on a device, by its name in lower case, or on ``host``."""
    n_ctx: int = 0
    """The smallest context, in tokens."""
    prompt_tokens_per_second: float = 0.0
    """The lowest speed of prompts."""
    generation_tokens_per_second: float = 0.0
    """The lowest speed of generation."""


_REQUEST = ("prompt", "generate")


@dataclass(frozen=True)
class PlannedWay:
    """A plan as a way to run a model."""

    plan: Plan = field(repr=False)
    way: Way
    devices: tuple[str, ...] | None = None
    """The devices that it was planned with; ``None`` for all."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Devices by those of the plan in whose place they stand, where it was planned with others that are the same."""


class ModelPlanner:
    """Plans one model of a fleet, with a worker of its own that remembers its measurements."""

    def __init__(self, case: FleetCase, disk: float) -> None:
        self.case = case
        words = dict(case.keywords)
        timeout = words.pop("timeout", None) or DEFAULT_TIMEOUT
        self._words = {"program": SERVER} | words
        self.worker = RememberingWorker(timeout=timeout, llama_cpp=words.get("llama_cpp"))
        self._disk = disk
        self._n_ctx: int | None = None
        self.alone: PlannedWay | None = None
        """The quickest plan with the whole machine, with the smallest context."""

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        return self.case.member.name

    def plan_alone(self) -> PlannedWay:
        """Plan the model with the whole machine, with the smallest context that the user wants.

        Raises:
            FitterError: As ``fit``.
        """
        kind = PARAMETERS["fit_ctx"].kind
        least = max(kind.check("fit_ctx", self._given("fit_ctx") or DEFAULT_FIT_CTX), self.case.n_ctx)
        if self._given("n_ctx") is not None:
            plan = self.fit({})
        elif any(self._given(word) is not None for word in ("workload", "users")):
            # the work decides which context is the smallest
            plan = self.fit({})
            session = plan.turns.session if plan.turns else Session()
            streams = _streams(plan)
            holds = session.longest * (session.users if streams == 1 else 1)
            self._n_ctx = min(max(least, holds) * streams, context_of(plan))
            plan = self.fit({}, is_least=True)
        else:
            self._n_ctx = least
            plan = self.fit({}, is_least=True)
            n_ctx_train = open_model(self.case.model, self.worker.header).n_ctx_train or least
            self._n_ctx = min(least, n_ctx_train) * _streams(plan)
            if plan.params.embeddings:
                plan = self.fit({}, is_least=True)
                self._words["prompt"] = plan.estimate.input_tokens if plan.estimate else None
                self.alone = self.candidate(plan)
                return self.alone
            # all contexts are compared at one request
            given = {word: self._given(word) for word in _REQUEST}
            asked = {word: PARAMETERS[word].check(value) for word, value in given.items() if value is not None}
            one = workload_of(asked.get("prompt"), asked.get("generate"), min(least, n_ctx_train), is_set=True)
            self._words |= {"prompt": one.prompt, "generate": one.generate}
            plan = self.fit({}, is_least=True)
        self.alone = self.candidate(plan)
        return self.alone

    def fit(self, reserve: Mapping[str, int], devices: Sequence[str] | None = None, *, is_least: bool = False) -> Plan:
        """Plan the model with ``reserve`` bytes kept free by place.

        Args:
            reserve: Bytes by device, or on ``host``.
            devices: Devices to choose from; all by default.
            is_least: Whether the context is the smallest one.
        """
        words = dict(self._words)
        if devices is not None:
            words["devices"] = tuple(devices) or ("none",)
        if is_least and self._n_ctx:
            words["n_ctx"] = self._n_ctx
        return self._fit(words, reserve)

    def _fit(self, words: dict[str, Any], reserve: Mapping[str, int]) -> Plan:
        own = parse_reserve(words.get("reserve") or {})
        both = {place: own.get(place, 0) + reserve.get(place, 0) for place in {**own, **reserve}}
        words["reserve"] = {place: size for place, size in both.items() if size > 0}
        try:
            return api.fit(self.case.model, worker=self.worker, **words)
        finally:
            if self.worker.rpc:
                # an rpc-server talks to one process only
                self.worker.release()

    def repeat(self, keywords: Mapping[str, Any], reserve: Mapping[str, int] | None = None) -> Plan:
        """Plan the model with ``keywords`` that fix its parameters, and with ``reserve`` bytes kept free by place."""
        return self._fit({**self._words, **keywords}, reserve or {})

    def candidate(self, plan: Plan, devices: tuple[str, ...] | None = None) -> PlannedWay:
        """Count what ``plan`` needs while it runs."""
        rows = use_of(plan).rows
        needs = {row.device or HOST_NAME: row.used for row in rows}
        for pool in plan.pools:
            needs[pool.name] = sum(needs.get(member, 0) for member in pool.members)
        price = plan.estimate
        seconds = (plan.turns.all.seconds if plan.turns else price.seconds) if price else 0.0
        return PlannedWay(plan, Way(needs, seconds, self.load_seconds(plan) + self.lost_seconds(plan)), devices)

    def load_seconds(self, plan: Plan) -> float:
        """Return the seconds to read the model, and what is loaded with it, from the disk."""
        beside = sum(row.model for use in plan.shared if not use.is_of_others for row in use.rows)
        return (plan.model.bytes + beside) / self._disk

    def lost_seconds(self, plan: Plan) -> float:
        """Return the seconds to compute again what the caches keep of the turn before."""
        if plan.turns is None or plan.estimate is None:
            return 0.0
        session = plan.turns.session
        lost = max(0.0, session.prompt - session.computed(plan.turns.kept)) if session.reused else 0.0
        return lost * plan.estimate.estimate.prompt_seconds

    def is_good(self, plan: Plan) -> bool:
        """Whether ``plan`` fits and has all that the user wants of it."""
        case, price = self.case, plan.estimate
        if not plan.fits or price is None:
            return False
        others = [use for use in plan.shared if use.is_of_others]
        used = {use.name.lower(): use.used - taken(others, use.name) for use in plan.devices}
        used[HOST_NAME] = plan.host.used - taken(others, None)
        return (
            price.generation_tokens_per_second >= case.generation_tokens_per_second
            and price.prompt_tokens_per_second >= case.prompt_tokens_per_second
            and context_of(plan) >= case.n_ctx
            and all(used.get(place, 0) <= most for place, most in case.memory.items())
        )

    def ways(self, room: FleetRoom, reloads: float) -> list[PlannedWay]:
        """Plan the model in several ways, of which none needs as much as another one everywhere and is slower.

        Args:
            room: The machine's room.
            reloads: Seconds to load all models: a way that takes longer than alone by more is worse than loading it
                each time.
        """
        assert self.alone is not None
        found = [self.alone] if self.is_good(self.alone.plan) else []
        longest = self.alone.way.seconds + reloads
        free = {use.name: max(0, use.free - use.margin) for use in self.alone.plan.devices}
        on_host = None
        is_placed = any(self._given(word) is not None for word in _PLACING)
        everywhere = tuple(free)
        for names in (everywhere,) if is_placed else _choices(everywhere, room):
            devices = None if is_placed else names
            last: PlannedWay | None = None
            for part in _PARTS:
                rooms = {name: round(part * free[name]) for name in names}
                if last is not None and all(last.way.needs.get(name, 0) <= size for name, size in rooms.items()):
                    # the same plan fits there
                    continue
                if on_host and self._least_spilled(sum(rooms.values()), on_host) > longest:
                    break
                try:
                    plan = self.fit({name: free[name] - size for name, size in rooms.items()}, devices, is_least=True)
                except UsageError:
                    # these devices contradict what the user has fixed
                    break
                if not plan.fits:
                    break
                last = self.candidate(plan, devices)
                on_host = on_host if names else last
                if self.is_good(plan):
                    found += [last, *(() if is_placed else _elsewhere(last, names, room))]
                if last.way.seconds > longest:
                    break
        return _useful(found, room)

    def _least_spilled(self, room: int, on_host: PlannedWay) -> float:
        """Return seconds that a request takes at least with ``room`` bytes of devices: half of the host's time for the
        share of the model that has no room there.
        """
        assert self.alone is not None
        needs = sum(size for place, size in self.alone.way.needs.items() if place != HOST_NAME)
        return max(0.0, 1 - room / max(1, needs)) * on_host.way.seconds / 2

    def _given(self, name: str) -> Any:
        return self._words.get(name)


def _choices(everywhere: tuple[str, ...], room: FleetRoom) -> Iterator[tuple[str, ...]]:
    """Yield devices to choose from: none; all; of devices that are the same 1, 2, 4 ... of them."""
    chosen = []
    for group in room.alike:
        size = 1
        while size < len(group):
            chosen.append(group[:size])
            size *= 2
        chosen.append(group)
    yield from dict.fromkeys(((), everywhere, *chosen))


def _streams(plan: Plan) -> int:
    return 1 if plan.params.kv_unified else plan.params.n_seq_max


def context_of(plan: Plan) -> int:
    """Return the context of a plan, in tokens."""
    return plan.params.n_ctx or plan.breakdown.n_ctx


def room_of(plans: Sequence[Plan]) -> FleetRoom:
    """Return the room for several processes: of each place what is free, without the largest margin.

    Every process counts what it takes of a card for itself; the free memory is without one already.
    """
    room: dict[str, int] = {}
    for plan in plans:
        for use in plan.devices:
            _least(room, use.name, max(0, use.free - use.margin) + bytes_of_a_process(use))
        if plan.host.free is not None:
            _least(room, HOST_NAME, max(0, plan.host.free - plan.host.margin))
        for pool in plan.pools:
            _least(room, pool.name, max(0, pool.free - pool.margin))
    groups: dict[tuple[str, int, int, int], list[str]] = {}
    for use in max((plan.devices for plan in plans), key=len, default=()):
        groups.setdefault(_kind(use), []).append(use.name)
    return FleetRoom(room, tuple(map(tuple, groups.values())))


def _least(room: dict[str, int], place: str, size: int) -> None:
    room[place] = min(size, room.get(place, size))


def _kind(use: DeviceUse) -> tuple[str, int, int, int]:
    return use.description, use.total, use.free, use.margin


def _elsewhere(candidate: PlannedWay, names: Sequence[str], room: FleetRoom) -> Iterator[PlannedWay]:
    """Yield the same way on other devices that are the same, in groups of the same size."""
    group = next((group for group in room.alike if names and set(names) < set(group)), None)
    if group is None:
        return
    for begin in range(len(names), len(group) - len(names) + 1, len(names)):
        others = group[begin : begin + len(names)]
        instead = dict(zip(names, others, strict=True))
        needs = {instead.get(place, place): size for place, size in candidate.way.needs.items()}
        yield replace(candidate, way=replace(candidate.way, needs=needs), devices=others, instead=instead)


def _useful(found: Sequence[PlannedWay], room: FleetRoom) -> list[PlannedWay]:
    """Leave out what needs as much as another one everywhere, and is no quicker."""
    kept: list[tuple[list[int], PlannedWay]] = []
    for one in sorted(found, key=lambda one: (one.way.seconds, sum(room.row(one.way.needs)))):
        row = room.row(one.way.needs)
        if not any(all(map(le, less, row)) for less, _ in kept):
            kept.append((row, one))
    return [one for _, one in kept]


def beyond_its_budget(planner: ModelPlanner) -> str:
    """Say that a model fits, but not as quickly, with such a context or in so little memory as the user wants."""
    assert planner.alone is not None
    name, plan, case = planner.name, planner.alone.plan, planner.case
    price = plan.estimate
    if price and price.generation_tokens_per_second < case.generation_tokens_per_second:
        return (
            f"'{name}' makes {price.generation_tokens_per_second:.3g} tokens/s alone on this machine, and its budget "
            f"wants {case.generation_tokens_per_second:g}: lower that, or choose a smaller quantization"
        )
    if price and price.prompt_tokens_per_second < case.prompt_tokens_per_second:
        return (
            f"'{name}' reads {price.prompt_tokens_per_second:.4g} tokens/s of prompts alone on this machine, and its "
            f"budget wants {case.prompt_tokens_per_second:g}: lower that"
        )
    if (n_ctx := context_of(plan)) < case.n_ctx:
        return f"'{name}' has a context of {n_ctx} at most, and its budget wants {case.n_ctx}: lower that"
    return f"'{name}' takes more memory than its budget allows, however it is placed: raise the budget"


def why_not(rules: Rules, ways: Sequence[Sequence[Way]]) -> str:
    """Say which models cannot be in memory beside those that must stay, and what would help.

    Args:
        rules: The models and the room.
        ways: The ways of each model, of which each fits alone.
    """
    members = rules.members
    staying = [index for index, member in enumerate(members) if member.stays]
    for one in staying:
        for other in members:
            if other.name in members[one].never_with or members[one].name in other.never_with:
                name = members[one].name
                return f"'{name}' always stays in memory, but must never be with '{other.name}': let it be evicted"
    for count in range(1, len(staying) + 1):
        for group in combinations(staying, count):
            if lack := _lack(rules, ways, group):
                names = ", ".join(members[index].name for index in group)
                why = f"the models that always stay ({names}) do not fit together: {lack}"
                return why + _remedy(rules, ways, staying)
    names = ", ".join(members[index].name for index in staying)
    for index, member in enumerate(members):
        if index not in staying and (lack := _lack(rules, ways, (*staying, index))):
            beside = f" beside the models that always stay ({names})" if names else " within the margins"
            why = f"'{member.name}' does not fit{beside}: {lack}"
            return why + _remedy(rules, ways, staying)
    return "no way was found to run all models beside those that always stay: let one of them be evicted"


def _lack(rules: Rules, ways: Sequence[Sequence[Way]], group: Sequence[int]) -> str:
    """Say what a group lacks in the ways that need least; empty if it has a way to fit."""
    members = tuple(replace(rules.members[index], is_resident=True, share=1.0) for index in group)
    of_group = [ways[index] for index in group]
    if assign(Rules(members, rules.room), of_group):
        return ""
    least = [min(each, key=lambda way: sum(rules.room.row(way.needs))) for each in of_group]
    sums = {place: sum(way.needs.get(place, 0) for way in least) for place in rules.room.bytes}
    place, size = max(
        ((place, sums[place] - size) for place, size in rules.room.bytes.items()), key=lambda lack: lack[1]
    )
    return f"{place} lacks {mib_up(size)} MiB" if size > 0 else "no combination of their placements has room"


def _remedy(rules: Rules, ways: Sequence[Sequence[Way]], staying: Sequence[int]) -> str:
    for group in (*((index,) for index in staying), tuple(staying)):
        rest = tuple(
            replace(member, is_resident=False, may_be_evicted=True) if index in group else member
            for index, member in enumerate(rules.members)
        )
        if assign(Rules(rest, rules.room), ways):
            names = " and ".join(f"'{rules.members[index].name}'" for index in group)
            return f"; it fits if {names} may be evicted"
    return "; take smaller quantizations or contexts"
