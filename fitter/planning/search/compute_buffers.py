"""Compute buffers, learned from the search's dummy loads. Bytes.

A compute buffer depends on the placement: whether all of the model is on devices, and whether a device has a cache,
with which it computes attention. So they are learned apart.
"""

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
    """Compute bytes by device and context, for one kind of placement.

    Between measured contexts, and beyond them, it estimates by a line through the two nearest.
    """

    _points: dict[str, dict[int, int]] = field(default_factory=dict)
    _corrected: set[tuple[str, int]] = field(default_factory=set)

    def learn(self, device: str, n_ctx: int, compute: int) -> None:
        """Learn a measurement. The second one at a context replaces the first, whose placement was only a guess. From
        then on the largest counts, so that placements that differ by a tensor do not correct each other for ever."""
        points = self._points.setdefault(device, {})
        if (device, n_ctx) in self._corrected:
            compute = max(compute, points[n_ctx])
        elif n_ctx in points:
            self._corrected.add((device, n_ctx))
        points[n_ctx] = compute

    def copy(self, renamed: Mapping[str, str]) -> LearnedCompute:
        """Copy, with devices renamed from key to value of ``renamed``."""
        points = {renamed.get(device, device): dict(by_context) for device, by_context in self._points.items()}
        return LearnedCompute(points, {(renamed.get(device, device), n_ctx) for device, n_ctx in self._corrected})

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def at(self, device: str, n_ctx: int) -> int | None:
        """Estimate compute bytes; ``None`` without a measurement."""
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
    """Compute buffers of whole placements, of others, and of devices without a cache.

    ``shared`` is memory that others than the model use: it does not depend on the placement.
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
        """Learn a measurement.

        Args:
            used: devices that are not idle, and whether each has a cache.
            pools: bytes in use of each memory pool: all of them, and those that are not its devices'.
        """
        for name, has_cache in used.items():
            learned = self._by_kind[is_whole] if is_whole or has_cache else self._without_cache
            learned.learn(name, n_ctx, breakdown.on(name).compute)
        self._by_kind[is_whole].learn("host", n_ctx, breakdown.host.used)
        for name, (total, not_on_devices) in (pools or {}).items():
            self._by_kind[is_whole].learn(name, n_ctx, total)
            self._by_kind[is_whole].learn(_BESIDE + name, n_ctx, not_on_devices)
        for row in breakdown.rows:
            if row.buffer_type == SHARED_ROW and row.device is not None:
                self.shared.learn(row.device, n_ctx, row.used)

    def forget_partial(self) -> None:
        """Forget the buffers of placements that are not whole."""
        self._by_kind[False] = LearnedCompute()

    def share_whole(self, other: Buffers) -> None:
        """Learn the buffers of whole placements together with ``other``."""
        self._by_kind[True] = other._by_kind[True]

    def on_host(self, n_ctx: int) -> int | None:
        """Estimate the host's bytes with the whole model on devices; ``None`` before a measurement."""
        return self._by_kind[True].at("host", n_ctx)

    def beside_devices(self, pool: str, n_ctx: int, is_whole: bool) -> int | None:
        """Estimate the bytes of a pool that are not its devices'; ``None`` before a measurement."""
        return self._by_kind[is_whole].at(_BESIDE + pool, n_ctx)

    def in_pool(self, pool: str, n_ctx: int) -> int | None:
        """Estimate the least bytes that a pool holds in all; ``None`` before a measurement."""
        sizes = [learned.at(pool, n_ctx) for learned in self._by_kind.values()]
        return min((size for size in sizes if size is not None), default=None)

    def take_over(self, other: Buffers, renamed: Mapping[str, str]) -> None:
        """Copy all buffers of ``other`` but the shared ones, with devices renamed."""
        self._by_kind = {is_whole: learned.copy(renamed) for is_whole, learned in other._by_kind.items()}
        self._without_cache = other._without_cache.copy(renamed)

    def room(
        self, devices: Sequence[DeviceLimit], n_ctx: int, is_whole: bool, off: Sequence[int], optimistic: bool = False
    ) -> Room:
        """Compute the bytes of weights and caches that ``devices`` may hold.

        A buffer that was not measured for this kind of placement is taken from the other kind.

        Args:
            off: by how many bytes each device's weights and caches were above their estimate when last measured.
            optimistic: take no buffers from the other kind.
        """
        with_caches, without = [], []
        for d, device in enumerate(devices):
            compute = self._by_kind[is_whole].at(device.name, n_ctx)
            without_cache = self._without_cache.at(device.name, n_ctx)
            if compute is None:
                other = None if optimistic else self._by_kind[not is_whole].at(device.name, n_ctx)
                compute = self.shared.at(device.name, n_ctx) if other is None else other
                if without_cache is not None and not is_whole:
                    compute = max(compute or 0, without_cache)
            without_cache = compute if without_cache is None else without_cache
            with_caches.append(device.target - (compute or 0) - off[d])
            without.append(device.target - (without_cache or 0) - off[d])
        return Room(tuple(with_caches), tuple(without))
