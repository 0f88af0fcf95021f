"""The best set that stays in memory, by fitter's own search, SciPy's ``milp`` and OR-tools' CP-SAT, on drawn fleets.

``python -m tools.fleets.solver`` needs SciPy and OR-tools (``pip install scipy ortools``), which fitter does not. All
three minimize the same: each model has one of its ways within the room, or is loaded when it is asked for.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from fitter.planning.fleet.assignment import most_valuable
from fitter.planning.fleet.residency import FleetRoom, Member, Rules, Way

Instance = tuple[Rules, list[list[Way]]]

_CARD = 24_000


def drawn(random_: random.Random, n_models: int, n_cards: int) -> Instance:
    """Draw a fleet: each model on 1, 2, 4 ... cards that are the same, whole or with part of it on the host."""
    cards = tuple(f"CUDA{index}" for index in range(n_cards))
    room = FleetRoom(dict.fromkeys(cards, _CARD) | {"host": 200_000}, (cards,))
    ways = []
    for _ in range(n_models):
        size, seconds = random_.randint(500, 60_000), random_.uniform(0.2, 20)
        ways.append([Way({"host": size + 1000}, 20 * seconds, size / 3400)])
        for count in (1, 2, 4, 8):
            for begin in range(0, n_cards - count + 1, count):
                for part in (1.0, 0.7, 0.4):
                    each = round(size * part / count)
                    if each <= _CARD and (part == 1 or size * part > _CARD / 4):
                        needs = dict.fromkeys(cards[begin : begin + count], each) | {"host": 1000 + size - each * count}
                        ways[-1].append(Way(needs, seconds * (1 + 12 * (1 - part)), size / 3400))
    shares = [random_.random() for _ in range(n_models)]
    members = tuple(Member(f"m{index}", share / sum(shares)) for index, share in enumerate(shares))
    return Rules(members, room), ways


def own(instance: Instance) -> float:
    """Solve by branch and bound."""
    return most_valuable(*instance)[0]


def _columns(instance: Instance) -> tuple[list[float], list[int], list[list[int]]]:
    """Return the cost, the model and the needs of every way, and of being loaded when needed."""
    rules, ways = instance
    costs, models, needs = list[float](), list[int](), list[list[int]]()
    for model, (share, each) in enumerate(zip(rules.shares, ways, strict=True)):
        for way in each:
            costs.append(share * way.seconds)
            models.append(model)
            needs.append(rules.room.row(way.needs))
        costs.append(min(share * (way.seconds + way.reload_seconds) for way in each))
        models.append(model)
        needs.append([0] * len(rules.room.bytes))
    return costs, models, needs


def by_milp(instance: Instance) -> float:
    """Solve by SciPy's ``milp`` (HiGHS)."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    costs, models, needs = _columns(instance)
    rules, ways = instance
    one_of = np.array([[float(of == model) for of in models] for model in range(len(ways))])
    room = list(rules.room.bytes.values())
    found = milp(
        costs,
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_of, 1, 1), LinearConstraint(np.array(needs).T, -np.inf, room)],
        options={"mip_rel_gap": 1e-9},
    )
    return float(found.fun)


def by_cp_sat(instance: Instance) -> float:
    """Solve by OR-tools' CP-SAT, with costs in microseconds."""
    from ortools.sat.python import cp_model

    costs, models, needs = _columns(instance)
    rules, ways = instance
    model = cp_model.CpModel()
    takes = [model.new_bool_var(f"x{index}") for index in range(len(costs))]
    for number in range(len(ways)):
        model.add_exactly_one(take for take, of in zip(takes, models, strict=True) if of == number)
    for place, size in enumerate(rules.room.bytes.values()):
        model.add(sum(take * need[place] for take, need in zip(takes, needs, strict=True)) <= size)
    model.minimize(sum(take * round(cost * 1e6) for take, cost in zip(takes, costs, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.solve(model)
    return solver.objective_value / 1e6


SOLVERS: dict[str, Callable[[Instance], float]] = {"own": own, "milp": by_milp, "CP-SAT": by_cp_sat}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the median and the longest time of each solver, and how often its answer is the best."""
    parser = argparse.ArgumentParser(description="Compare solvers on drawn fleets.")
    parser.add_argument("--count", type=int, default=30)
    args = parser.parse_args(argv)
    print("models,cards,solver,median_ms,longest_ms,best")
    for n_models, n_cards in ((3, 1), (5, 2), (8, 2), (8, 8)):
        random_ = random.Random(f"{n_models} {n_cards}")
        instances = [drawn(random_, n_models, n_cards) for _ in range(args.count)]
        answers: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {}
        for name, solve in SOLVERS.items():
            solve(instances[0])
            for instance in instances:
                begin = time.perf_counter()
                answers.setdefault(name, []).append(solve(instance))
                times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
        least = [min(found) for found in zip(*answers.values(), strict=True)]
        for name, found in answers.items():
            best = sum(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, least, strict=True))
            figures = f"{statistics.median(times[name]):.1f},{max(times[name]):.1f},{best}/{args.count}"
            print(f"{n_models},{n_cards},{name},{figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
