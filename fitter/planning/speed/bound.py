"""A lower bound of the time of every placement of a model on these devices, by the cost model. Seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import NamedTuple

from fitter.machine.speed import DeviceSpeed, Factors, HostSpeed
from fitter.planning.placing.float_sum import float_sum
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
    further_tokens_seconds,
    layer_seconds,
    setting,
    tensor_seconds,
)
from fitter.planning.speed.model_facts import WeightFacts
from fitter.planning.speed.work import Pieces

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
    """Compute a time of ``workload`` that no placement within the budgets beats by ``cost.price``.

    A placement puts every layer with its cache, every tensor of a layer, and the output on any device or on the host.
    Pinned tensors, and tensors that llama.cpp keeps on the host, have fixed places.

    Proof: ``price`` is at least the sum of the costs of all layers and tensors at their places: it adds graph splits,
    hops, network and synchronisation, and takes the slower of reading and unpacking. So a placement solves the linear
    programme that spreads every byte over places at its cost per byte, within the budgets, and costs no less than the
    programme's optimum. By weak duality, for any rents of 0 or more, the optimum is at least ``sum over items of min
    over places (cost + rent × bytes) - sum over places of rent × budget``. The function returns this value, so it does
    not matter how the rents were found. A cache is one item with the projections of its attention: with the cache on
    the host, either they are on the host too, or a device with one of them gets a copy of the cache.

    Args:
        pieces: The model at one context.
        units: Its layers, with caches for the same context.
        budgets: Bytes of weights and caches that each device may hold.
        host_budget: The same for the host; ``None`` if unlimited.
        devices: Speeds of the devices.
        host: Speed of the host.
        workload: The request.
        costs: Constants of the cost model; by default those of ``cost.toml``.

    Returns:
        Seconds; infinite if nothing fits.

    Raises:
        ValueError: A speed is not above 0.
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
    places = _Places(at, pieces.moe_cache_size > 0)
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
        heads = float_sum(head.least(rents) * count for head, count in items.heads.items())
        least = max(least, items.least + heads + _with_rents(kinds, room, rents))
    on_host = items.on_host + float_sum(kind.seconds[-1] * kind.bytes for kind in kinds)
    on_host += float_sum(head.seconds_together[-1] * count for head, count in items.heads.items())
    if not devices or pieces.pinned.get(_TOKEN_EMBEDDING, HOST) != HOST:
        return least
    # the token embedding is on the host, so anything on a device makes one graph split
    split = at.request(Seconds(at.costs.split, at.costs.split))
    total = sum(kind.bytes for kind in kinds) + sum(head.bytes * count for head, count in items.heads.items())
    if room[-1] is not None and room[-1] < total:
        return least + split
    return min(least + split, on_host)


@dataclass(frozen=True)
class _Kind:
    """Items with the same cost per byte.

    Attributes:
        seconds: Seconds of the request for one byte, on each place.
        bytes: Bytes of all the items.
    """

    seconds: tuple[float, ...]
    bytes: int


@dataclass(frozen=True)
class _Head:
    """A layer's cache, and the weights that project its attention.

    Attributes:
        seconds: Seconds of attention and layer with the cache on each place; on the host with all weights there.
        copied: Seconds with the cache on the host and a projection on a device.
        cache: Bytes of the cache.
        weights: For each weight, seconds per byte on each place, and bytes.
    """

    seconds: tuple[float, ...]
    copied: float
    cache: int
    weights: tuple[tuple[tuple[float, ...], int], ...]

    @property
    def bytes(self) -> int:
        """Bytes of the cache and the weights."""
        return self.cache + sum(size for _, size in self.weights)

    @property
    def seconds_apart(self) -> tuple[float, ...]:
        """Least seconds of the cache alone, on each place."""
        return (*self.seconds[:-1], min(self.seconds[-1], self.copied))

    @property
    def seconds_together(self) -> tuple[float, ...]:
        """Seconds of the cache and all weights on one place, for each place."""
        return tuple(
            seconds + float_sum(of_byte[place] * size for of_byte, size in self.weights)
            for place, seconds in enumerate(self.seconds)
        )

    def least(self, rents: Sequence[float]) -> float:
        """Compute the least seconds with ``rents`` per byte."""
        free = float_sum(size * min(map(add, of_byte, rents)) for of_byte, size in self.weights)
        on_host: float = self.seconds_together[-1] + rents[-1] * self.bytes if rents[-1] < math.inf else math.inf
        apart: float = min(
            seconds + (rent * self.cache if self.cache else 0.0)
            for seconds, rent in zip((*self.seconds_apart[:-1], self.copied), rents, strict=True)
        )
        return min(on_host, apart + free)


