"""A lower bound of the time of every placement of a model on these devices, by the cost model. Seconds and bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add

from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.speed.cost import (
    Attention,
    Costs,
    Layer,
    PriceBasis,
    Seconds,
    Weights,
    Workload,
    family_name,
    layer_seconds,
    setting,
)
from fitter.planning.speed.model_facts import WeightFacts
from fitter.planning.speed.work import Pieces

_TOKEN_EMBEDDING = "token_embd.weight"

Spread = tuple[tuple[float, ...], int]
"""Bytes that may be on any place, with the seconds of one byte on each."""


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
    at = setting(pieces.work((), None), devices, host, workload, costs)
    places = _Places(at, has_expert_cache=pieces.moe_cache_size > 0)
    items = _items(places, pieces, units)
    if host_budget is not None and pieces.cache_on_host:
        host_budget -= sum(unit.cache for unit in units)
        if host_budget < 0:
            return math.inf
    room = places.room(budgets, host_budget)
    spread, least = [*items.spread.items()], -math.inf
    for are_apart in (True, False):
        heads = [part for head, count in items.heads.items() for part in head.spread(count, are_apart)]
        rents = _rents([*spread, *heads], room)
        if rents is None:
            return math.inf
        paid = float_sum(rent * size for rent, size in zip(rents, room, strict=True) if size and rent)
        of_heads = float_sum(head.least(rents) * count for head, count in items.heads.items())
        of_bytes = float_sum(size * min(map(add, seconds, rents)) for seconds, size in spread)
        least = max(least, items.least + of_heads + of_bytes - paid)
    if not devices or pieces.pinned.get(_TOKEN_EMBEDDING, HOST) != HOST:
        return least
    # the token embedding is on the host, so anything on a device makes one graph split
    split = at.request(Seconds(at.costs.split, at.costs.split))
    total = sum(size for _, size in spread) + sum(head.bytes * count for head, count in items.heads.items())
    if room[-1] is not None and room[-1] < total:
        return least + split
    on_host = items.on_host + float_sum(seconds[-1] * size for seconds, size in spread)
    on_host += float_sum(head.together[-1] * count for head, count in items.heads.items())
    return min(least + split, on_host)


@dataclass(frozen=True)
class _Head:
    """A layer's cache, and the weights that project its attention.

    Attributes:
        seconds: Seconds of attention and layer with the cache on each place; on the host with all weights there.
        copied: Seconds with the cache on the host and a projection on a device.
        cache: Bytes of the cache.
        weights: The weights.
    """

    seconds: tuple[float, ...]
    copied: float
    cache: int
    weights: tuple[Spread, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the cache and the weights."""
        return self.cache + sum(size for _, size in self.weights)

    @property
    def together(self) -> tuple[float, ...]:
        """Seconds of the cache and all weights on one place, for each place."""
        return tuple(
            seconds + float_sum(of_byte[place] * size for of_byte, size in self.weights)
            for place, seconds in enumerate(self.seconds)
        )

    def spread(self, count: int, are_apart: bool) -> Iterable[Spread]:
        """Yield the bytes of so many heads, as if each could be divided: cache and weights apart, or together."""
        if not are_apart:
            yield tuple(each / self.bytes for each in self.together), self.bytes * count
            return
        if self.cache:
            seconds = (*self.seconds[:-1], min(self.seconds[-1], self.copied))
            yield tuple(each / self.cache for each in seconds), self.cache * count
        yield from ((of_byte, size * count) for of_byte, size in self.weights)

    def least(self, rents: Sequence[float]) -> float:
        """Compute the least seconds with ``rents`` per byte."""
        free = float_sum(size * min(map(add, of_byte, rents)) for of_byte, size in self.weights)
        on_host: float = self.together[-1] + rents[-1] * self.bytes if rents[-1] < math.inf else math.inf
        apart: float = min(
            seconds + (rent * self.cache if self.cache else 0.0)
            for seconds, rent in zip((*self.seconds[:-1], self.copied), rents, strict=True)
        )
        return min(on_host, apart + free)


