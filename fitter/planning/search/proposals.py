"""Proposals: placements made from a request, the sizes of its layers, room and prices. Bytes and seconds.

Pure functions between ``placing``, which packs, and ``corrections``, which has llama.cpp measure the proposals.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.placing.packing import (
    Kind,
    bring,
    first_found,
    in_first_layers,
    pack,
    pack_bare,
    pack_fastest,
    pack_whole,
)
from fitter.planning.placing.placement import Placement, caches_on, gaps_of, held_on, weights_on
from fitter.planning.placing.spill import Ranges
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.prices import PriceList
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import default_placement, flag_like, is_pipelined, split_counts, units_on_devices
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.search.room import Room, first_without_attention

_STRIDES = 8
"""The search for the fastest first layer on devices begins with steps of an eighth of the layers.

A fourth gives the same plans for all 66 cases of ``tools.comparisons.cases`` and 115 random machines."""

_NEAR = 4
"""Layers of a step where the fastest first layer of the previous situation is still the best start.

Without further steps in the same direction Qwen3 32B on a 2080 Ti and a 3060 (machine 15 of ``tools.search.depths``) is
9 % slower."""

_BROUGHT: tuple[Kind, ...] = ("layers", "all", "rest")
"""Kinds of weights of host layers that devices get.

Without ``all`` gpt-oss-20b on two 4090 at 2 Mi tokens takes 33 % longer; with it alone Llama 3.1 8B on 4 GiB at 16,384
is 8 % slower. Without ``rest`` GLM 4.5 Air on a 4070, four slots of 32,768 with a q8_0 cache, takes 18 % longer."""

READABLE = 0.01
"""A placement may take so much longer if its words are easier to read."""


@dataclass(frozen=True)
class Situation:
    """A placement problem: ``units`` at a context of ``n_ctx``, on ``devices`` with ``room``.

    ``prices`` tell which placement is faster. Each layer has its cache and its weights in one place where the situation
    ``is_plain``.
    """

    request: Request
    devices: tuple[DeviceLimit, ...]
    n_ctx: int
    units: tuple[Unit, ...]
    room: Room
    prices: PriceList | None
    is_plain: bool = False
    placed: dict[int, Placement | None] = field(default_factory=dict, compare=False, repr=False)
    """The layers from each first one on on devices, as far as that was asked for."""
    fillings: dict[int, tuple[float, Placement | None]] = field(default_factory=dict, compare=False, repr=False)
    """The fastest filling by its first layer on devices, and its seconds, as far as any was asked for."""
    near: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """By the number of devices: the fastest first layer of the latest situation."""

    @cached_property
    def ranges(self) -> Ranges:
        """The units, with their seconds where devices differ in speed."""
        return Ranges(self.units, self.prices.all.times(self.units) if self.prices and not self.is_plain else None)

    @cached_property
    def far(self) -> list[int]:
        """Devices over a network: each tensor there apart from its layer costs a trip."""
        return [d for d in range(len(self.devices)) if self.prices and self.prices.all.is_remote(d)]

    @cached_property
    def has_states(self) -> bool:
        """Whether layers have recurrent states."""
        return any(unit.state for unit in self.units)

    @property
    def first(self) -> int | None:
        """The first layer on devices, where the user sets how many are there."""
        fixed = "n_gpu_layers" in self.request.fixed
        return len(self.units) - units_on_devices(self.request) if fixed else None

    def counts(self, first: int) -> tuple[int, ...] | None:
        """The layers of each device with those from ``first`` on, where the user sets their shares."""
        if "tensor_split" not in self.request.fixed:
            return None
        return split_counts(self.request, self.devices, len(self.units) - first)


def place_whole(at: Situation) -> Placement | None:
    """Place all layers, or as many as the user sets, on devices as a whole; ``None`` where they have no room.

    On several devices where they take the least time, if there are prices: a slow device may get nothing, unless it is
    the user's.
    """
    default = default_placement(at.request, at.devices)
    budgets = at.room.behind(at.units, default.first)
    if "tensor_split" in at.request.fixed:
        return default if min(gaps_of(at.units, budgets, default), default=0) >= 0 else None
    if at.prices is None or len(at.devices) < 2:
        return pack_whole(at.units, budgets, default.first)
    prices = at.prices.all
    seconds = [prices.unit_seconds(d) for d in range(len(at.devices))]
    placement = pack_fastest(at.units, budgets, seconds, prices.hop, default.first, prices.visits)
    is_refused = placement is not None and placement.idle and "devices" in at.request.fixed
    return None if is_refused else placement


def place_partial(at: Situation) -> Placement | None:
    """Place a part of the weights on devices, where that takes the least time."""
    found = in_place(at)
    if not found:
        return (_bare_by_user(at) if at.prices and not at.is_plain else None) or _without_items_by_user(at)
    if at.prices is None:
        return found[0 if at.request.is_expert_model else -1]
    best = min((each for placement in found for each in _near(at, placement)), key=at.prices.seconds)
    return _without_pipeline(at, best if at.is_plain else add_caches(at, swap_caches_for_weights(at, best)))


def in_place(at: Situation) -> list[Placement]:
    """List placements with each layer's cache and attention in one place.

    The first has as many layers on devices as have room without their items. Experts stay apart; else the last has the
    most layers there that have room with their items, but for items of as many layers as there are devices.
    """
    n_units = len(at.units)
    firsts = range(n_units) if at.first is None else (at.first,)
    # devices with all layers have smaller buffers, and so more room than with all but one
    able = bisect_left(firsts, True, 1, key=lambda first: place_from(at, first) is not None)
    most = 0 if place_from(at, firsts[0]) else able
    if most == len(firsts):
        return [Placement(n_units, (0,) * len(at.devices))] if at.first in (None, n_units) else []
    is_settled = at.request.is_expert_model and not at.far
    whole = most if is_settled else bisect_left(firsts, True, most, key=lambda first: _is_whole(at, first))
    found = [place_from(at, first) for first in dict.fromkeys((*firsts[most:][:1], *firsts[whole:][:1]))]
    return [placement for placement in found if placement]


def place_from(at: Situation, first: int) -> Placement | None:
    """Place the layers from ``first`` on on devices, and what they have no room for on the host."""
    if first not in at.placed:
        at.placed[first] = pack(at.ranges, at.room.behind(at.units, first), first, at.counts(first), at.far)
    return at.placed[first]


def _near(at: Situation, placement: Placement) -> Iterator[Placement]:
    """Yield ``placement``, and others with a layer moved between neighbours: more items may fit elsewhere then.

    Without them Llama 3.1 70B with a cache of q8_0 at 32,768 tokens on two 3090 is 2.6 % slower.
    """
    yield placement
    is_open = placement.moved and "tensor_split" not in at.request.fixed
    for left in range(len(placement.counts) - 1) if is_open else ():
        for step in (1, -1):
            counts = list(placement.counts)
            counts[left] += step
            counts[left + 1] -= step
            room = at.room.behind(at.units, placement.first)
            moved = pack(at.ranges, room, placement.first, counts, at.far) if min(counts) >= 0 else None
            if moved:
                yield moved


def _is_whole(at: Situation, first: int) -> bool:
    placement = place_from(at, first)
    return placement is not None and len({item.layer for item, _ in placement.moved}) <= len(at.devices)


def in_words(at: Situation, best: Trial) -> Placement | None:
    """Return a placement that one of llama.cpp's flags gives, and that takes hardly longer; ``None`` without one."""
    placement = best.placement
    if at.prices is None or not placement.is_spilled or not placement.moved or flag_like(at.request, placement)[0]:
        return None
    left = [device.target - best.breakdown.on(device.name).used for device in best.devices]
    budgets = list(map(add, left, held_on(at.units, placement)))
    is_split_by_user = "tensor_split" in at.request.fixed or len(at.devices) < 2
    found = [
        in_first_layers(at.units, budgets, placement, keeps_split=keeps_split)
        for keeps_split in ((True,) if is_split_by_user else (True, False))
    ]
    flags = [each for each in found if each and flag_like(at.request, each)[0]]
    chosen = min(flags, key=at.prices.seconds, default=None)
    return chosen if chosen and at.prices.seconds(chosen) <= (1 + READABLE) * at.prices.seconds(placement) else None


