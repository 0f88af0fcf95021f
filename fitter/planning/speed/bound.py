"""What no placement of a model on these devices is faster than, by the cost model. Seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import NamedTuple

from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.speed.cost import (
    Attention,
    Costs,
    Layer,
    Seconds,
    Setting,
    Weights,
    Work,
    Workload,
    family_name,
    layer_seconds,
    setting,
    tensor_seconds,
)
from fitter.planning.speed.work import Pieces, WeightFacts

_TOKEN_EMBEDDING = "token_embd.weight"


def lower_bound(
    pieces: Pieces,
    units: Sequence[Unit],
    budgets: Sequence[int],
    host_budget: int | None,
    devices: Sequence[DeviceSpeed],
    host: HostSpeed,
    workload: Workload,
    costs: Costs | None = None,
) -> float:
    """Seconds of ``workload`` that ``cost.price`` goes below for no placement within the budgets.

    Placements are all in which every layer with its cache, every tensor of a layer, and the output with its tensors,
    each have a place of their own, on any of ``devices`` in any order, or on the host; tensors that are pinned, or that
    llama.cpp keeps on the host, stay where they are. ``units`` have the caches at the context of ``pieces``.
    ``budgets``: bytes that each device may hold of weights and caches; ``host_budget`` the same of the host, ``None``
    where it is unlimited. Infinite where nothing fits.

    Proof: ``price`` is at least the sum, over layers and tensors, of what each costs at its place, since it adds to
    that only graph splits (one at least, where anything is on a device and the token embedding is not), hops, the
    network and synchronisation, and takes of reading and unpacking the slower. So a placement is a solution of the
    linear programme that spreads every byte over places at that cost per byte, within the budgets, and is not cheaper
    than its least value. That is at least ``sum over items of min over places (cost + rent × bytes) - sum over places
    of rent × budget`` for any rents of 0 or more (weak duality), which is what is returned, whatever the rents were
    found by. A cache is an item with the projections of its attention: where it is on the host, either they are there
    as well, or it is copied to a device that has one of them.

    Raises ``ValueError`` on speeds of 0 or less.
    """
    facts = pieces.facts
    work = Work(
        (),
        facts.n_embd,
        facts.n_expert,
        facts.n_expert_used,
        pieces.n_ubatch,
        pieces.op_offload,
        None,
        pieces.is_mapped,
    )
    at = setting(work, devices, host, workload, costs)
    places = _Places(at)
    items = _items(places, pieces, units)
    kinds, apart = [_Kind(seconds, size) for seconds, size in items.bytes_of.items()], _Items()
    together = _Items()
    for head, count in items.heads.items():
        apart.add(head.seconds_apart, head.cache, count)
        for seconds, size in head.weights:
            apart.add_bytes(seconds, size * count)
        together.add(head.seconds_together, head.bytes, count)
    if host_budget is not None and pieces.cache_on_host:
        host_budget -= sum(unit.cache for unit in units)
        if host_budget < 0:
            return math.inf
    room = places.room(budgets, host_budget)
    least = -math.inf
    for others in (apart, together):
        rents = _rents([*kinds, *(_Kind(seconds, size) for seconds, size in others.bytes_of.items())], room)
        if rents is None:
            return math.inf
        heads = sum(head.least(rents) * count for head, count in items.heads.items())
        least = max(least, items.least + heads + _with_rents(kinds, room, rents))
    on_host = items.on_host + sum(kind.seconds[-1] * kind.bytes for kind in kinds)
    on_host += sum(head.seconds_together[-1] * count for head, count in items.heads.items())
    if not devices or pieces.pinned.get(_TOKEN_EMBEDDING, HOST) != HOST:
        return least
    # the token embedding is on the host: whatever is on a device is another split
    split = at.request(Seconds(at.costs.split, at.costs.split))
    total = sum(kind.bytes for kind in kinds) + sum(head.bytes * count for head, count in items.heads.items())
    if room[-1] is not None and room[-1] < total:
        return least + split
    return min(least + split, on_host)


@dataclass(frozen=True)
class _Kind:
    """Items that cost the same per byte: ``seconds`` of the request per byte on each place; ``bytes`` of all."""

    seconds: tuple[float, ...]
    bytes: int


@dataclass(frozen=True)
class _Head:
    """A layer's cache of ``cache`` bytes with the ``weights`` (seconds per byte on each place, bytes) that project it.

    ``seconds``: of attention and the layer itself with the cache on each place, on the host with all weights there;
    ``copied``: with the cache on the host and some of them on a device.
    """

    seconds: tuple[float, ...]
    copied: float
    cache: int
    weights: tuple[tuple[tuple[float, ...], int], ...]

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return self.cache + sum(size for _, size in self.weights)

    @property
    def seconds_apart(self) -> tuple[float, ...]:
        """Seconds on every place of the cache alone, at least."""
        return (*self.seconds[:-1], min(self.seconds[-1], self.copied))

    @property
    def seconds_together(self) -> tuple[float, ...]:
        """Seconds on every place of all of it."""
        return tuple(
            seconds + sum(of_byte[place] * size for of_byte, size in self.weights)
            for place, seconds in enumerate(self.seconds)
        )

    def least(self, rents: Sequence[float]) -> float:
        """The least that it takes with ``rents`` per byte."""
        free: float = sum(size * min(map(add, of_byte, rents)) for of_byte, size in self.weights)
        on_host: float = self.seconds_together[-1] + rents[-1] * self.bytes if rents[-1] < math.inf else math.inf
        apart: float = min(
            seconds + (rent * self.cache if self.cache else 0.0)
            for seconds, rent in zip((*self.seconds_apart[:-1], self.copied), rents, strict=True)
        )
        return min(on_host, apart + free)


class _Slowest(NamedTuple):
    """What of a layer's weights takes longest: unpacking, or else reading; on the host also looking up."""

    unpacking: bool
    looking_up: bool


