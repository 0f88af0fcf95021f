"""What could be placed: from a request, the sizes of its layers, room and prices to a placement. Bytes and seconds.

Pure: nothing is asked here, and nothing accepted. llama.cpp measures what comes out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fitter.planning.placing.boundaries import Times
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.placing.packing import bring_back, pack, pack_fastest, pack_whole
from fitter.planning.placing.placement import Placement, caches_on, weights_on
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.prices import PriceList
from fitter.planning.request.given import default_placement, split_counts, units_on_devices
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.search.room import Room

_STARTS = 8
"""How many first layers on devices are tried before the search goes on around the best of them."""

_WAYS_TO_BRING: tuple[Literal["items", "layers", "all"], ...] = ("items", "layers", "all")

_CACHE_SHARE = 0.2
"""Share of the devices' memory from which on caches are worth being asked about apart from their layers' weights."""


@dataclass(frozen=True)
class Situation:
    """What there is to place, and where: ``units`` at a context of ``n_ctx`` on ``devices`` with so much ``room``.

    ``prices`` say what is faster; without them (``None``) more bytes on devices are better. So are they where the host
    ``is_short`` of room.
    """

    request: Request
    devices: tuple[DeviceLimit, ...]
    n_ctx: int
    units: tuple[Unit, ...]
    room: Room
    prices: PriceList | None
    is_short: bool = False

    @cached_property
    def apart(self) -> int:
        """How many bytes on devices are worth as much as a layer less that has tensors on the host."""
        if self.prices is None:
            return 0
        saved = self.prices.all.saved_by_byte(max(self.units, key=lambda unit: unit.movable))
        return round(self.prices.all.apart / saved) if saved > 0 else 0

    @cached_property
    def times(self) -> Times | None:
        """What units take on each device, ``None`` where only bytes count."""
        return self.prices.all.times(self.units) if self.prices and not self.is_short else None

    @property
    def first(self) -> int | None:
        """The first layer on devices, where the user says how many are."""
        fixed = "n_gpu_layers" in self.request.fixed
        return len(self.units) - units_on_devices(self.request) if fixed else None


def place_whole(at: Situation) -> Placement | None:
    """All layers (or as many as the user says) on devices, nothing of them elsewhere."""
    default = default_placement(at.request, at.devices)
    budgets = at.room.with_caches
    if "tensor_split" not in at.request.fixed:
        return pack_whole(at.units, budgets, default.first)
    used = map(sum, zip(weights_on(at.units, default), caches_on(at.units, default), strict=True))
    return default if all(u <= b for u, b in zip(used, budgets, strict=True)) else None


def place_fastest(at: Situation) -> Placement | None:
    """The same where all layers take the least time: a slow device gets nothing where others do."""
    assert at.prices is not None
    prices = at.prices.all
    seconds = [prices.unit_seconds(d) for d in range(len(at.devices))]
    first = default_placement(at.request, at.devices).first
    return pack_fastest(at.units, at.room.with_caches, seconds, prices.hop, first, prices.visits)


def place_partial(at: Situation, spread: bool, *, is_plain: bool = False) -> Placement | None:
    """A part of the weights on devices: single tensors of any layer on the host (``spread``), or whole layers.

    ``is_plain``: layers have their cache and their weights in one place.
    """
    if "tensor_split" in at.request.fixed:
        return _split_by_user(at)
    found = pack(at.units, at.room.with_caches, spread=spread, first=at.first, apart=at.apart, times=at.times)
    found = (found and avoid_remote_tensors(at, found)) or _all_on_host(at)
    if found is None or at.first is not None or at.prices is None or is_plain:
        return found
    return add_caches(at, swap_caches_for_weights(at, found))


def _split_by_user(at: Situation) -> Placement | None:
    choices = range(len(at.units), 0, -1) if at.first is None else (len(at.units) - at.first,)
    for n_gpu_layers in choices:
        counts = split_counts(at.request, at.devices, n_gpu_layers)
        placement = pack(at.units, at.room.with_caches, spread=True, counts=counts, apart=at.apart)
        if placement and (at.request.is_expert_model or at.first is not None or not placement.moved):
            return placement
    return _all_on_host(at)


def _all_on_host(at: Situation) -> Placement | None:
    """All layers on the host: the last resort, unless the user wants some elsewhere."""
    n_units = len(at.units)
    return Placement(n_units, (0,) * len(at.devices)) if at.first in (None, n_units) else None


def avoid_remote_tensors(at: Situation, found: Placement) -> Placement:
    """``found``, or the same with tensors on the host that are apart from their layer on a remote device.

    Each of those takes a trip there; whether they are worth it, or the host has no room for them, is asked here.
    """
    if at.prices is None:
        return found
    far = {target for _, target in found.moved if target != HOST and at.prices.all.is_remote(target)}
    if not far:
        return found
    placement = pack(at.units, at.room.with_caches, spread=True, counts=found.counts, apart=at.apart, far=far)
    host = at.request.host
    if placement is None or (
        host.target is not None and not host.paging and _bytes_on_host(at.units, placement) > host.target
    ):
        return found
    return min(found, placement, key=at.prices.seconds)


def _bytes_on_host(units: Sequence[Unit], placement: Placement) -> int:
    """Bytes of layers and tensors that are left to the host."""
    layers = sum(unit.weights + unit.cache for unit in units[: placement.first])
    return layers + sum(item.bytes for item, target in placement.moved if target == HOST)


def swap_caches_for_weights(at: Situation, found: Placement) -> Placement:
    """``found``, or a faster one with more layers on the host, whose caches give way to tensors of any layer.

    Where caches are large, as with many slots, the weights of a layer do more on a device than all of it would.
    But a cache costs as much more as there are requests at once: what one request gains is not to be less, by its
    share, than what all of them at once lose.
    """
    if at.prices is None or _keeps_caches(at, found):
        return found
    n_units, prices = len(at.units), at.prices
    best, least = found, prices.seconds(found)
    most = least * prices.busy(found)
    tried: dict[int, float] = {}

    def attempt(first: int) -> None:
        nonlocal best, least
        if first in tried or not 0 <= first < n_units:
            return
        tried[first] = math.inf
        for placement in _brought_back(at, first):
            taken = prices.seconds(placement)
            if taken < tried[first] and taken * prices.busy(placement) <= most:
                tried[first] = taken
                if taken < least:
                    best, least = placement, taken

    stride = max(1, n_units // _STARTS)
    for first in range(0, n_units, stride):
        attempt(first)
    while stride > 1:
        stride = (stride + 1) // 2
        around = min(tried, key=lambda first: tried[first])
        attempt(around - stride)
        attempt(around + stride)
    return best


def _brought_back(at: Situation, first: int) -> list[Placement]:
    """Layers from ``first`` on on devices, and in each way weights of the others where there is room beside them."""
    assert at.prices is not None
    prices = at.prices.all
    has_caches = any(unit.cache for unit in at.units[first:])
    budgets = at.room.with_caches if has_caches else at.room.without
    base = pack(at.units, budgets, spread=True, first=first, apart=at.apart, times=at.times)
    if base is None:
        return []
    far = [d for d in range(len(at.devices)) if prices.is_remote(d)]
    return [bring_back(at.units, at.room.of(at.units, base), base, bring, far) for bring in _WAYS_TO_BRING]


def _keeps_caches(at: Situation, found: Placement) -> bool:
    """Whether caches take so little of the devices that giving their room to weights is not worth asking."""
    is_on_host = found.first > 0 or any(target == HOST for _, target in found.moved)
    room = sum(max(0, budget) for budget in at.room.with_caches)
    return not is_on_host or sum(unit.cache for unit in at.units) < _CACHE_SHARE * room


def add_caches(at: Situation, found: Placement) -> Placement:
    """``found``, or a faster one where devices have the caches of layers whose weights are on the host.

    Attention is computed where the cache is: for long prompts, or a latent cache, that is most of a layer's time.
    """
    if at.prices is None or not found.first or not at.devices:
        return found
    prices, units, gain = at.prices, at.units, 0.0
    best, best_seconds = found, prices.seconds(found)
    for unit in units[: found.first]:
        gain += prices.all.bare_gain(unit.index) if unit.can_be_bare else 0.0
    if gain < GAIN * best_seconds:
        return found
    for first in dict.fromkeys((0, found.first // 4, found.first // 2, 3 * found.first // 4)):
        more = 0
        while (bare := found.first - first + more) <= len(units) - 1 - first:
            placement = pack(
                units, at.room.with_caches, spread=True, first=first, apart=at.apart, bare=bare, times=at.times
            )
            if placement is not None:
                if (seconds := prices.seconds(placement)) < best_seconds:
                    best, best_seconds = placement, seconds
                break
            more = 2 * more or 1
    return best
