"""A fleet in the lock: which sets of its models fit together, and whether they still do. Bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from fitter.api.fleet_candidates import ModelPlanner, PlannedWay, room_of
from fitter.api.measure_load import fit_keywords_of
from fitter.errors import PlanError, UsageError
from fitter.parameters.table import BesideKeywords, ForKeywords, LoadKeywords, ServerKeywords, of_a_case, taken_by
from fitter.planning.fleet.fleet import Fleet
from fitter.regression.cases import Case, CaseValue, with_build
from fitter.regression.compare import CaseComparison, Cause, Move, sizes
from fitter.regression.fleets import FleetTable, fleet_case
from fitter.regression.lockfile import Lock, LockedFleet, LockedMember, Snapshot
from fitter.text import human

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