class _Slowest(NamedTuple):
    """The slowest step of a layer's weights: unpacking or else reading, and on the host looking up."""

    unpacking: bool
    looking_up: bool


class _Sort(NamedTuple):
    """Properties that decide the cost of a weight per byte."""

    params_per_byte: float
    looked_up_per_byte: float
    experts: bool
    slowest: _Slowest
    is_host_only: bool = False


def _sort_of(tensor: WeightFacts, slowest: Sequence[_Slowest], is_host_only: bool = False) -> _Sort:
    """Sort a tensor; ``slowest`` has the slowest step of other weights and of experts."""
    n_params, n_looked_up = tensor.n_params / tensor.bytes, tensor.n_looked_up / tensor.bytes
    return _Sort(n_params, n_looked_up, tensor.experts, slowest[tensor.experts], is_host_only)


class _Places:
    """Places for weights: one for each kind of device, because equal devices are interchangeable, and the host.

    ``has_expert_cache``: whether experts on the host may be found in a cache on a device, at best always.
    """

    def __init__(self, at: Setting, has_expert_cache: bool = False) -> None:
        self._has_expert_cache = has_expert_cache
        index_of: dict[tuple[str, float, float, float, Factors], int] = {}
        self._at = at
        self.min_bits = at.costs.min_bits
        self._devices: list[int] = []
        self._place_of: dict[int, int] = {HOST: -1}
        for d, device in enumerate(at.devices):
            key = family_name(device), device.bandwidth, device.compute, device.pcie, device.factors
            self._place_of[d] = index_of.setdefault(key, len(index_of))
            if len(index_of) > len(self._devices):
                self._devices.append(d)
        # the first device computes prompts with weights on the host; without devices the host does
        firsts = [at.on((at.devices[d],)) for d in self._devices if not at.devices[d].is_remote] if at.streams else []
        self._hosts = [*firsts, at.on(())]
        self._prices: dict[_Sort, tuple[float, ...]] = {}
        on_host = at.on(())
        self._of_byte = tensor_seconds(Weights(HOST, 1, 0), on_host).generation
        self._of_lookup = tensor_seconds(Weights(HOST, 0, 0, n_looked_up=1), on_host).generation

    def room(self, budgets: Sequence[int], host_budget: int | None) -> list[int | None]:
        """Add up the bytes that each place may hold; ``None`` is no limit."""
        room = [0] * len(self._devices)
        for d, budget in enumerate(budgets):
            room[self._place_of[d]] += max(0, budget)
        return [*room, None if host_budget is None else max(0, host_budget)]

    def place_of(self, target: int) -> int:
        """Return the place of a device's index, or of ``HOST``."""
        return self._place_of[target]

    def slowest(self, read: float, unpacked: float, n_looked_up: float) -> _Slowest:
        """Find the slowest step for bytes to read, bytes to unpack, and weights to look up."""
        most = max(read, unpacked)
        return _Slowest(unpacked > read, n_looked_up * self._of_lookup > most * self._of_byte)

    def weights(self, sort: _Sort) -> tuple[float, ...]:
        """Compute the seconds of one byte of these weights on each place; generation takes its slowest step."""
        if sort not in self._prices:
            experts, slowest = sort.experts, sort.slowest

            def seconds(place: int, at: Setting) -> Seconds:
                of_byte = tensor_seconds(Weights(place, 1, 0, experts), at)
                of_param = tensor_seconds(Weights(place, 0, 1, experts), at) * sort.params_per_byte
                generation = of_param.generation if slowest.unpacking else of_byte.generation
                if place == HOST and slowest.looking_up:
                    looked_up = tensor_seconds(Weights(HOST, 0, 0, experts, sort.looked_up_per_byte), at)
                    generation = looked_up.generation
                if not slowest.unpacking or (place == HOST and slowest.looking_up):
                    # unpacking has the products of all users
                    generation += further_tokens_seconds(Weights(place, 0, sort.params_per_byte, experts), at)
                return Seconds(of_byte.prompt + of_param.prompt, generation)

            on_devices = [seconds(d, self._at) for d in self._devices]
            # no device computes with weights that llama.cpp keeps on the host, not even in prompts
            on_host = [seconds(HOST, at) for at in (self._hosts[-1:] if sort.is_host_only else self._hosts)]
            if self._has_expert_cache and experts and on_devices:
                prompt = min(each.prompt for each in on_devices)
                generation = min(each.generation for each in on_devices)
                on_host = [Seconds(min(each.prompt, prompt), min(each.generation, generation)) for each in on_host]
            self._prices[sort] = (*map(self._at.request, on_devices), min(map(self._at.request, on_host)))
        return self._prices[sort]

    def layer(self, attention: Attention | None, cache_on_host: bool, state: float = 0.0) -> tuple[float, ...]:
        """Compute the seconds of a layer on each place, with its cache and without its weights.

        ``state``: bytes of the recurrent state of each user but the first, whose state is among the weights.
        """
        on_host = Layer(HOST, (), attention, state=state)
        return (
            *(self._on_device(d, attention, cache_on_host, state) for d in self._devices),
            min(at.request(layer_seconds(on_host, at)) for at in self._hosts),
        )

    def copied(self, attention: Attention) -> float:
        """Compute the least seconds of a layer, without weights, if a device has a projection and the host the cache.

        The device attends, or without flash attention the host, if the layer counts as the device's.
        """
        at = self._at
        seconds = [math.inf, *(self._on_device(d, attention, True, 0.0) for d in self._devices)]
        for d in self._devices:
            for first in self._devices:
                setting = at.on((at.devices[first], at.devices[d]))
                seconds.append(at.request(layer_seconds(Layer(HOST, (), attention, None, 1), setting)))
        return min(seconds)

    def _on_device(self, device: int, attention: Attention | None, cache_on_host: bool, state: float) -> float:
        at = self._at
        if attention is None or not cache_on_host:
            return at.request(layer_seconds(Layer(device, (), attention, state=state), at))
        # the device attends to a cache on the host, or the host does if it has the weights before attention
        layers = [Layer(1, weights, attention, HOST, state=state) for weights in ((), (Weights(HOST, 0, 0),))]
        settings = [at.on((at.devices[first], at.devices[device])) for first in self._devices]
        return min(at.request(layer_seconds(layer, at)) for at in settings for layer in layers)


