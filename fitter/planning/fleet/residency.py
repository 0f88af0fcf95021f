"""Which sets of models fit together, which one makes room, and how long a request takes then, on average. Seconds.

A set is a number whose bits are the models. Requests come in random order by their shares, some for the same model one
after the other, so the sets in memory are the states of a Markov chain. A model that is asked for and not in memory is
loaded, in place of those whose eviction costs least. llama-swap's matrix decides the same way (``Program.Solve`` of its
``internal/matrix``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fitter.planning.fleet.members import Member, Numbers, Room, Way

MOST_MODELS = 12
"""Most models of a fleet: all their sets are counted."""

_STILL = 1e-10
"""Change of all shares together below which the chain stands still."""
_MOST_STEPS = 5000


@functools.cache
def _bits(n: int) -> Numbers:
    """For each set of ``n`` models a row: 1 for each of its models."""
    return (np.arange(2**n)[:, None] >> np.arange(n)[None, :]) & 1


def mask_of(indices: Sequence[int]) -> int:
    """Return the set of the models at ``indices``."""
    return sum(1 << index for index in indices)


def models_of(mask: int) -> list[int]:
    """List the indices of the models in a set."""
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


@dataclass(frozen=True)
class Rules:
    """What is the same for all ways to run the models of a fleet.

    Attributes:
        members: The models.
        room: The machine's room.
        in_a_row: Requests for a model one after the other, on average; 1 for random order.
        order: The models in the order in which they were asked for, in place of a random one.
    """

    members: tuple[Member, ...]
    room: Room
    in_a_row: float = 1.0
    order: tuple[int, ...] = ()

    @functools.cached_property
    def staying(self) -> int:
        """The set of the models that every set has room for."""
        return mask_of([index for index, member in enumerate(self.members) if member.stays])

    @functools.cached_property
    def first(self) -> int:
        """The set in memory at the start."""
        return mask_of([index for index, member in enumerate(self.members) if member.is_resident])

    @functools.cached_property
    def is_allowed(self) -> Numbers:
        """For each set: 1 if nothing forbids it whatever the memory."""
        n = len(self.members)
        masks = np.arange(2**n)
        allowed = np.ones(2**n, dtype=bool)
        for index, member in enumerate(self.members):
            for other, beside in enumerate(self.members):
                if beside.name in member.never_with:
                    pair = 1 << index | 1 << other
                    allowed &= masks & pair != pair
        return allowed.astype(np.int64)

    @functools.cached_property
    def shares(self) -> list[float]:
        """Each model's share of the requests."""
        return [member.share for member in self.members]

    def fitting(self, needs: Numbers) -> Numbers:
        """For each set: whether it fits; ``needs``: bytes by model and place."""
        room = np.array(self.room.row(self.room.bytes))
        fits: Numbers = np.all(_bits(len(self.members)) @ needs <= room, axis=1) & (self.is_allowed == 1)
        return fits


@dataclass(frozen=True)
class Residency:
    """How a fleet runs: the sets that fit together, and what requests cost.

    Attributes:
        sets: The sets with room for no other model, those with most models first.
        evict_costs: For each model, what its eviction costs: whole numbers of at least 1.
        seconds: Seconds of a request, on average.
        misses: For each model, the share of its requests before which it must be loaded.
        states: Each set that is in memory at some time, and its share of all requests.
        next: For each of ``states``, the set in memory after a request for each model.
    """

    sets: tuple[int, ...]
    evict_costs: tuple[int, ...]
    seconds: float
    misses: tuple[float, ...]
    states: tuple[tuple[int, float], ...] = field(repr=False)
    next: tuple[tuple[int, ...], ...] = field(repr=False)


