"""Which sets of a fleet's models fit together, which one makes room, and how long a request takes then. Seconds.

A set is a number whose bits are the models. Requests come in random order by their shares, some for the same model one
after the other, so the sets in memory are the states of a Markov chain. A model that is asked for and not in memory is
loaded, in place of those whose eviction costs least. llama-swap's matrix decides the same way (``Program.Solve`` of its
``internal/matrix``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Member:
    """A model of a fleet, as the user wants it."""

    name: str
    """Its name in ``fitter.toml``, and in the files that are written."""
    share: float
    """Its share of all requests, from 0 to 1."""
    is_resident: bool = False
    """Whether it must be in memory from the start, always."""
    may_be_evicted: bool = True
    """Whether it may make room once it is in memory."""
    never_with: frozenset[str] = frozenset()
    """Names of models that must not be in memory at the same time."""

    @property
    def stays(self) -> bool:
        """Whether every set of models in memory must have room for it."""
        return self.is_resident or not self.may_be_evicted


@dataclass(frozen=True)
class Way:
    """A way to run a model, as a plan measured it."""

    needs: Mapping[str, int]
    """Bytes at each place: a device, ``host``, or a pool that they share."""
    seconds: float
    """Seconds of a request when the model is in memory."""
    reload_seconds: float
    """Seconds to load it from the disk, and to compute again what was lost with its caches."""


@dataclass(frozen=True)
class FleetRoom:
    """The room of a machine for all models together.

    Attributes:
        bytes: Bytes within the margin at each place that has a limit.
        alike: Groups of devices that are the same, so that their names may be exchanged.
    """

    bytes: Mapping[str, int]
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The places with a limit, in their order."""
        return tuple(self.bytes)

    def row(self, needs: Mapping[str, int]) -> list[int]:
        """Return the needs in the order of ``places``."""
        return [needs.get(place, 0) for place in self.bytes]

    def holds(self, ways: Sequence[Way]) -> bool:
        """Whether all of ``ways`` have room together."""
        return all(sum(way.needs.get(place, 0) for way in ways) <= size for place, size in self.bytes.items())


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
    room: FleetRoom
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
    def is_allowed(self) -> Flags:
        """For each set: whether nothing forbids it, whatever the memory."""
        masks = np.arange(2 ** len(self.members))
        allowed = np.ones(len(masks), dtype=np.bool_)
        for index, member in enumerate(self.members):
            for other, beside in enumerate(self.members):
                if beside.name in member.never_with:
                    pair = 1 << index | 1 << other
                    allowed &= masks & pair != pair
        return allowed

    @functools.cached_property
    def shares(self) -> list[float]:
        """Each model's share of the requests."""
        return [member.share for member in self.members]

    def fitting(self, needs: Numbers) -> Flags:
        """Return for each set whether it fits; ``needs``: bytes by model and place."""
        room = np.array(self.room.row(self.room.bytes))
        fits: Flags = np.all(_bits(len(self.members)) @ needs <= room, axis=1) & self.is_allowed
        return fits


@dataclass(frozen=True)
class Load:
    """A model that is loaded.

    Attributes:
        model: Its index.
        before: The set in memory before.
        after: The set in memory then.
        share: The share of all requests with this load.
    """

    model: int
    before: int
    after: int
    share: float


