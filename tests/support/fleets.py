"""Fleets made by hand, for tests of what is written about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations

from fitter.api import Plan
from fitter.planning.fleet.fleet import Disk, Fleet, FleetModel, PlaceUse, ResidentSet, Swap
from fitter.planning.fleet.residency import FleetRoom, Member, Rules, Runs, Way, models_of
from tests.support.plans import make_plan

PLACE = "CUDA0"


def plan_of(path: str) -> Plan:
    """A plan for a model at ``path`` on one card."""
    plan = make_plan(devices=(PLACE,))
    return replace(plan, model=replace(plan.model, path=path))


def make_fleet(
    needs: Mapping[str, int],
    room: int,
    *,
    residents: Collection[str] = (),
    kept: Collection[str] = (),
    never: Collection[tuple[str, str]] = (),
    shares: Mapping[str, float] | None = None,
    loads: Mapping[str, float] | None = None,
    plans: Mapping[str, Plan] | None = None,
) -> Fleet:
    """A fleet whose models take ``needs`` of ``room`` bytes on a card, as ``Runs`` has them in memory.

    ``residents`` are loaded at the start, ``kept`` may not be evicted, and pairs in ``never`` are not together.
    """
    shares = shares or {name: 1 / len(needs) for name in needs}
    loads = loads or {name: float(size) for name, size in needs.items()}
    members = tuple(
        Member(
            name,
            shares[name],
            name in residents,
            name not in kept,
            frozenset(other for pair in never if name in pair for other in pair if other != name),
        )
        for name in needs
    )
    ways = [Way({PLACE: size}, 1.0, loads[name]) for name, size in needs.items()]
    runs = Runs(Rules(members, FleetRoom({PLACE: room})), ways)
    assert runs.can_run, "a model does not fit beside those that stay"
    found, names = runs.best(), list(needs)
    named = [tuple(names[index] for index in models_of(each)) for each in found.sets]
    swaps = []
    for load in found.loads:
        if gone := models_of(load.before & ~load.after):
            evicted = tuple(names[index] for index in gone)
            running = tuple(names[index] for index in models_of(load.before))
            swaps.append(Swap(names[load.model], running, evicted, load.share))
    return Fleet(
        goal="time",
        models=tuple(
            FleetModel(
                name=name,
                plan=(plans or {}).get(name) or plan_of(f"/m/{index}.gguf"),
                share=shares[name],
                seconds=1.0,
                alone_seconds=1.0,
                load_seconds=loads[name],
                lost_seconds=0.0,
                needs={PLACE: needs[name]},
                miss=found.misses[index],
                evict_cost=found.evict_costs[index],
                is_resident=name in residents,
                may_be_evicted=name not in kept,
            )
            for index, name in enumerate(names)
        ),
        sets=tuple(ResidentSet(each, (PlaceUse(PLACE, sum(map(needs.__getitem__, each)), room),)) for each in named),
        swaps=tuple(sorted(swaps, key=lambda swap: -swap.share)),
        seconds=found.seconds,
        bound_seconds=1.0,
        any_together=max(
            size
            for size in range(1, len(names) + 1)
            if all(any({*some} <= {*each} for each in named) for some in combinations(names, size))
        ),
        disk=Disk(1e9, "given"),
    )