class _Places:
    """Places for weights: one for each kind of device, because equal devices are interchangeable, and the host.

    ``place_of`` has the place of each device's index, and of ``HOST``. ``has_expert_cache``: whether experts on the
    host may be found in a cache on a device, at best always.
    """

    def __init__(self, at: PriceBasis, has_expert_cache: bool) -> None:
        self._at = at
        self._has_expert_cache = has_expert_cache
        keys = [(family_name(d), d.bandwidth, d.compute, d.pcie, d.factors) for d in at.devices]
        self._devices = [d for d, key in enumerate(keys) if key not in keys[:d]]
        self.place_of = {HOST: -1} | {d: self._devices.index(keys.index(key)) for d, key in enumerate(keys)}
        # the first device computes prompts with weights on the host; without devices the host does
        firsts = [at.on((at.devices[d],)) for d in self._devices if not at.devices[d].is_remote] if at.streams else []
        self._hosts = [*firsts, at.on(())]

    def room(self, budgets: Sequence[int], host_budget: int | None) -> list[int | None]:
        """Add up the bytes that each place may hold; ``None`` is no limit."""
        room = [0] * len(self._devices)
        for d, budget in enumerate(budgets):
            room[self.place_of[d]] += max(0, budget)
        return [*room, None if host_budget is None else max(0, host_budget)]

    def of_byte(self, tensor: WeightFacts, layer: Sequence[Weights], is_host_only: bool = False) -> tuple[float, ...]:
        """Compute the seconds of one byte of a tensor on each place.

        ``cost`` takes the slowest step of all weights that a layer has in one place. Here the slowest step of the whole
        ``layer`` counts for all its weights, which is equal for a layer in one place and never more.
        """
        whole = [weights for weights in layer if weights.experts == tensor.experts]

        def seconds(place: int, at: PriceBasis) -> Seconds:
            rates = at.rates(Weights(place, 0, 0, tensor.experts, is_host_only=is_host_only))
            steps = [sum(step) for step in zip(*map(rates.steps, whole), strict=True)]
            return rates.seconds(tensor, steps.index(max(steps)))

        on_devices = [seconds(d, self._at) for d in self._devices]
        # no device computes with weights that llama.cpp keeps on the host, not even in prompts
        on_host = [seconds(HOST, at) for at in (self._hosts[-1:] if is_host_only else self._hosts)]
        if self._has_expert_cache and tensor.experts:
            every = (*on_devices, *on_host)
            on_host = [Seconds(min(each.prompt for each in every), min(each.generation for each in every))]
        requests = (*map(self._at.request, on_devices), min(map(self._at.request, on_host)))
        return tuple(each / tensor.bytes for each in requests)

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
    """The items to place: bytes that may be anywhere, and heads.

    All other items take at least ``least`` seconds, and ``on_host`` seconds if everything movable is on the host.
    """

    def __init__(self) -> None:
        self.spread: Counter[tuple[float, ...]] = Counter()
        self.heads: Counter[_Head] = Counter()
        self.least = 0.0
        self.on_host = 0.0

    def add(self, seconds: tuple[float, ...], size: int, count: int) -> None:
        """Add ``count`` items of ``size`` bytes, each with its seconds on each place."""
        if size:
            self.spread[tuple(each / size for each in seconds)] += size * count
        else:
            self.least += min(seconds) * count
            self.on_host += seconds[-1] * count


def _items(places: _Places, pieces: Pieces, units: Sequence[Unit]) -> _Items:
    items, facts = _Items(), pieces.facts
    alike = Counter((kind, unit.cache) for kind, unit in zip(pieces.kinds[:-1], units, strict=False))
    for (kind, cache), count in alike.items():
        index = pieces.kinds.index(kind)
        layer, attention, state = facts.layers[index], pieces.attention[index], round(2 * pieces.states[index])
        free, fixed = _free_tensors(index, layer.tensors, pieces, places)
        items.add((fixed,), 0, count)
        projections = Counter[tuple[float, ...]]()
        for of_byte, size in free[: layer.n_attention]:
            projections[of_byte] += size
        is_free = len(free[layer.n_attention :]) == len(layer.tensors) - layer.n_attention
        if attention and projections and is_free and not (state or pieces.cache_on_host):
            seconds = places.layer(attention, cache_on_host=False)
            items.heads[_Head(seconds, places.copied(attention), cache, tuple(projections.items()))] += count
            free = free[layer.n_attention :]
        else:
            seconds = places.layer(attention, pieces.cache_on_host, pieces.states[index])
            if state:
                # it is read like weights, and written
                of_byte = places.of_byte(WeightFacts("", state, 0, False), pieces.layer(index, HOST).weights)
                of_byte = of_byte[-1:] * len(of_byte) if pieces.cache_on_host else of_byte
                seconds = tuple(a + state * b for a, b in zip(seconds, of_byte, strict=True))
            items.add(seconds, 0 if pieces.cache_on_host else cache, count)
        for of_byte, size in free:
            items.spread[of_byte] += size * count
    free, fixed = _free_tensors(len(facts.layers), facts.output, pieces, places)
    items.add((fixed,), 0, 1)
    seconds = places.layer(None, cache_on_host=False)
    for of_byte, size in free:
        seconds = tuple(a + size * b for a, b in zip(seconds, of_byte, strict=True))
    items.add(seconds, sum(size for _, size in free), 1)
    return items


