"""``fitter fleet`` beside what other programs do, replayed on ten request logs: ``python -m tools.fleets.compare``.

Each fleet of ``fleet_cases`` that does not fit whole is planned for the order of each log. Every other policy has the
models as ``fitter fit`` plans them alone, with the same smallest context, so that none of them is slowed down by the
memory of a longer one; memory within a margin is there for none. A load that is out of memory is counted; then all
other models are unloaded and it is tried again, also for the policies that would lose the request, so that all answer
the same requests.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fitter
from fitter.api.fits.shared_models import bytes_of_a_process
from fitter.api.fleet_candidates import FleetCase, ModelPlanner, PlannedWay, room_of
from fitter.api.plan_fleet import FleetRequest, plan_fleet
from fitter.machine.host import default_disk_bandwidth
from fitter.planning.fleet.residency import FleetRoom, Member, Way
from tools.fleets.cases import FLEETS, FleetExample
from tools.fleets.replay import PATTERNS, POLICIES, Asked, Replayed, ReplayModel, Setup, draw, read_log, replay

_OWN = ("share", "resident", "evict", "never_with")


def alone(example: FleetExample) -> tuple[dict[str, PlannedWay], dict[str, dict[str, Way]]]:
    """Plan each model with the machine for itself, and on each device alone."""
    plans, on_one = {}, {}
    for name, words in example.models.items():
        keywords = {**example.keywords, **_of_fit(words)}
        planner = ModelPlanner(FleetCase(Member(name, 1), words["model"], keywords), _DISK)
        with closing(planner.worker):
            plans[name] = planner.plan_alone()
            devices = [use.name for use in plans[name].plan.devices]
            on = {name: planner.candidate(planner.fit({}, [name], is_least=True)) for name in devices}
        on_one[name] = {device: one.way for device, one in on.items() if one.plan.fits}
    return plans, on_one


def _of_fit(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``fit`` among those of a model."""
    return {key: word for key, word in words.items() if key not in (*_OWN, "model")}


_DISK = default_disk_bandwidth()[0]


def setup_of(
    example: FleetExample,
    plans: Mapping[str, PlannedWay],
    on_one: Mapping[str, Mapping[str, Way]],
    room: FleetRoom,
    fleet: fitter.Fleet | None = None,
) -> Setup:
    """Make the setup of a replay; without a fleet only to draw logs."""
    models = {}
    smallest = on_one[min(plans, key=lambda name: plans[name].plan.model.bytes)]
    fastest = min((way.seconds for way in smallest.values()), default=1.0)
    slowness = {device: way.seconds / fastest for device, way in smallest.items()}
    for name, one in plans.items():
        is_embedding = bool(example.models[name].get("embedding"))
        planned = one.way
        if fleet is not None:
            model = fleet.model(name)
            planned = Way(model.needs, model.seconds, model.load_seconds + model.lost_seconds)
        cache = sum(use.context for use in one.plan.devices) + one.plan.host.context
        tokens = 2048.0 if is_embedding else 512.0
        kind = "embedding" if is_embedding else "llm"
        buffers = [use.compute + bytes_of_a_process(use) for use in one.plan.devices if use.model]
        each = max(buffers, default=0)
        predicted = one.plan.model.bytes + cache
        models[name] = ReplayModel(name, kind, one.way, planned, predicted, tokens, on_one[name], slowness, each)
    if fleet is None:
        return Setup(models, room)
    costs = {model.name: model.evict_cost for model in fleet.models}
    return Setup(models, room, tuple(frozenset(each.models) for each in fleet.sets), costs)


def compare(example: FleetExample, logs: Mapping[str, Path]) -> Iterator[tuple[str, list[Replayed]]]:
    """Replay every log with every policy."""
    plans, on_one = alone(example)
    room = room_of([one.plan for one in plans.values()])
    first = setup_of(example, plans, on_one, room)
    drawn = {name: draw(name, list(first.models.values())) for name in PATTERNS}
    known_names = list(plans)
    for title, path in logs.items():
        found = list(dict.fromkeys(asked.model for asked in read_log(path)))
        # the models of a real log stand for the first ones of the fleet
        known = dict(zip(found, known_names, strict=False))
        rows = (asked for asked in read_log(path) if asked.model in known)
        drawn[title] = [Asked(asked.seconds, known[asked.model], asked.tokens) for asked in rows]
    for title, log in drawn.items():
        cases = tuple(
            FleetCase(
                Member(
                    name,
                    0.0,
                    bool(words.get("resident")),
                    never_with=frozenset(words.get("never_with", ())),
                ),
                words["model"],
                {**example.keywords, **_of_fit(words)},
            )
            for name, words in example.models.items()
        )
        fleet = plan_fleet(FleetRequest(cases, order=tuple(asked.model for asked in log)))
        setup = setup_of(example, plans, on_one, room, fleet)
        yield title, [replay(log, replace(policy(setup), retries=True), setup) for policy in POLICIES]


def main(argv: list[str] | None = None) -> int:
    """Print a row for each fleet, log and policy."""
    parser = argparse.ArgumentParser(description="Replay request logs with fitter fleet and with other programs.")
    parser.add_argument(
        "--log", type=Path, action="append", default=[], help="a real log as CSV: seconds, model, tokens"
    )
    parser.add_argument("-k", default="", help="only fleets with this in their name")
    args = parser.parse_args(argv)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["fleet", "log", "policy", "answered", "out_of_memory", "loads", "seconds", "tokens_per_second"])
    for example in (each for each in FLEETS if args.k in each.name):
        for title, found in compare(example, {path.stem: path for path in args.log}):
            for one in found:
                answered = one.answered / one.requests
                figures = (f"{answered:.3f}", one.out_of_memory, one.loads, f"{one.seconds:.0f}")
                table.writerow([example.name, title, one.policy, *figures, f"{one.tokens_per_second:.4g}"])
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