class _Sort(NamedTuple):
    """Weights that cost the same per byte."""

    params_per_byte: float
    looked_up_per_byte: float
    experts: bool
    slowest: _Slowest
    is_host_only: bool = False


def _sort_of(tensor: WeightFacts, slowest: Sequence[_Slowest], is_host_only: bool = False) -> _Sort:
    """``slowest``: not of experts, and of experts."""
    n_params, n_looked_up = tensor.n_params / tensor.bytes, tensor.n_looked_up / tensor.bytes
    return _Sort(n_params, n_looked_up, tensor.experts, slowest[tensor.experts], is_host_only)


class _Places:
    """Where things may be: a place for each kind of device, since what is on one could be on another, and the host."""

    def __init__(self, at: Setting) -> None:
        index_of: dict[tuple[str, float, float, float], int] = {}
        self._at = at
        self.min_bits = at.costs.min_bits
        self._devices: list[int] = []
        self._place_of: dict[int, int] = {HOST: -1}
        for d, device in enumerate(at.devices):
            key = family_name(device), device.bandwidth, device.compute, device.pcie
            self._place_of[d] = index_of.setdefault(key, len(index_of))
            if len(index_of) > len(self._devices):
                self._devices.append(d)
        # whichever device is the first computes a prompt with what the host has; where none is used, the host does
        firsts = [at.on((at.devices[d],)) for d in self._devices if not at.devices[d].is_remote] if at.streams else []
        self._hosts = [*firsts, at.on(())]
        self._prices: dict[_Sort, tuple[float, ...]] = {}
        on_host = at.on(())
        self._of_byte = tensor_seconds(Weights(HOST, 1, 0), on_host).generation
        self._of_lookup = tensor_seconds(Weights(HOST, 0, 0, n_looked_up=1), on_host).generation

    def room(self, budgets: Sequence[int], host_budget: int | None) -> list[int | None]:
        """Bytes that every place may hold; ``None`` is no limit."""
        room = [0] * len(self._devices)
        for d, budget in enumerate(budgets):
            room[self._place_of[d]] += max(0, budget)
        return [*room, None if host_budget is None else max(0, host_budget)]

    def place_of(self, target: int) -> int:
        """The place that a device's index, or ``HOST``, is."""
        return self._place_of[target]

    def slowest(self, read: float, unpacked: float, n_looked_up: float) -> _Slowest:
        """What takes longest of a layer with so many bytes, bytes where they are unpacked, and weights looked up."""
        most = max(read, unpacked)
        return _Slowest(unpacked > read, n_looked_up * self._of_lookup > most * self._of_byte)

    def weights(self, sort: _Sort) -> tuple[float, ...]:
        """Seconds of a byte of such weights on every place, generation taking what its slowest part does."""
        if sort not in self._prices:
            experts, slowest = sort.experts, sort.slowest

            def seconds(place: int, at: Setting) -> float:
                of_byte = tensor_seconds(Weights(place, 1, 0, experts), at)
                of_param = tensor_seconds(Weights(place, 0, 1, experts), at) * sort.params_per_byte
                generation = of_param.generation if slowest.unpacking else of_byte.generation
                if place == HOST and slowest.looking_up:
                    looked_up = tensor_seconds(Weights(HOST, 0, 0, experts, sort.looked_up_per_byte), at)
                    generation = looked_up.generation
                return at.request(Seconds(of_byte.prompt + of_param.prompt, generation))

            # what llama.cpp keeps on the host, no device computes with in a prompt either
            on_host = min(seconds(HOST, at) for at in (self._hosts[-1:] if sort.is_host_only else self._hosts))
            self._prices[sort] = (*(seconds(d, self._at) for d in self._devices), on_host)
        return self._prices[sort]

    def layer(self, attention: Attention | None, cache_on_host: bool) -> tuple[float, ...]:
        """Seconds of a layer on every place without its weights, but with its cache."""
        on_host = Layer(HOST, (), attention)
        return (
            *(self._on_device(d, attention, cache_on_host) for d in self._devices),
            min(at.request(layer_seconds(on_host, at)) for at in self._hosts),
        )

    def copied(self, attention: Attention) -> float:
        """Seconds of a layer without its weights where its cache is on the host and a device attends to it."""
        at = self._at
        found = [math.inf]
        for d in self._devices:
            for first in self._devices:
                setting = at.on((at.devices[first], at.devices[d]))
                found.append(at.request(layer_seconds(Layer(HOST, (), attention, None, 1), setting)))
        return min(found)

    def _on_device(self, device: int, attention: Attention | None, cache_on_host: bool) -> float:
        at = self._at
        if attention is None or not cache_on_host:
            return at.request(layer_seconds(Layer(device, (), attention), at))
        # the device attends to a cache on the host or, where the weights before it are there as well, the host does
        layers = [Layer(1, weights, attention, HOST) for weights in ((), (Weights(HOST, 0, 0),))]
        settings = [at.on((at.devices[first], at.devices[device])) for first in self._devices]
        return min(at.request(layer_seconds(layer, at)) for at in settings for layer in layers)


