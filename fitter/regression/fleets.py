"""``[fleet]`` of ``fitter.toml``: cases that share a machine, and the sets of them in the lock. Bytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.api.fleet_candidates import FleetCase, ModelPlanner, PlannedWay, room_of
from fitter.api.measure_load import fit_keywords_of
from fitter.api.plan_fleet import FleetRequest, OnStep, plan_fleet
from fitter.errors import PlanError, UsageError
from fitter.machine.bandwidth import parse_bandwidth
from fitter.model.files.source import show
from fitter.parameters.table import (
    GOALS,
    BesideKeywords,
    ForKeywords,
    LoadKeywords,
    ServerKeywords,
    of_a_case,
    taken_by,
)
from fitter.parameters.values import shown_in_file
from fitter.planning.fleet.fleet import Fleet
from fitter.planning.fleet.residency import Member
from fitter.planning.request.session import last_requests
from fitter.programs.llama_server.text import safe_name
from fitter.regression.cases import (
    CASES_FILE,
    EXAMPLE,
    Case,
    CaseValue,
    check_keys,
    check_trusted,
    read_cases,
    read_table,
    with_build,
)
from fitter.regression.compare import CaseComparison, Cause, Move, sizes
from fitter.regression.lockfile import Lock, LockedFleet, LockedMember, Snapshot
from fitter.regression.trust import read_toml
from fitter.text import human

_EXAMPLE = '[fleet] with goal = "time"'
_MACHINE = ("gpu", "profile", "host_memory", "llama_cpp")
"""Keys of the machine, which all models of a fleet have in common."""
_KEYS = ("cases", "goal", "log", "in_a_row", "disk_bandwidth", "models")
_MODEL_KEYS = ("share", "resident", "evict", "never_with")
_MOST_SHARE = 1e12


@dataclass(frozen=True)
class _Wish:
    """What the user wants of a model of the fleet."""

    share: float | None = None
    is_resident: bool = False
    may_be_evicted: bool = True
    never_with: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FleetTable:
    """The table ``[fleet]``."""

    cases: tuple[Case, ...]
    """The cases that are its models."""
    members: tuple[Member, ...]
    """The models as the user wants them, in the same order."""
    goal: str = "time"
    """``time``, ``resident`` or ``alone``."""
    disk: float | None = None
    """Bytes per second that models are loaded with, if given."""
    in_a_row: float = 1.0
    """Requests for a model one after the other, on average."""
    log: Path | None = None
    """The log of a server, whose requests stand in place of shares."""


def has_fleet(path: Path) -> bool:
    """Whether ``fitter.toml`` has a fleet. Raises ``UsageError``."""
    return "fleet" in read_toml(path, "write one")


def read_fleet(path: Path, *, is_trusted: bool = False) -> FleetTable:
    """Read the fleet of ``fitter.toml``. Raises ``UsageError``, as ``read_cases``."""
    document = read_toml(path, f"write one, with cases such as {EXAMPLE}, and {_EXAMPLE}")
    if "fleet" not in document:
        raise UsageError(f"{show(path)} has no fleet: add {_EXAMPLE}")
    cases = read_cases(path, is_trusted=is_trusted)
    try:
        table = read_table(document["fleet"], "fleet")
        check_keys(table, _KEYS, "fleet")
        chosen = _chosen(cases, table.get("cases"))
        goal = table.get("goal", GOALS[0])
        if goal not in GOALS:
            raise UsageError(f"fleet.goal is {shown_in_file(goal)}: choose from {', '.join(GOALS)}")
        _check_one_machine(chosen)
        members = _members(chosen, read_table(table.get("models", {}), "fleet.models"))
        in_a_row = _in_a_row(table)
        log = _log(table, path) if "log" in table else None
    except UsageError as error:
        raise UsageError(f"{show(path)}: {error}") from None
    return FleetTable(chosen, members, goal, _disk(table, path), in_a_row, log)


def fleet(
    cases_file: str | os.PathLike[str] = CASES_FILE,
    *,
    is_here: bool = False,
    rpc: str | Sequence[str] = (),
    llama_cpp: str | None = None,
    goal: str | None = None,
    trust: bool = False,
    jobs: int | None = None,
    on_step: OnStep | None = None,
) -> Fleet:
    """Plan the fleet of ``fitter.toml``: which models are in memory together, with which parameters.

    Every byte is measured by dummy loads of llama.cpp, and every set that can be in memory is within the margin of
    every device and of the host.

    Args:
        cases_file: A ``fitter.toml`` with ``[fleet]``.
        is_here: Whether to plan for this machine's devices, whatever the cases name.
        rpc: Addresses (``host:port``) of rpc-servers whose devices stand before all others.
        llama_cpp: The llama.cpp to measure with, in place of what the cases name.
        goal: ``time``, ``resident`` or ``alone``, in place of the file's.
        trust: Whether the file may name native code.
        jobs: Models that are measured at the same time; by default one per processor.
        on_step: Called after each step with the steps done, all steps and a text.

    Returns:
        The fleet; ``Fleet.fits`` is false where the models cannot run, and ``Fleet.problems`` says why.

    Raises:
        UsageError: The file, or a parameter, makes no sense.
        FitterError: As ``fit`` raises it.
    """
    path = Path(cases_file)
    table = read_fleet(path, is_trusted=trust)
    cases = with_build(table.cases, llama_cpp)
    check_trusted(cases, path, trust)
    more: dict[str, Any] = {"rpc": rpc} if rpc else {}
    request = FleetRequest(
        tuple(
            fleet_case(case, member, is_here=is_here, **more) for case, member in zip(cases, table.members, strict=True)
        ),
        goal or table.goal,
        table.disk,
        is_here,
        table.in_a_row,
        () if table.log is None else requests_in(table.log, table.members),
    )
    return plan_fleet(request, on_step=on_step, jobs=jobs)


def fleet_case(case: Case, member: Member, *, is_here: bool = False, **more: Any) -> FleetCase:
    """Make the model of a fleet from its case; ``more``: keywords of ``fit``."""
    keywords = case.keywords()
    if "program" not in case.settings:
        # a fleet is what servers run
        del keywords["program"]
    if is_here:
        keywords.pop("gpus", None)
    budget = case.budget
    return FleetCase(
        member,
        str(case.model),
        {**keywords, **more},
        budget.memory,
        budget.n_ctx or 0,
        budget.prompt_tokens_per_second or 0.0,
        budget.generation_tokens_per_second or 0.0,
    )


def _chosen(cases: Sequence[Case], names: Any) -> tuple[Case, ...]:
    if names is None:
        return tuple(cases)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f'fleet.cases is {shown_in_file(names)}: give a list of cases, such as ["chat", "embed"]')
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"fleet.cases names '{twice}' twice: a fleet has one model of a name")
    found = []
    for name in names:
        of = [case for case in cases if _is_of(case.name, name)]
        if not of:
            raise UsageError(f"fleet.cases names '{name}', but there is no [cases.{name}]: add it, or leave it out")
        found += of
    return tuple(found)


def _is_of(name: str, table: str) -> bool:
    """Whether a case is that of a table, or one match of its pattern."""
    return name == table or name.startswith(table + "/")


def _check_one_machine(cases: Sequence[Case]) -> None:
    for key in _MACHINE:
        values = {case.name: case.llama_cpp if key == "llama_cpp" else case.settings.get(key) for case in cases}
        first = next(iter(values.values()))
        for name, value in values.items():
            if value != first:
                one = next(iter(values))
                raise UsageError(
                    f"a fleet is on one machine, but '{one}' and '{name}' differ in {key}: write it once, in [defaults]"
                )


def _members(cases: Sequence[Case], table: Mapping[str, Any]) -> tuple[Member, ...]:
    names = [case.name for case in cases]
    wishes: dict[str, _Wish] = {}
    for key, value in table.items():
        of = [name for name in names if _is_of(name, key)]
        if not of:
            raise UsageError(f"fleet.models.{key} is no model of the fleet: there are {', '.join(names)}")
        wish = _wish(read_table(value, f"fleet.models.{key}"), f"fleet.models.{key}", names)
        wishes |= dict.fromkeys(of, wish)
    shares = [1.0 if (share := wishes.get(name, _Wish()).share) is None else share for name in names]
    if not sum(shares):
        raise UsageError("fleet.models gives every model a share of 0: nothing would be asked for")
    return tuple(
        Member(name, share / sum(shares), wish.is_resident, wish.may_be_evicted, wish.never_with - {name})
        for name, share in zip(names, shares, strict=True)
        for wish in (wishes.get(name, _Wish()),)
    )


def _wish(table: Mapping[str, Any], where: str, names: Collection[str]) -> _Wish:
    check_keys(table, _MODEL_KEYS, where)
    share = table.get("share")
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if share is not None and not (is_number and 0 <= share <= _MOST_SHARE):
        raise UsageError(f"{where}.share is {shown_in_file(share)}: give a number, such as 3 or 0.6")
    for key in ("resident", "evict"):
        if not isinstance(table.get(key, False), bool):
            raise UsageError(f"{where}.{key} is {shown_in_file(table[key])}: give true or false")
    never = table.get("never_with", [])
    if not isinstance(never, list) or not all(isinstance(name, str) for name in never):
        raise UsageError(f"{where}.never_with is {shown_in_file(never)}: give a list of models")
    apart = frozenset(name for each in never for name in names if _is_of(name, each))
    if unknown := next((each for each in never if not any(_is_of(name, each) for name in names)), None):
        raise UsageError(
            f"{where}.never_with names '{unknown}', which is no model of the fleet: there are {', '.join(names)}"
        )
    return _Wish(None if share is None else float(share), table.get("resident", False), table.get("evict", True), apart)


def _in_a_row(table: Mapping[str, Any]) -> float:
    value = table.get("in_a_row", 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MOST_SHARE:
        raise UsageError(f"fleet.in_a_row is {shown_in_file(value)}: give a number of requests, such as 6")
    return float(value)


def requests_in(log: Path, members: Sequence[Member]) -> tuple[str, ...]:
    """Read the models of the last requests from the log of a server, in their order. Raises ``UsageError``."""
    # a preset for llama-server has some names in another form
    names = {safe_name(member.name): member.name for member in members} | {each.name: each.name for each in members}
    return tuple(names[name] for name in last_requests(log, names))


def _log(table: Mapping[str, Any], path: Path) -> Path:
    log = table["log"]
    if not isinstance(log, str) or not log:
        raise UsageError(f"fleet.log is {shown_in_file(log)}: give the log of a llama-server or of llama-swap")
    models = table.get("models", {})
    given = next((f"fleet.models.{name}.share" for name, each in models.items() if "share" in each), None)
    if given := given or ("fleet.in_a_row" if "in_a_row" in table else None):
        raise UsageError(f"{given} is given, and fleet.log has the requests: leave one of them out")
    return path.absolute().parent / os.path.expanduser(log)


def _disk(table: Mapping[str, Any], path: Path) -> float | None:
    value = table.get("disk_bandwidth")
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageError(f'{show(path)}: fleet.disk_bandwidth is {shown_in_file(value)}: give a text such as "3.4GB/s"')
    try:
        return parse_bandwidth(value)
    except UsageError as error:
        raise UsageError(f"{show(path)}: fleet.disk_bandwidth: {error}") from None


FLEET = "fleet"
"""The name of the fleet among the cases of a lock."""


def locked_fleet(fleet: Fleet) -> LockedFleet:
    """Return what a lock records of ``fleet``. Raises ``PlanError`` if the models do not fit."""
    if not fleet.fits:
        raise PlanError(f"the fleet does not fit: {fleet.problems[0]}")
    members = {model.name: LockedMember(_recorded(fit_keywords_of(model.plan)), model.needs) for model in fleet.models}
    return LockedFleet(tuple(each.models for each in fleet.sets), members)


def _recordable() -> set[str]:
    """Return the keywords that a lock may have: parameters of a load, no file, no build and no machine."""
    parameters = (*taken_by(LoadKeywords), *taken_by(ServerKeywords), *taken_by(ForKeywords), *taken_by(BesideKeywords))
    return {each.name for each in parameters if not each.kind.is_file and each.name != "reserve"}


def _recorded(keywords: Mapping[str, Any]) -> dict[str, CaseValue]:
    names = _recordable()
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in keywords.items()
        if value is not None and name in names
    }


def compare_sets(table: FleetTable, lock: Lock, llama_cpp: str | None) -> tuple[CaseComparison, ...]:
    """Measure every model of the fleet with its locked parameters, and compare each set with the machine's room.

    A setting that has changed since in ``fitter.toml`` replaces the locked parameter.

    Raises:
        UsageError: The lock has a keyword that no fleet records, such as one that names native code.
        FitterError: As ``fit``.
    """
    locked = lock.fleet
    assert locked is not None
    for name, model in locked.models.items():
        if others := model.keywords.keys() - _recordable():
            raise UsageError(f"'{name}' has {min(others)} in the lock, which no fleet records: run 'fitter lock'")
    now: dict[str, PlannedWay] = {}
    for case, member in zip(with_build(table.cases, llama_cpp), table.members, strict=True):
        planner = ModelPlanner(fleet_case(case, member), 1.0)
        with closing(planner.worker):
            keywords = locked.models[case.name].keywords
            changed = _changed(case, lock.cases.get(case.name))
            now[case.name] = planner.candidate(
                planner.repeat({name: value for name, value in keywords.items() if name not in changed})
            )
    room = room_of([one.plan for one in now.values()]).bytes
    return tuple(_compared(names, locked, now, room) for names in locked.sets)


def _changed(case: Case, snapshot: Snapshot | None) -> set[str]:
    """Return the keywords of settings that are not as they were locked."""
    before = {} if snapshot is None else snapshot.settings
    return {of_a_case()[key].name for key, value in case.settings.items() if before.get(key) != value}


def _compared(
    names: Sequence[str], locked: LockedFleet, now: Mapping[str, PlannedWay], room: Mapping[str, int]
) -> CaseComparison:
    moves, causes = [], []
    for place in dict.fromkeys(place for name in names for place in (*locked.models[name].needs, *now[name].way.needs)):
        before = sum(locked.models[name].needs.get(place, 0) for name in names)
        after = sum(now[name].way.needs.get(place, 0) for name in names)
        failure = ""
        if place in room and after > room[place]:
            failure = (
                f"{', '.join(names)} no longer fit together: {place} takes {human(after)} and has room for "
                f"{human(room[place])}"
            )
        if before != after or failure:
            moves.append(Move(place, before, after, "bytes", failure=failure))
        for name in names:
            old, new = locked.models[name].needs.get(place, 0), now[name].way.needs.get(place, 0)
            if old != new:
                causes.append(Cause("model", f"{name} on {place}", *sizes(old, new)))
    return CaseComparison(f"{FLEET}/{'+'.join(names)}", None, None, tuple(moves), tuple(causes))
