"""What each device has room for, by the compute buffers that were measured so far. Bytes.

A compute buffer depends on what is on a device: on whether all of the model is, and on whether there is a cache, which
attention is computed with. So they are learned apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown
from fitter.planning.placing.memory import Unit
from fitter.planning.placing.placement import Placement, caches_on, weights_on
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import SHARED_ROW, DeviceLimit
from fitter.planning.search.learned import LearnedCompute

_BESIDE = "beside the devices of "


@dataclass(frozen=True)
class Room:
    """What each device may hold of weights and caches.

    Compute buffers are larger where attention is computed: there is less room ``with_caches`` than ``without`` any.
    """

    with_caches: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """The room for ``placement``: of each device by whether it has a cache."""
        caches = caches_on(units, placement)
        return [w if cache else o for w, o, cache in zip(self.with_caches, self.without, caches, strict=True)]


class Buffers:
    """Compute buffers learned of placements that are whole, of others, and of devices without a cache.

    ``shared`` is not the model's own: it is there whatever of the model is.
    """

    def __init__(self, shared: LearnedCompute | None = None) -> None:
        self.shared = LearnedCompute() if shared is None else shared
        self._by_kind = {True: LearnedCompute(), False: LearnedCompute()}
        self._without_cache = LearnedCompute()

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured on these devices."""
        return any(learned.knows_any for learned in self._by_kind.values())

    def knows(self, is_whole: bool) -> bool:
        """Whether a placement of this kind was measured."""
        return self._by_kind[is_whole].knows_any

    def learn(
        self,
        breakdown: Breakdown,
        n_ctx: int,
        is_whole: bool,
        used: Mapping[str, bool],
        pools: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Take in a measurement. ``used``: devices that had anything, and whether a cache was in it.

        ``pools``: what memory that devices share with the host holds, and what of that the devices do not have.
        """
        for name, has_cache in used.items():
            learned = self._by_kind[is_whole] if is_whole or has_cache else self._without_cache
            learned.learn(name, n_ctx, breakdown.on(name).compute)
        self._by_kind[is_whole].learn("host", n_ctx, breakdown.host.used)
        for name, (all_of_it, beside) in (pools or {}).items():
            self._by_kind[is_whole].learn(name, n_ctx, all_of_it)
            self._by_kind[is_whole].learn(_BESIDE + name, n_ctx, beside)
        for row in breakdown.rows:
            if row.buffer_type == SHARED_ROW and row.device is not None:
                self.shared.learn(row.device, n_ctx, row.used)

    def forget_partial(self) -> None:
        """Know nothing any more of placements that are not whole."""
        self._by_kind[False] = LearnedCompute()

    def on_host(self, n_ctx: int) -> int | None:
        """What the host is expected to hold where the model is on devices as a whole, ``None`` if that is not known."""
        return self._by_kind[True].at("host", n_ctx)

    def beside(self, pool: str, n_ctx: int, is_whole: bool) -> int | None:
        """What a pool is expected to hold beside its devices, ``None`` where that is not known."""
        return self._by_kind[is_whole].at(_BESIDE + pool, n_ctx)

    def in_pool(self, pool: str, n_ctx: int) -> int | None:
        """The least that a pool is expected to hold in all, ``None`` where that is not known."""
        found = [learned.at(pool, n_ctx) for learned in self._by_kind.values()]
        return min((each for each in found if each is not None), default=None)

    def take_over(self, other: Buffers, renamed: Mapping[str, str]) -> None:
        """Know what ``other`` does, but for what is shared; a device has what the one had that it is renamed from."""
        self._by_kind = {is_whole: learned.copy(renamed) for is_whole, learned in other._by_kind.items()}
        self._without_cache = other._without_cache.copy(renamed)

    def room(
        self, devices: Sequence[DeviceLimit], n_ctx: int, is_whole: bool, off: Sequence[int], optimistic: bool = False
    ) -> Room:
        """What ``devices`` may hold of weights and caches, less what those were ``off`` by when last measured.

        A buffer that is not known of this kind of placement is taken from the other; none is if that is ``optimistic``.
        """
        with_caches, without = [], []
        for d, device in enumerate(devices):
            known = self._by_kind[is_whole].at(device.name, n_ctx)
            without_cache = self._without_cache.at(device.name, n_ctx)
            if known is None:
                other = None if optimistic else self._by_kind[not is_whole].at(device.name, n_ctx)
                known = self.shared.at(device.name, n_ctx) if other is None else other
                if without_cache is not None and not is_whole:
                    known = max(known or 0, without_cache)
            without_cache = known if without_cache is None else without_cache
            with_caches.append(device.target - (known or 0) - off[d])
            without.append(device.target - (without_cache or 0) - off[d])
        return Room(tuple(with_caches), tuple(without))


def room_left_by(
    trial: Trial, units: Sequence[Unit], room: Room, off: Sequence[int], devices: Sequence[DeviceLimit] | None = None
) -> Room:
    """``room``, but of the devices that ``trial`` uses what its own compute buffers leave.

    ``devices``: the same with less, where they share memory with the host.
    """
    with_caches, without = list(room.with_caches), list(room.without)
    caches = caches_on(units, trial.placement)
    for d, device in enumerate(trial.devices if devices is None else devices):
        if d not in trial.placement.idle:
            left = device.target - trial.breakdown.on(device.name).compute - off[d]
            without[d] = max(left, without[d])
            with_caches[d] = left if caches[d] else min(with_caches[d], left)
    return Room(tuple(with_caches), tuple(without))


def off_by(trial: Trial, units: Sequence[Unit]) -> list[int]:
    """By how much weights and caches on each device were more in ``trial`` than ``units`` say."""
    off = []
    weights_and_caches = zip(weights_on(units, trial.placement), caches_on(units, trial.placement), strict=True)
    for device, (weights, cache) in zip(trial.devices, weights_and_caches, strict=True):
        row = trial.breakdown.on(device.name)
        off.append(row.model + row.context - weights - cache)
    return off