class _Items:
    """What is to be placed, added up as it is added: ``bytes_of`` has what takes memory and has a choice.

    All else takes ``least`` seconds at least, and ``on_host`` where the host has all that may be there.
    """

    def __init__(self) -> None:
        self.bytes_of: dict[tuple[float, ...], int] = {}
        self.heads: dict[_Head, int] = {}
        self.least = 0.0
        self.on_host = 0.0

    def add(self, seconds: tuple[float, ...], size: int, count: int = 1) -> None:
        """``count`` items of ``size`` bytes that each take so many seconds on each place."""
        if size:
            self.add_bytes(tuple(each / size for each in seconds), size * count)
        else:
            self.least += min(seconds) * count
            self.on_host += seconds[-1] * count

    def add_bytes(self, seconds_per_byte: tuple[float, ...], size: int) -> None:
        """``size`` bytes that take so many seconds each on each place."""
        self.bytes_of[seconds_per_byte] = self.bytes_of.get(seconds_per_byte, 0) + size

    def add_fixed(self, seconds: float) -> None:
        """Something that is where it is."""
        self.least += seconds
        self.on_host += seconds


def _items(places: _Places, pieces: Pieces, units: Sequence[Unit]) -> _Items:
    items = _Items()
    weights: dict[_Sort, int] = {}
    homes: dict[tuple[Attention | None, int, _Slowest], tuple[float, ...]] = {}
    heads: dict[tuple[Attention, int, tuple[tuple[_Sort, int], ...]], int] = {}
    for layer, attention, state, unit in zip(pieces.facts.layers, pieces.attention, pieces.states, units, strict=False):
        # a recurrent state is read as weights are, and written
        state_bytes = round(2 * state)
        free, fixed, slowest = _sorted(layer.tensors, pieces, places, state_bytes)
        items.add_fixed(fixed)
        projections = free[: layer.n_attention]
        is_free = len(free) - len(projections) == len(layer.tensors) - layer.n_attention
        if attention and projections and is_free and not (state_bytes or pieces.cache_on_host):
            of_head: dict[_Sort, int] = {}
            for tensor in projections:
                sort = _sort_of(tensor, slowest)
                of_head[sort] = of_head.get(sort, 0) + tensor.bytes
            key_of_head = attention, unit.cache, tuple(of_head.items())
            heads[key_of_head] = heads.get(key_of_head, 0) + 1
            free = free[layer.n_attention :]
        else:
            home = attention, state_bytes, slowest[False]
            if home not in homes:
                of_state = places.weights(_Sort(0, 0, False, slowest[False]))
                if pieces.cache_on_host:
                    of_state = (of_state[-1],) * len(of_state)
                of_layer = places.layer(attention, pieces.cache_on_host)
                homes[home] = tuple(a + state_bytes * b for a, b in zip(of_layer, of_state, strict=True))
            items.add(homes[home], 0 if pieces.cache_on_host else unit.cache)
        for tensor in free:
            sort = _sort_of(tensor, slowest)
            weights[sort] = weights.get(sort, 0) + tensor.bytes
    for (attention, cache, sizes), count in heads.items():
        head = _Head(
            places.layer(attention, False),
            places.copied(attention),
            cache,
            tuple((places.weights(sort), size) for sort, size in sizes),
        )
        items.heads[head] = items.heads.get(head, 0) + count
    for sort, size in weights.items():
        items.add_bytes(places.weights(sort), size)
    free, fixed, slowest = _sorted(pieces.facts.output, pieces, places, 0)
    items.add_fixed(fixed)
    seconds = places.layer(None, False)
    for tensor in free:
        of_byte = places.weights(_sort_of(tensor, slowest))
        seconds = tuple(a + tensor.bytes * b for a, b in zip(seconds, of_byte, strict=True))
    items.add(seconds, sum(tensor.bytes for tensor in free))
    return items