def _without_pipeline(at: Situation, placement: Placement) -> Placement:
    """Name the device of one tensor where devices hold the whole model: any override ends llama.cpp's pipeline.

    Devices that work on several micro batches at once need the compute buffers of all of them.
    """
    last = next((unit.items[0] for unit in reversed(at.units[:-1]) if unit.items), None)
    is_free = at.request.strategy == "fastest" and is_pipelined(at.request, at.devices, placement)
    return replace(placement, moved=((last, placement.homes[last.layer]),)) if last and is_free else placement


def _without_items_by_user(at: Situation) -> Placement | None:
    """Place the layers as the user says, with all their items on the host: the compute buffer may then be smaller."""
    if at.first is None or (counts := at.counts(at.first)) is None:
        return None
    placement = Placement(at.first, counts)
    needs = [sum(unit.need for unit in at.units[start:stop]) for start, stop in placement.ranges()]
    if any(need > device.target for need, device in zip(needs, at.devices, strict=True)):
        return None
    return replace(placement, moved=tuple((item, HOST) for unit in at.units[at.first :] for item in unit.items))


def swap_caches_for_weights(at: Situation, placement: Placement) -> Placement:
    """Move layers to the host if that is faster, so that tensors of any layer take the room of their caches.

    Where caches are large, a layer's weights alone gain more on a device than the whole layer.
    """
    if at.prices is None or _most_saved(at, at.prices, placement) < GAIN * at.prices.seconds(placement):
        return placement
    n_units, tried = len(at.units), set[int]()

    def attempt(first: int) -> float:
        tried.add(first)
        if first not in at.fillings:
            is_there = 0 <= first < n_units
            at.fillings[first] = _fastest_filling(at, first) if is_there else (math.inf, None)
        return at.fillings[first][0]

    if at.first is not None:
        attempt(at.first)
    else:
        stride, near = max(1, n_units // _STRIDES), at.near.get(len(at.devices))
        # all caches on devices, some or hardly any; without some, Gemma 3 12B on 8 GiB is 7 % slower
        starts = [0, n_units // 3, 2 * n_units // 3, n_units - 1, placement.first, *(() if near is None else (near,))]
        if at.has_states:
            starts.append(first_without_attention(at.units))
        around = min(starts, key=attempt)
        stride = _NEAR if around == near else stride
        while stride:
            before, around = around, min((around, around - stride, around + stride), key=attempt)
            stride = stride if around != before else stride // 2
        at.near[len(at.devices)] = min(tried, key=attempt)
    seconds, best = at.fillings[min(tried, key=attempt)]
    # with the user's number of layers none leaves the devices for it
    least = GAIN if at.first is None else 0.0
    return best if best and seconds < (1 - least) * at.prices.seconds(placement) else placement


def _most_saved(at: Situation, prices: PriceList, placement: Placement) -> float:
    """Estimate the seconds that weights on the host would save if they had the room of all caches on devices."""
    on_devices, caches = (sum(on(at.units, placement)) for on in (weights_on, caches_on))
    on_host = sum(unit.weights for unit in at.units) - on_devices
    # devices without attention have more room
    rooms = (at.room.without, at.room.with_states if at.has_states else at.room.without)
    most = [max(0, *sizes) for sizes in zip(*rooms, strict=True)]
    # without a cache on devices (the output has none), or with the user's number of layers, all room without weights
    if at.first is not None or not caches:
        caches = sum(most) - on_devices
    elif at.has_states:
        caches += sum(max(0, size - here) for size, here in zip(most, at.room.of(at.units, placement), strict=True))
    room = min(on_host, caches)
    if room <= 0:
        return 0.0
    rest, movable = _saved_by_byte(at, prices, placement)
    first = min(room, sum(item.bytes for unit in at.units[: placement.first] for item in unit.rest))
    return first * rest + (room - first) * movable


def _saved_by_byte(at: Situation, prices: PriceList, placement: Placement) -> tuple[float, float]:
    """Estimate the most seconds that a byte on a device saves: attention's weights of host layers, and tensors that may
    leave their layer. The first are needed for every token, experts are not.
    """
    others = [unit.rest for unit in at.units[: placement.first]]
    kinds = max(others, key=len, default=()), max(at.units, key=lambda unit: unit.movable).items
    rest, movable = (max(prices.all.saved_by_byte(items, d) for d in range(len(at.devices))) for items in kinds)
    return rest, movable


def most_saved_by(at: Situation, placement: Placement, room: int) -> float:
    """Estimate the most seconds that ``room`` more bytes on devices save; 0 where nothing is on the host."""
    if at.prices is None or not placement.is_spilled:
        return 0.0
    return room * max(_saved_by_byte(at, at.prices, placement))


def _fastest_filling(at: Situation, first: int) -> tuple[float, Placement | None]:
    """Place layers from ``first`` on on devices, and fill the room with weights of the others in each possible way."""
    assert at.prices is not None
    base = place_from(at, first)
    if base is None:
        return math.inf, None
    budgets = at.room.of(at.units, base)
    # hashing placements would take longer than comparing three
    filled: list[Placement] = []
    for kind in _BROUGHT:
        each = bring(at.ranges, budgets, base, kind, at.far)
        if each not in filled:
            filled.append(each)
    return min(((at.prices.seconds(each), each) for each in filled), key=lambda pair: pair[0])


def add_caches(at: Situation, placement: Placement) -> Placement:
    """Bring caches of layers on the host to devices, without the weights, if that is faster.

    Without it DeepSeek V3.1 on a 4070 at 32,768 tokens (machine 44 of ``tools.search.depths``) takes 3.3 times as long.
    Attention is computed where the cache is: with long prompts, or a latent cache, that is most of a layer's time.
    """
    on_host = placement.first
    if at.prices is None or at.first is not None or not on_host or not at.devices:
        return placement
    prices = at.prices
    best, best_seconds = placement, prices.seconds(placement)
    gains = (prices.all.bare_gain(unit.index) for unit in at.units[:on_host] if unit.can_be_bare)
    if float_sum(gains) < GAIN * best_seconds:
        return placement
    # caches of as many layers as fit, where not all do (a long prompt on a card with room for two thirds of them)
    for first in dict.fromkeys((0, on_host // 4, on_host // 2, 3 * on_host // 4)):
        candidate = _with_bare(at, first, on_host - first)
        if candidate is not None and (seconds := prices.seconds(candidate)) < best_seconds:
            best, best_seconds = candidate, seconds
    return best


def _bare_by_user(at: Situation) -> Placement | None:
    """Place the user's layers on devices, of as few as possible only the cache; ``None`` where that does not fit."""
    return None if at.first is None or not at.devices else _with_bare(at, at.first, 1)


def _with_bare(at: Situation, first: int, bare: int) -> Placement | None:
    """Place layers from ``first`` on on devices: of the first ``bare`` only the cache, or of as few more as fit."""
    budgets = at.room.behind(at.units, first)

    def of(bare: int) -> Placement | None:
        return pack_bare(at.units, budgets, first, bare, at.counts(first), at.far)

    return first_found(range(bare, len(at.units) - first), of)