class Runs:
    """The sets of a fleet whose models run in certain ways (``ways``, one for each model)."""

    def __init__(self, rules: Rules, ways: Sequence[Way]) -> None:
        self._rules, self._ways = rules, ways
        self._n = len(ways)
        self._alone = rules.fitting(np.array([rules.room.row(way.needs) for way in ways]).reshape(self._n, -1))
        # whatever is in memory, those that stay are, too
        self._fits = self._alone[np.arange(2**self._n) | rules.staying]

    @functools.cached_property
    def can_run(self) -> bool:
        """Whether each model fits, beside those that stay."""
        return all(self._fits[1 << index] for index in range(self._n))

    @functools.cached_property
    def static_seconds(self) -> float:
        """Seconds that no order of evictions can beat: the best set is in memory before each request."""
        rules = self._rules
        running = sum(share * way.seconds for share, way in zip(rules.shares, self._ways, strict=True))
        if rules.order:
            return running
        reloads = [
            share * way.reload_seconds / rules.in_a_row for share, way in zip(rules.shares, self._ways, strict=True)
        ]
        missed = sum(reloads) - _bits(self._n) @ np.array(reloads)
        return running + float(np.min(missed[self._fits]))

    @functools.cached_property
    def sets(self) -> tuple[int, ...]:
        """The sets with room for no other model, those with most models first."""
        fits = self._fits
        masks = np.flatnonzero(fits)
        masks = masks[masks | self._rules.staying == masks]
        is_largest = np.ones(len(masks), dtype=bool)
        for index in range(self._n):
            more = masks | 1 << index
            is_largest &= (more == masks) | ~fits[more]
        largest = [int(mask) for mask in masks[is_largest]]
        return tuple(sorted(largest, key=lambda mask: (-mask.bit_count(), mask)))

    @functools.cached_property
    def any_together(self) -> int:
        """The largest number of models of which any so many fit together, without those that stay."""
        sizes = _bits(self._n).sum(axis=1)
        return next((n - 1 for n in range(2, self._n + 1) if not np.all(self._alone[sizes == n])), self._n)

    def residency(self, evict_costs: Sequence[int]) -> Residency:
        """Follow random requests, and evict what costs least."""
        rules, n = self._rules, self._n
        after = _after(self.sets, evict_costs, n)
        if rules.order:
            return self._walked(evict_costs, after)
        start = rules.first
        index_of, states, moves = {start: 0}, [start], list[list[int]]()
        for state in states:
            row = []
            for model in range(n):
                then = state if state >> model & 1 else after(state, model)
                if then not in index_of:
                    index_of[then] = len(states)
                    states.append(then)
                row.append(index_of[then])
            moves.append(row)
        shares = _shares_of_time(np.array(moves), rules.shares)
        misses = tuple(
            sum(share for state, share in zip(states, shares, strict=True) if not state >> model & 1) / rules.in_a_row
            for model in range(n)
        )
        seconds = sum(
            share * (way.seconds + miss * way.reload_seconds)
            for share, way, miss in zip(rules.shares, self._ways, misses, strict=True)
        )
        return Residency(
            self.sets,
            tuple(evict_costs),
            seconds,
            misses,
            tuple((state, float(share)) for state, share in zip(states, shares, strict=True)),
            tuple(tuple(states[index] for index in row) for row in moves),
        )

    def _walked(self, evict_costs: Sequence[int], after: _after) -> Residency:
        """Follow the requests in their order, twice, so that the start counts less."""
        rules, state = self._rules, self._rules.first
        found: dict[int, dict[int, int]] = {}
        visits, missed, total = Counter[int](), Counter[int](), 0.0
        for model in (*rules.order, *rules.order):
            visits[state] += 1
            total += self._ways[model].seconds
            if not state >> model & 1:
                missed[model] += 1
                total += self._ways[model].reload_seconds
                row = found.setdefault(state, {})
                if model not in row:
                    row[model] = after(state, model)
                state = row[model]
        asked, count = Counter(rules.order), 2 * len(rules.order)
        states = tuple((each, number / count) for each, number in visits.items())
        moves = tuple(
            tuple(each if each >> model & 1 else after(each, model) for model in range(self._n)) for each, _ in states
        )
        misses = tuple(missed[model] / (2 * asked[model]) if asked[model] else 0.0 for model in range(self._n))
        return Residency(self.sets, tuple(evict_costs), total / count, misses, states, moves)

    def best(self) -> Residency:
        """Choose the costs of evictions: by the seconds to load again, or by these and how often it is asked for."""
        reloads = [way.reload_seconds for way in self._ways]
        expected = [share * way.reload_seconds for share, way in zip(self._rules.shares, self._ways, strict=True)]
        found = (self.residency(_whole(costs)) for costs in (expected, reloads))
        return min(found, key=lambda residency: residency.seconds)


class _after:
    """The set in memory after a request for a model that is not in it (of ``n``), remembered."""

    def __init__(self, sets: Sequence[int], evict_costs: Sequence[int], n: int) -> None:
        self._with = [[each for each in sets if each >> model & 1] for model in range(n)]
        self._costs = evict_costs

    def __call__(self, state: int, model: int) -> int:
        best, least = 0, -1
        for each in self._with[model]:
            gone = state & ~each
            cost = 0
            while gone:
                low = gone & -gone
                cost += self._costs[low.bit_length() - 1]
                gone ^= low
            if least < 0 or cost < least:
                best, least = each, cost
                if not cost:
                    break
        return state & best | 1 << model


def _whole(costs: Sequence[float]) -> tuple[int, ...]:
    """Scale costs to whole numbers from 1 to 1000 at most."""
    most = max(costs, default=0.0)
    return tuple(max(1, round(1000 * cost / most)) if most else 1 for cost in costs)


def _shares_of_time(moves: Numbers, shares: Sequence[float]) -> Sequence[float]:
    """Return the share of requests that find each state; the chain begins in the first."""
    n_states = len(moves)
    now: npt.NDArray[np.float64] = np.bincount([0], minlength=n_states).astype(np.float64)
    used = [model for model, share in enumerate(shares) if share]
    columns = np.concatenate([moves[:, model] for model in used])
    weights = np.repeat([shares[model] for model in used], n_states)
    for _ in range(_MOST_STEPS):
        before = now
        now = np.bincount(columns, weights * np.tile(now, len(used)), n_states).astype(np.float64)
        if float(np.abs(now - before).sum()) < _STILL:
            break
    return [float(share) for share in now / now.sum()]