def _sorted(
    tensors: Sequence[WeightFacts], pieces: Pieces, places: _Places, state_bytes: int
) -> tuple[list[WeightFacts], float, tuple[_Slowest, _Slowest]]:
    """Tensors that have a choice, what the others cost, and what takes longest, not of experts and of experts.

    ``price`` takes the slowest of reading, unpacking and looking up, of all that a layer has in one place. What is
    slowest in the layer as a whole is taken for all of it here, which is the same where that is in one place, and
    never more.
    """
    read, unpacked, looked_up = [float(state_bytes), 0.0], [0.0, 0.0], [0.0, 0.0]
    for tensor in tensors:
        read[tensor.experts] += tensor.bytes
        unpacked[tensor.experts] += tensor.n_params * places.min_bits / 8
        looked_up[tensor.experts] += tensor.n_looked_up
    slowest = (
        places.slowest(read[0], unpacked[0], looked_up[0]),
        places.slowest(read[1], unpacked[1], looked_up[1]),
    )
    free, fixed = [], 0.0
    for tensor in tensors:
        if not tensor.bytes:
            continue
        is_host_only = pieces.host_only.has(tensor.name, HOST)
        if not is_host_only and tensor.name not in pieces.pinned:
            free.append(tensor)
            continue
        of_byte = places.weights(_sort_of(tensor, slowest, is_host_only))
        fixed += tensor.bytes * of_byte[places.place_of(HOST if is_host_only else pieces.pinned[tensor.name])]
    return free, fixed, slowest