class _Items:
    """The items to place. ``bytes_of`` sums up the items that take memory and have a choice.

    All other items take at least ``least`` seconds, and ``on_host`` seconds if everything movable is on the host.
    """

    def __init__(self) -> None:
        self.bytes_of: dict[tuple[float, ...], int] = {}
        self.heads: dict[_Head, int] = {}
        self.least = 0.0
        self.on_host = 0.0

    def add(self, seconds: tuple[float, ...], size: int, count: int = 1) -> None:
        """Add ``count`` items of ``size`` bytes, each with its seconds on each place."""
        if size:
            self.add_bytes(tuple(each / size for each in seconds), size * count)
        else:
            self.least += min(seconds) * count
            self.on_host += seconds[-1] * count

    def add_bytes(self, seconds_per_byte: tuple[float, ...], size: int) -> None:
        """Add ``size`` bytes, with the seconds of one byte on each place."""
        self.bytes_of[seconds_per_byte] = self.bytes_of.get(seconds_per_byte, 0) + size

    def add_fixed(self, seconds: float) -> None:
        """Add the seconds of an item without a choice."""
        self.least += seconds
        self.on_host += seconds


def _items(places: _Places, pieces: Pieces, units: Sequence[Unit]) -> _Items:
    items = _Items()
    weights: dict[_Sort, int] = {}
    homes: dict[tuple[Attention | None, int, _Slowest], tuple[float, ...]] = {}
    heads: dict[tuple[Attention, int, tuple[tuple[_Sort, int], ...]], int] = {}
    for layer, attention, state, unit in zip(pieces.facts.layers, pieces.attention, pieces.states, units, strict=False):
        # a recurrent state is read like weights, and written
        state_bytes = round(2 * state)
        free, fixed, slowest = _free_tensors(layer.tensors, pieces, places, state_bytes)
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
                of_layer = places.layer(attention, pieces.cache_on_host, state)
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
    free, fixed, slowest = _free_tensors(pieces.facts.output, pieces, places, 0)
    items.add_fixed(fixed)
    seconds = places.layer(None, False)
    for tensor in free:
        of_byte = places.weights(_sort_of(tensor, slowest))
        seconds = tuple(a + tensor.bytes * b for a, b in zip(seconds, of_byte, strict=True))
    items.add(seconds, sum(tensor.bytes for tensor in free))
    return items