def _free_tensors(
    index: int, tensors: Sequence[WeightFacts], pieces: Pieces, places: _Places
) -> tuple[list[Spread], float]:
    """Return the tensors of a layer, or of the output, that have a choice, and the seconds of the others."""
    free: list[Spread] = []
    fixed, seconds = 0.0, dict[tuple[object, ...], tuple[float, ...]]()
    for tensor in tensors:
        if not tensor.bytes:
            continue
        is_host_only = pieces.host_only.has(tensor.name, HOST)
        sort = tensor.n_params / tensor.bytes, tensor.looked_up, tensor.experts, is_host_only
        if sort not in seconds:
            seconds[sort] = places.of_byte(tensor, pieces.layer(index, HOST).weights, is_host_only)
        of_byte = seconds[sort]
        if is_host_only or tensor.name in pieces.pinned:
            target = HOST if is_host_only else pieces.pinned[tensor.name]
            fixed += tensor.bytes * of_byte[places.place_of[target]]
        else:
            free.append((of_byte, tensor.bytes))
    return free, fixed


def _rents(spread: Sequence[Spread], room: Sequence[int | None]) -> list[float] | None:
    """Find the rents with the best bound: seconds that another byte of room on each place would save.

    Finds the cheapest spread, one kind after the other, by successive shortest paths of a transportation problem.
    ``None`` if nothing fits.
    """
    count = len(room)
    # whole numbers, so that equal paths have equal costs
    scale = 2**50 / (max((max(seconds) for seconds, _ in spread), default=0.0) or 1.0)
    prices = [[round(each * scale) for each in seconds] for seconds, _ in spread]
    left = [math.inf if size is None else size for size in room]
    held: list[dict[int, float]] = [{} for _ in room]
    # for each pair of places, the least extra cost of moving a byte from one to the other, and its kind
    moves: list[list[tuple[float, int]]] = [[(math.inf, -1)] * count for _ in room]
    for index, (_, size_of_kind) in enumerate(spread):
        waiting: float = size_of_kind
        while waiting:
            costs, before = _cheapest(prices[index], moves)
            end = min((place for place in range(count) if left[place]), key=lambda place: costs[place], default=-1)
            if end < 0:
                return None
            path = [end]
            while before[path[-1]] >= 0:
                path.append(before[path[-1]])
            steps = [(a, b, moves[a][b][1]) for b, a in pairwise(path)]
            size = min([waiting, left[end], *(held[a][moved] for a, _, moved in steps)])
            left[end] -= size
            waiting -= size
            held[path[-1]][index] = held[path[-1]].get(index, 0) + size
            for a, b, moved in steps:
                held[a][moved] -= size
                if not held[a][moved]:
                    del held[a][moved]
                held[b][moved] = held[b].get(moved, 0) + size
            for place in path:
                moves[place] = [
                    min(((prices[k][other] - prices[k][place], k) for k in held[place]), default=(math.inf, -1))
                    for other in range(count)
                ]
    # a byte less room costs what its cheapest byte costs that moves, step by step, to a place with room; where all
    # places are full, only the differences between places matter
    start = [0 if size else math.inf for size in left] if any(left) else [*[math.inf] * (count - 1), 0]
    costs, _ = _cheapest(start, list(zip(*moves, strict=True)))
    # a place without any room keeps an infinite rent
    return [(cost - min(costs)) / scale for cost in costs]


def _cheapest(prices: Sequence[float], moves: Sequence[Sequence[tuple[float, int]]]) -> tuple[list[float], list[int]]:
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
