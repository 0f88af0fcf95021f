"""The choice of one way to run for each model of a fleet, and a bound that no choice can beat. Seconds.

A model has one way to run, whatever is in memory beside it, because a server's file gives it one command. First comes
the best set that stays in memory, by branch and bound; its seconds are the bound. From there, and from each model's
quickest way, single models change their way while that helps; few combinations are all tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from fitter.planning.fleet.residency import Residency, Rules, Runs, Way

MOST_TRIED = 4000
"""The most combinations that are all tried."""
MOST_WALKED = 300
"""The same where each is followed through a log."""
_MOST_NODES = 60_000
"""Nodes of branch and bound; beyond, the bound is each model's quickest way without loads."""
_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class Assignment:
    """A way of each model.

    Attributes:
        ways: For each model, the index of its way.
        residency: How the fleet runs with these.
        bound: Seconds that no choice among the ways, and no order of evictions, can beat.
    """

    ways: tuple[int, ...]
    residency: Residency
    bound: float


@dataclass
class _Search:
    rules: Rules
    ways: Sequence[Sequence[Way]]
    goal: str
    known: dict[tuple[int, ...], tuple[tuple[float, ...], Residency] | None] = field(default_factory=dict)
    best: tuple[tuple[float, ...], tuple[int, ...]] | None = None

    def value(self, chosen: tuple[int, ...]) -> tuple[float, ...] | None:
        """Return what the goal makes least; ``None`` for what cannot run, or is surely worse than the best."""
        if chosen not in self.known:
            runs = Runs(self.rules, [ways[index] for ways, index in zip(self.ways, chosen, strict=True)])
            if not runs.can_run:
                self.known[chosen] = None
            elif self.goal == "time" and self.best and runs.static_seconds >= self.best[0][0] - _LEAST_GAIN:
                return None
            else:
                self._add(chosen, runs)
        found = self.known[chosen]
        return found[0] if found else None

    def _add(self, chosen: tuple[int, ...], runs: Runs) -> None:
        most = runs.sets[0].bit_count()
        if self.goal == "resident" and self.best and -most > self.best[0][0]:
            self.known[chosen] = None
            return
        residency = runs.best()
        value = (float(-most), residency.seconds) if self.goal == "resident" else (residency.seconds,)
        self.known[chosen] = value, residency
        if self.best is None or value < (*self.best[0][:-1], self.best[0][-1] - _LEAST_GAIN):
            self.best = value, chosen

    def improve(self, start: tuple[int, ...]) -> None:
        """Change the way of one model at a time while that helps."""
        self.value(start)
        found = self.known.get(start)
        now, at = found[0] if found else (math.inf,), start
        is_better = True
        while is_better:
            is_better = False
            for model, ways in enumerate(self.ways):
                for index in range(len(ways)):
                    other = (*at[:model], index, *at[model + 1 :])
                    value = self.value(other)
                    if value is not None and value < now:
                        now, at, is_better = value, other, True


def assign(rules: Rules, ways: Sequence[Sequence[Way]], goal: str = "time") -> Assignment | None:
    """Choose a way for each model.

    Args:
        rules: The models and the room.
        ways: The ways of each model, at least one each.
        goal: One of ``fitter.parameters.table.GOALS``.

    Returns:
        The choice; ``None`` where no choice lets every model run beside those that stay.
    """
    quickest = tuple(min(range(len(each)), key=lambda index: each[index].seconds) for each in ways)
    if goal == "alone":
        ways = [[each[index]] for each, index in zip(ways, quickest, strict=True)]
        search = _Search(rules, ways, "time")
        if search.value((0,) * len(ways)) is None:
            return None
        residency = search.known[(0,) * len(ways)]
        assert residency
        return Assignment(quickest, residency[1], residency[1].seconds)
    search = _Search(rules, ways, goal)
    bound, starts = most_valuable(rules, ways)
    for start in dict.fromkeys((*starts, quickest)):
        search.improve(start)
    n_combinations = math.prod(map(len, ways))
    if n_combinations <= (MOST_WALKED if rules.order else MOST_TRIED):
        for chosen in product(*(range(len(each)) for each in ways)):
            search.value(chosen)
    elif search.best is None:
        for chosen in _in_order(rules, ways):
            search.improve(chosen)
    if search.best is None:
        return None
    found = search.known[search.best[1]]
    assert found
    return Assignment(search.best[1], found[1], bound)