@dataclass(frozen=True)
class Residency:
    """How a fleet runs: the sets that fit together, and what requests cost.

    Attributes:
        sets: The sets with room for no other model, those with most models first.
        evict_costs: For each model, what its eviction costs: whole numbers of at least 1.
        seconds: Seconds of a request, on average.
        misses: For each model, the share of its requests before which it must be loaded.
        loads: Every load that happens.
    """

    sets: tuple[int, ...]
    evict_costs: tuple[int, ...]
    seconds: float
    misses: tuple[float, ...]
    loads: tuple[Load, ...] = field(repr=False)


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
        return running + float(np.min(missed[self._fits], initial=sum(reloads)))

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
        """Follow the requests, and evict the models that cost least."""
        evictions = _Evictions(self.sets, evict_costs, self._n)
        loads = self._replay(evictions) if self._rules.order else self._simulate(evictions)
        shares, lost, misses = self._rules.shares, 0.0, [0.0] * self._n
        for load in loads:
            lost += load.share * self._ways[load.model].reload_seconds
            misses[load.model] += load.share / shares[load.model]
        running = sum(share * way.seconds for share, way in zip(shares, self._ways, strict=True))
        return Residency(self.sets, tuple(evict_costs), running + lost, tuple(misses), tuple(loads))

    def _simulate(self, evictions: _Evictions) -> list[Load]:
        """Follow random requests: the sets in memory are the states of a Markov chain."""
        rules, used = self._rules, [model for model, share in enumerate(self._rules.shares) if share]
        index_of, states, moves = {rules.first: 0}, [rules.first], list[list[int]]()
        for state in states:
            row = []
            for model in used:
                after = evictions.after(state, model)
                if after not in index_of:
                    index_of[after] = len(states)
                    states.append(after)
                row.append(index_of[after])
            moves.append(row)
        parts = _shares_of_time(np.array(moves), [rules.shares[model] for model in used])
        return [
            Load(model, state, states[after], part * rules.shares[model] / rules.in_a_row)
            for state, part, row in zip(states, parts, moves, strict=True)
            for model, after in zip(used, row, strict=True)
            if not state >> model & 1
        ]

    def _replay(self, evictions: _Evictions) -> list[Load]:
        """Follow the requests in their order, twice, so that the start counts less."""
        state, counts = self._rules.first, Counter[tuple[int, int, int]]()
        for model in self._rules.order * 2:
            if not state >> model & 1:
                after = evictions.after(state, model)
                counts[model, state, after] += 1
                state = after
        return [Load(*load, count / (2 * len(self._rules.order))) for load, count in counts.items()]

    def best(self) -> Residency:
        """Choose the costs of evictions: by the seconds to load again, or by these and how often it is asked for."""
        reloads = [way.reload_seconds for way in self._ways]
        expected = [share * way.reload_seconds for share, way in zip(self._rules.shares, self._ways, strict=True)]
        found = (self.residency(_whole(costs)) for costs in (expected, reloads))
        return min(found, key=lambda residency: residency.seconds)


class _Evictions:
    """What makes room for a model: of ``sets`` that have it, the first one is kept whose evictions cost least."""

    def __init__(self, sets: Sequence[int], evict_costs: Sequence[int], n: int) -> None:
        self._with = [[each for each in sets if each >> model & 1] for model in range(n)]
        self._costs = evict_costs
        self._known: dict[tuple[int, int], int] = {}

    def after(self, state: int, model: int) -> int:
        """Return the set in memory after a request for ``model``."""
        if state >> model & 1:
            return state
        if (state, model) not in self._known:
            kept = min(self._with[model], key=lambda each: sum(self._costs[gone] for gone in models_of(state & ~each)))
            self._known[state, model] = state & kept | 1 << model
        return self._known[state, model]


def _whole(costs: Sequence[float]) -> tuple[int, ...]:
    """Scale costs to whole numbers from 1 to 1000 at most."""
    most = max(costs, default=0.0)
    return tuple(max(1, round(1000 * cost / most)) if most else 1 for cost in costs)


def _shares_of_time(moves: Numbers, shares: Sequence[float]) -> list[float]:
    """Return the share of requests that find each state; the chain begins in the first.

    Args:
        moves: For each state, the state after a request for each model.
        shares: Each model's share of the requests.
    """
    n_states = len(moves)
    now: npt.NDArray[np.float64] = np.bincount([0], minlength=n_states).astype(np.float64)
    columns, weights = moves.T.reshape(-1), np.repeat(shares, n_states)
    for _ in range(_MOST_STEPS):
        before = now
        now = np.bincount(columns, weights * np.tile(now, len(shares)), n_states).astype(np.float64)
        if float(np.abs(now - before).sum()) < _STILL:
            break
    return [float(share) for share in now / now.sum()]
