"""Compute buffers, learned from the search's dummy loads. Bytes.

A compute buffer depends on the placement: whether all of the model is on devices, and with which caches a device
computes. So they are learned apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fitter.llama.types import Breakdown
from fitter.planning.request.request import SHARED_ROW, DeviceLimit
from fitter.planning.search.room import Cached, Room

_K = TypeVar("_K")

More = Callable[[str, int, bool], int]
"""Returns further bytes of a device or the host at a context, with caches of attention or without."""

_BESIDE = "beside the devices of "


@dataclass
class LearnedCompute:
    """Compute bytes by device and context, for one kind of placement.

    Between measured contexts, and beyond them, it estimates by a line through the two nearest.
    """

    _points: dict[str, dict[int, int]] = field(default_factory=dict)
    _corrected: set[tuple[str, int]] = field(default_factory=set)
    is_guess: bool = False
    """Whether nothing was measured: ``with_micro_batch`` made it."""

    def learn(self, device: str, n_ctx: int, compute: int) -> None:
        """Learn a measurement. The second one at a context replaces the first, whose placement was only a guess. From
        then on the largest counts, so that placements that differ by a tensor do not correct each other for ever."""
        self.is_guess = False
        points = self._points.setdefault(device, {})
        if (device, n_ctx) in self._corrected:
            compute = max(compute, points[n_ctx])
        elif n_ctx in points:
            self._corrected.add((device, n_ctx))
        points[n_ctx] = compute

    def copy(self, renamed: Mapping[str, str]) -> LearnedCompute:
        """Copy, with devices renamed from key to value of ``renamed``."""
        points = {renamed.get(device, device): dict(by_context) for device, by_context in self._points.items()}
        corrected = {(renamed.get(device, device), n_ctx) for device, n_ctx in self._corrected}
        return LearnedCompute(points, corrected, self.is_guess)

    def with_micro_batch(
        self, n_ubatch: int, mine: int, other: LearnedCompute, others: int, more: More, has_caches: bool = True
    ) -> LearnedCompute:
        """Estimate the bytes with another micro batch, by a line through those with ``mine`` and with ``others``.

        Where one of the two was not measured, they are in proportion to the micro batch.

        Args:
            more: adds bytes.
            has_caches: whether devices compute with caches of attention.
        """

        def size(device: str, n_ctx: int) -> int:
            here, there = self.at(device, n_ctx), other.at(device, n_ctx)
            if here is None or there is None or mine == others:
                known, of = (there or 0, others) if here is None else (here, mine)
                return round(known * n_ubatch / of)
            return max(0, round(here + (there - here) * (n_ubatch - mine) / (others - mine)))

        contexts: dict[str, set[int]] = {}
        for points in (self._points, other._points):
            for device, by_context in points.items():
                contexts.setdefault(device, set()).update(by_context)
        guessed = {
            device: {n_ctx: size(device, n_ctx) + more(device, n_ctx, has_caches) for n_ctx in at}
            for device, at in contexts.items()
        }
        return LearnedCompute(guessed, is_guess=True)

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured or guessed."""
        return bool(self._points)

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured."""
        return self.knows_any and not self.is_guess

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
    """Compute buffers of whole placements, of others, and there of devices that compute no attention.

    ``shared`` is memory that others than the model use: it does not depend on the placement.
    """

    def __init__(self, shared: LearnedCompute | None = None) -> None:
        self.shared = LearnedCompute() if shared is None else shared
        self._by_kind = {True: LearnedCompute(), False: LearnedCompute()}
        self._without_attention: dict[Cached, LearnedCompute] = {
            "states": LearnedCompute(),
            "nothing": LearnedCompute(),
        }

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured on these devices."""
        return any(learned.knows_any for learned in self._by_kind.values())

    def knows(self, is_whole: bool) -> bool:
        """Whether a placement of this kind was measured, with this micro batch or another."""
        return self._by_kind[is_whole].knows_any

    def has_measured(self, is_whole: bool) -> bool:
        """Whether a placement of this kind was measured."""
        return self._by_kind[is_whole].is_measured

    def learn(
        self,
        breakdown: Breakdown,
        n_ctx: int,
        is_whole: bool,
        used: Mapping[str, Cached],
        layers_on_host: int | None = 0,
        pools: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Learn a measurement.

        Args:
            used: devices that are not idle, and the caches with which each computes.
            layers_on_host: bytes of weights and caches of layers that the host has; ``None`` if no sizes are known.
            pools: bytes in use of each memory pool: all of them, and those that are not its devices'.
        """
        for name, cached in used.items():
            kind = self._by_kind[is_whole]
            learned = kind if is_whole else self._without_attention.get(cached, kind)
            learned.learn(name, n_ctx, breakdown.on(name).compute)
        if layers_on_host is not None:
            self._by_kind[is_whole].learn("host", n_ctx, breakdown.host.used - layers_on_host)
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

    def host_without_layers(self, n_ctx: int, is_whole: bool) -> int | None:
        """Estimate the host's bytes without weights and caches of layers; ``None`` before a measurement."""
        return self._by_kind[is_whole].at("host", n_ctx)

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
        self._without_attention = {what: learned.copy(renamed) for what, learned in other._without_attention.items()}

    def guess(self, n_ubatch: int, measured: Mapping[int, Buffers], more: More | None = None) -> None:
        """Estimate the buffers that were not measured, but the shared ones, from those with the two nearest ones.

        ``more``: adds the bytes by which they are larger, where they are of another kind.
        """
        others, add = measured.items(), more or _nothing
        _guess(self._by_kind, n_ubatch, [(size, other._by_kind) for size, other in others], add)
        without = [(size, other._without_attention) for size, other in others]
        _guess(self._without_attention, n_ubatch, without, add, has_caches=False)
        if more and not self._without_attention["nothing"].knows_any:
            # without caches they are no larger than with them as measured, but for what is added there
            nothing: dict[Cached, LearnedCompute] = {"nothing": LearnedCompute()}
            with_caches = [(size, dict.fromkeys(nothing, other._by_kind[False])) for size, other in others]
            _guess(nothing, n_ubatch, with_caches, add, has_caches=False)
            self._without_attention |= nothing

    def room(
        self, devices: Sequence[DeviceLimit], n_ctx: int, is_whole: bool, off: Sequence[int], optimistic: bool = False
    ) -> Room:
        """Compute the bytes of weights and caches that ``devices`` may hold.

        A buffer that was not measured for this kind of placement is taken from the other kind.

        Args:
            off: by how many bytes each device's weights and caches were above their estimate when last measured.
            optimistic: take no buffers from the other kind.
        """
        computes = [self._compute(device.name, n_ctx, is_whole, optimistic) for device in devices]
        left = [device.target - less for device, less in zip(devices, off, strict=True)]
        with_caches, with_states, without = (
            tuple(most - compute[kind] for most, compute in zip(left, computes, strict=True)) for kind in range(3)
        )
        return Room(with_caches, with_states, without)

    def _compute(self, device: str, n_ctx: int, is_whole: bool, optimistic: bool) -> tuple[int, int, int]:
        """Estimate a device's compute bytes with attention, with recurrent states alone, and without caches."""
        compute = self._by_kind[is_whole].at(device, n_ctx)
        shared = self.shared.at(device, n_ctx) or 0
        if is_whole:
            states = nothing = None
        else:
            states, nothing = (self._without_attention[cached].at(device, n_ctx) for cached in ("states", "nothing"))
        if compute is None and states is not None:
            compute = states
        elif compute is None:
            other = None if optimistic else self._by_kind[not is_whole].at(device, n_ctx)
            compute = max(shared if other is None else other, nothing or 0)
        elif states is None and not is_whole:
            # the buffer of attention says nothing of it: a guess too low costs a load, one too high is not tried
            states = nothing or shared
        return compute, compute if states is None else states, compute if nothing is None else nothing


def _nothing(device: str, n_ctx: int, has_caches: bool) -> int:
    return 0


def _guess(
    mine: MutableMapping[_K, LearnedCompute],
    n_ubatch: int,
    measured: Sequence[tuple[int, Mapping[_K, LearnedCompute]]],
    more: More,
    *,
    has_caches: bool = True,
) -> None:
    for kind, learned in mine.items():
        known = [(size, other[kind]) for size, other in measured if other[kind].is_measured]
        if learned.is_measured or not known:
            continue
        (near, at_near), *rest = sorted(known, key=lambda pair: abs(pair[0] - n_ubatch))
        far, at_far = rest[0] if rest else (near, at_near)
        mine[kind] = at_near.with_micro_batch(n_ubatch, near, at_far, far, more, has_caches)