def _in_order(rules: Rules, ways: Sequence[Sequence[Way]]) -> Iterator[tuple[int, ...]]:
    """Yield combinations in which each model takes least of one place."""
    for place in rules.room.bytes:
        yield tuple(
            min(range(len(each)), key=lambda index: (each[index].needs.get(place, 0), each[index].seconds))
            for each in ways
        )


class _Knapsack:
    """Branch and bound over the set that stays in memory: each model has one of its ways, or is loaded when needed."""

    def __init__(self, rules: Rules, ways: Sequence[Sequence[Way]]) -> None:
        self._rules = rules
        self._places = rules.room.places
        self._nodes = 0
        self.is_complete = True
        shares = rules.shares
        self._members = range(len(ways))
        options: list[list[tuple[float, int | None, list[int]]]] = []
        for model, each in enumerate(ways):
            rows: list[tuple[float, int | None, list[int]]] = [
                (shares[model] * way.seconds, index, rules.room.row(way.needs)) for index, way in enumerate(each)
            ]
            if not rules.members[model].stays:
                least = min(shares[model] * (way.seconds + way.reload_seconds / rules.in_a_row) for way in each)
                rows.append((least, None, [0] * len(self._places)))
            options.append(sorted(rows, key=lambda row: (row[0], sum(row[2]))))
        # where most is at stake first
        self._order = sorted(self._members, key=lambda model: options[model][0][0] - options[model][-1][0])
        self._options = options
        self._rest = [0.0] * (len(ways) + 1)
        for at in range(len(ways) - 1, -1, -1):
            self._rest[at] = self._rest[at + 1] + options[self._order[at]][0][0]
        self.seconds = math.inf
        self.found: list[dict[int, int | None]] = []
        self._visit(0, 0.0, rules.room.row(rules.room.bytes), {})

    def _visit(self, at: int, seconds: float, room: list[int], chosen: dict[int, int | None]) -> None:
        if seconds + self._rest[at] >= self.seconds - _LEAST_GAIN:
            return
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            self.is_complete = False
            return
        if at == len(self._order):
            self.seconds = seconds
            self.found.append(dict(chosen))
            return
        model = self._order[at]
        seen = set()
        for cost, index, needs in self._options[model]:
            if index is not None:
                is_full = any(need > left for need, left in zip(needs, room, strict=True))
                if is_full or self._is_forbidden(model, chosen):
                    continue
                # devices that are the same and as full are tried once
                key = self._key(cost, needs, room)
                if key in seen:
                    continue
                seen.add(key)
            chosen[model] = index
            self._visit(at + 1, seconds + cost, [left - need for left, need in zip(room, needs, strict=True)], chosen)
            del chosen[model]

    def _key(self, cost: float, needs: list[int], room: list[int]) -> tuple[object, ...]:
        rows = list(zip(self._places, needs, room, strict=True))
        groups = self._rules.room.alike
        grouped = {name for group in groups for name in group}
        of = {place: (need, left) for place, need, left in rows}
        return (
            cost,
            *(of[place] for place in self._places if place not in grouped),
            *(tuple(sorted(of[name] for name in group)) for group in groups),
        )

    def _is_forbidden(self, model: int, chosen: dict[int, int | None]) -> bool:
        members = self._rules.members
        return any(
            index is not None
            and (members[other].name in members[model].never_with or members[model].name in members[other].never_with)
            for other, index in chosen.items()
        )


def most_valuable(rules: Rules, ways: Sequence[Sequence[Way]]) -> tuple[float, list[tuple[int, ...]]]:
    """Find the best set that stays in memory.

    Returns:
        A bound in seconds; the best few choices, in which models that are loaded when needed run in their quickest way.
    """
    knapsack = _Knapsack(rules, ways)
    quickest = [min(range(len(each)), key=lambda index: each[index].seconds) for each in ways]
    starts = []
    for chosen in knapsack.found[-3:][::-1]:
        starts.append(tuple(quickest[model] if (at := chosen[model]) is None else at for model in range(len(ways))))
    alone = sum(share * ways[model][quickest[model]].seconds for model, share in enumerate(rules.shares))
    # what stays is no bound where the order is known: the next models may be in memory each time
    is_bound = knapsack.is_complete and knapsack.found and not rules.order
    return (knapsack.seconds if is_bound else alone), starts
