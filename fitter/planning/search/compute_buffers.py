"""Compute buffers learned from the dummy loads already made. Bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fitter.llama.types import Breakdown
from fitter.planning.request.request import SHARED_ROW, DeviceLimit
from fitter.planning.search.room import Room

_BESIDE = "beside the devices of "


@dataclass
class LearnedCompute:
    """Compute bytes per device, by context, for one kind of placement.

    What it answers is a proposal: what was measured at that context, else a line through the two nearest ones.
    """

    _points: dict[str, dict[int, int]] = field(default_factory=dict)
    _corrected: set[tuple[str, int]] = field(default_factory=set)

    def learn(self, device: str, n_ctx: int, compute: int) -> None:
        """Take in a measurement. The second at a context replaces the first, of a placement that was only a guess; from
        then on the largest counts, so that placements which differ by a tensor do not correct each other for ever."""
        points = self._points.setdefault(device, {})
        if (device, n_ctx) in self._corrected:
            compute = max(compute, points[n_ctx])
        elif n_ctx in points:
            self._corrected.add((device, n_ctx))
        points[n_ctx] = compute

    def copy(self, renamed: Mapping[str, str]) -> LearnedCompute:
        """The same, to learn more apart from it; a device has what the one had that it is ``renamed`` from."""
        points = {renamed.get(device, device): dict(known) for device, known in self._points.items()}
        return LearnedCompute(points, {(renamed.get(device, device), n_ctx) for device, n_ctx in self._corrected})

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def at(self, device: str, n_ctx: int) -> int | None:
        """Expected compute bytes, ``None`` where nothing was measured."""
        points = self._points.get(device)
        if not points:
            return None
        contexts = sorted(points)
        if len(contexts) == 1 or n_ctx in points:
            return points.get(n_ctx, points[contexts[0]])
        right = min(max(bisect_left(contexts, n_ctx), 1), len(contexts) - 1)
        low, high = contexts[right - 1], contexts[right]
        return max(0, points[low] + (points[high] - points[low]) * (n_ctx - low) // (high - low))


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