# --- spreading bytes over places


def _with_rents(kinds: Sequence[_Kind], room: Sequence[int | None], rents: Sequence[float]) -> float:
    """Seconds that spreading ``kinds`` over ``room`` takes at least, which any rents of 0 or more prove."""
    total = 0.0
    for kind in kinds:
        total += kind.bytes * min(map(add, kind.seconds, rents))
    return total - sum(rent * size for rent, size in zip(rents, room, strict=True) if size and rent)


def _rents(kinds: Sequence[_Kind], room: Sequence[int | None]) -> list[float] | None:
    """The rents that prove most: seconds that another byte of room on each place would save. ``None``: nothing fits.

    They are those of the cheapest way to spread bytes, found one kind after the other: what is added goes to where it,
    and what it drives out, cost the least (successive shortest paths of a transportation problem).
    """
    count = len(room)
    # whole numbers, since paths that should cost the same must not differ in their last digits
    scale = 2**50 / (max((max(kind.seconds) for kind in kinds), default=0.0) or 1.0)
    prices = [[round(seconds * scale) for seconds in kind.seconds] for kind in kinds]
    left = [math.inf if size is None else size for size in room]
    spread: list[dict[int, float]] = [{} for _ in room]
    # by how much the cheapest byte on the one place is dearer on the other, and of which kind it is
    moves: list[list[tuple[float, int]]] = [[(math.inf, -1)] * count for _ in room]
    for index, kind in enumerate(kinds):
        waiting: float = kind.bytes
        while waiting:
            costs, before = _cheapest(prices[index], moves)
            end = min((place for place in range(count) if left[place]), key=lambda place: costs[place], default=-1)
            if end < 0:
                return None
            path = [end]
            while before[path[-1]] >= 0:
                path.append(before[path[-1]])
            steps = [(a, b, moves[a][b][1]) for b, a in pairwise(path)]
            size = min([waiting, left[end], *(spread[a][moved] for a, _, moved in steps)])
            left[end] -= size
            waiting -= size
            spread[path[-1]][index] = spread[path[-1]].get(index, 0) + size
            for a, b, moved in steps:
                spread[a][moved] -= size
                if not spread[a][moved]:
                    del spread[a][moved]
                spread[b][moved] = spread[b].get(moved, 0) + size
            for place in path:
                moves[place] = [
                    min(((prices[k][other] - prices[k][place], k) for k in spread[place]), default=(math.inf, -1))
                    for other in range(count)
                ]
    return [saving / scale for saving in _savings(left, moves)]


def _cheapest(prices: Sequence[int], moves: Sequence[Sequence[tuple[float, int]]]) -> tuple[list[float], list[int]]:
    """What another byte costs on every place, and the place from where a byte gives way to it; -1: none does."""
    costs: list[float] = list(prices)
    before = [-1] * len(costs)
    changed = True
    while changed:
        changed = False
        for a, row in enumerate(moves):
            for b, (more, _) in enumerate(row):
                if costs[a] + more < costs[b]:
                    costs[b], before[b] = costs[a] + more, a
                    changed = True
    return costs, before


def _savings(left: Sequence[float], moves: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """What a byte of room less on every place would cost: its cheapest byte goes where there is room, step by step."""
    count = len(left)
    costs = [0 if size else math.inf for size in left]
    if math.inf == min(costs):
        # all is full: what matters is only by how much one place is better than another
        costs[-1] = 0
    for _ in range(count):
        costs = [min(costs[a], min(costs[b] + moves[a][b][0] for b in range(count))) for a in range(count)]
    lowest = min(costs)
    # a place that may hold nothing stays infinitely dear
    return [cost - lowest for cost in costs]