def _free_tensors(
    tensors: Sequence[WeightFacts], pieces: Pieces, places: _Places, state_bytes: int
) -> tuple[list[WeightFacts], float, tuple[_Slowest, _Slowest]]:
    """Return the tensors that have a choice, the cost of the others, and the slowest steps without and with experts.

    ``price`` takes the slowest step of all weights that a layer has in one place. Here the slowest step of the whole
    layer counts for all its weights, which is equal for a layer in one place and never more.
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
    """Compute the least seconds to spread ``kinds`` over ``room``; any rents of 0 or more prove it."""
    total = 0.0
    for kind in kinds:
        total += kind.bytes * min(map(add, kind.seconds, rents))
    return total - float_sum(rent * size for rent, size in zip(rents, room, strict=True) if size and rent)


def _rents(kinds: Sequence[_Kind], room: Sequence[int | None]) -> list[float] | None:
    """Find the rents with the best bound: seconds that another byte of room on each place would save.

    Finds the cheapest spread, one kind after the other, by successive shortest paths of a transportation problem.
    ``None`` if nothing fits.
    """
    count = len(room)
    # whole numbers, so that equal paths have equal costs
    scale = 2**50 / (max((max(kind.seconds) for kind in kinds), default=0.0) or 1.0)
    prices = [[round(seconds * scale) for seconds in kind.seconds] for kind in kinds]
    left = [math.inf if size is None else size for size in room]
    spread: list[dict[int, float]] = [{} for _ in room]
    # for each pair of places, the least extra cost of moving a byte from one to the other, and its kind
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
    """Compute the cost of another byte on each place, and the place to which it pushes another byte; -1 for none."""
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
    """Compute the cost of one byte less room on each place: its cheapest byte moves, step by step, to a place with
    room.
    """
    count = len(left)
    costs = [0 if size else math.inf for size in left]
    if math.inf == min(costs):
        # all places are full: only the differences between places matter
        costs[-1] = 0
    for _ in range(count):
        costs = [min(costs[a], min(costs[b] + moves[a][b][0] for b in range(count))) for a in range(count)]
    lowest = min(costs)
    # a place without any room keeps an infinite rent
    return [cost - lowest for cost in costs]
