"""Room of each device for weights and caches: its target less its compute buffer, learned from dummy loads. Bytes.

Proposals are packed into it. A compute buffer depends on the placement: whether all of the model is on devices, and
with which caches a device computes. So they are learned apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fitter.llama.types import Breakdown
from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.placement import Placement, gaps_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import SHARED_ROW, DeviceLimit

Cached = Literal["layers", "attention", "states", "nothing"]
"""Caches that a device computes with: of attention, with every layer on a device or some on the host, only recurrent
states, or none.

Without a kind of its own for ``layers`` Gemma 3 12B on a 4090 with two slots of 131,072 tokens takes 22 % longer:
with a layer's cache on the host its buffer is 2.4 GiB instead of 0.6."""

CACHED: tuple[Cached, ...] = ("layers", "attention", "states", "nothing")
"""The kinds of ``Cached``; from ``attention`` on, those with the largest compute buffer first."""

Use = Literal["whole", "layers", "attention", "states", "nothing", "idle"]
"""What a device computes: all of the model is on devices, or else with which caches; ``idle``: without weights, prompts
with the host's weights."""

_USES: tuple[Use, ...] = ("whole", *CACHED, "idle")

_BESIDE = "beside the devices of "


@dataclass(frozen=True)
class Room:
    """Bytes of weights and caches that each device may hold.

    A device that computes attention with layers on the host has the largest compute buffer, and so the least room
    (``with_caches``), one with recurrent states alone more (``with_states``), one ``without`` caches the most.
    ``with_layers``: where no layer is on the host.
    """

    with_layers: tuple[int, ...]
    with_caches: tuple[int, ...]
    with_states: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """Return each device's room in ``placement``, by the caches that it computes with."""
        return [self._with(cached)[d] for d, cached in enumerate(cached_on(units, placement))]

    def behind(self, units: Sequence[Unit], first: int) -> tuple[int, ...]:
        """Return the room of each device where the devices share the layers from ``first`` on."""
        return self._with(cached_on(units, Placement(first, (len(units) - first,)))[0])

    def _with(self, cached: Cached) -> tuple[int, ...]:
        return (self.with_layers, self.with_caches, self.with_states, self.without)[CACHED.index(cached)]


def cached_on(units: Sequence[Unit], placement: Placement) -> list[Cached]:
    """Say for each device with which caches it computes.

    llama.cpp reads a recurrent state before it ends the attention of the layer before. So the device with that state
    computes attention of the last layer on the host too (``ggml_backend_sched_split_graph``).
    """
    cached: list[Cached] = []
    last = next((unit for unit in reversed(units[: placement.first]) if unit.cache), None)
    borrows = last is not None and not last.state
    # with all caches on the host, too, buffers differ where no layer is there
    are_all_alike = not placement.first and not any(unit.cache for unit in units)
    for start, stop in placement.ranges():
        here = [unit for unit in units[start:stop] if unit.cache]
        if (here and borrows and here[0].state) or [unit for unit in here if unit.cache > unit.state]:
            cached.append("attention" if placement.first else "layers")
        elif are_all_alike:
            cached.append("layers")
        else:
            cached.append("states" if here else "nothing")
        borrows &= not here
    return cached


def first_without_attention(units: Sequence[Unit]) -> int:
    """Return the lowest first layer with which devices compute no attention (see ``cached_on``)."""
    attention = max((unit.index for unit in units if unit.cache > unit.state), default=-1)
    return next((unit.index for unit in units[attention + 1 :] if unit.state), attention) + 1


def room_left_by(
    trial: Trial, units: Sequence[Unit], room: Room, off: Sequence[int], devices: Sequence[DeviceLimit] | None = None
) -> Room:
    """Correct ``room`` by the compute buffers of ``trial``, for the devices that it uses.

    ``devices``: the trial's devices, limited where they share memory with the host.
    """
    rooms = [list(room.with_layers), list(room.with_caches), list(room.with_states), list(room.without)]
    cached = cached_on(units, trial.placement)
    for d, device in enumerate(trial.devices if devices is None else devices):
        if d not in trial.placement.idle:
            left, here = device.target - trial.breakdown.on(device.name).compute - off[d], CACHED.index(cached[d])
            # with fewer caches, a device has no less room
            for kind, sizes in enumerate(rooms):
                if "layers" in (CACHED[kind], CACHED[here]):
                    sizes[d] = left if kind == here else sizes[d]
                elif kind < here:
                    sizes[d] = min(left, sizes[d])
                else:
                    sizes[d] = left if kind == here and sizes is not rooms[-1] else max(left, sizes[d])
    return Room(*map(tuple, rooms))


def off_by(trial: Trial, units: Sequence[Unit]) -> list[int]:
    """Compute by how many bytes each device's weights and caches in ``trial`` are above their estimate by ``units``."""
    rows = [trial.breakdown.on(device.name) for device in trial.devices]
    return gaps_of(units, [row.model + row.context for row in rows], trial.placement)


@dataclass
class LearnedCompute:
    """Compute bytes by device and context, for one ``Use``.

    Between measured contexts, and beyond them, it estimates by a line through the two nearest. ``is_guess``: nothing
    was measured.
    """

    _points: dict[str, dict[int, int]] = field(default_factory=dict)
    _corrected: set[tuple[str, int]] = field(default_factory=set)
    is_guess: bool = False

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

    @staticmethod
    def guessed(n_ubatch: int, measured: Sequence[tuple[int, LearnedCompute]]) -> LearnedCompute:
        """Estimate the bytes with a micro batch, by a line through those that were measured with the two nearest ones.

        Where only one was, they are in proportion to the micro batch.
        """
        nearest = sorted(measured, key=lambda pair: abs(pair[0] - n_ubatch))[:2]

        def size(device: str, n_ctx: int) -> int:
            (near, here), *rest = [(n, at) for n, known in nearest if (at := known.at(device, n_ctx)) is not None]
            if not rest:
                return round(here * n_ubatch / near)
            far, there = rest[0]
            return max(0, round(here + (there - here) * (n_ubatch - near) / (far - near)))

        guess = LearnedCompute(is_guess=True)
        for _, known in nearest:
            for device, points in known._points.items():
                guess._points.setdefault(device, {}).update({n_ctx: size(device, n_ctx) for n_ctx in points})
        return guess


class Buffers:
    """Compute buffers of devices by their use. The host's and pools' bytes are learned with ``whole`` or ``attention``.

    ``shared`` is memory that others than the model use: it does not depend on the placement.
    """

    def __init__(self, shared: LearnedCompute | None = None) -> None:
        self.shared = LearnedCompute() if shared is None else shared
        self._learned: dict[Use, LearnedCompute] = {use: LearnedCompute() for use in _USES}

    def _of(self, is_whole: bool) -> LearnedCompute:
        return self._learned["whole" if is_whole else "attention"]

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured on these devices."""
        return self.knows(True) or self.knows(False)

    def knows(self, is_whole: bool) -> bool:
        """Whether a placement of this kind was measured, with this micro batch or another."""
        return self._of(is_whole).knows_any

    def has_measured(self, is_whole: bool) -> bool:
        """Whether a placement of this kind was measured."""
        return self._of(is_whole).is_measured

    def learn(
        self,
        breakdown: Breakdown,
        n_ctx: int,
        is_whole: bool,
        used: Mapping[str, Use],
        layers_on_host: int | None = 0,
        pools: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Learn a measurement.

        Args:
            used: devices that compute, and what each computes.
            layers_on_host: bytes of weights and caches of layers that the host has; ``None`` if no sizes are known.
            pools: bytes in use of each memory pool: all of them, and those that are not its devices'.
        """
        for name, cached in used.items():
            self._learned["whole" if is_whole else cached].learn(name, n_ctx, breakdown.on(name).compute)
        if layers_on_host is not None:
            self._of(is_whole).learn("host", n_ctx, breakdown.host.used - layers_on_host)
        for name, (total, not_on_devices) in (pools or {}).items():
            self._of(is_whole).learn(name, n_ctx, total)
            self._of(is_whole).learn(_BESIDE + name, n_ctx, not_on_devices)
        for row in breakdown.rows:
            if row.buffer_type == SHARED_ROW and row.device is not None:
                self.shared.learn(row.device, n_ctx, row.used)

    def forget_partial(self) -> None:
        """Forget the buffers of placements that are not whole."""
        self._learned["attention"] = LearnedCompute()

    def share_whole(self, other: Buffers) -> None:
        """Learn the buffers of whole placements together with ``other``."""
        self._learned["whole"] = other._learned["whole"]

    def host_without_layers(self, n_ctx: int, is_whole: bool) -> int | None:
        """Estimate the host's bytes without weights and caches of layers; ``None`` before a measurement."""
        return self._of(is_whole).at("host", n_ctx)

    def idle(self, device: str, n_ctx: int) -> int | None:
        """Estimate the compute bytes of the first device without weights; ``None`` before a measurement."""
        return self._learned["idle"].at(device, n_ctx)

    def beside_devices(self, pool: str, n_ctx: int, is_whole: bool) -> int | None:
        """Estimate the bytes of a pool that are not its devices'; ``None`` before a measurement."""
        return self._of(is_whole).at(_BESIDE + pool, n_ctx)

    def in_pool(self, pool: str, n_ctx: int) -> int | None:
        """Estimate the least bytes that a pool holds in all; ``None`` before a measurement."""
        sizes = [self._of(is_whole).at(pool, n_ctx) for is_whole in (True, False)]
        return min((size for size in sizes if size is not None), default=None)

    def take_over(self, other: Buffers, renamed: Mapping[str, str]) -> None:
        """Copy all buffers of ``other`` but the shared ones, with devices renamed."""
        self._learned = {use: learned.copy(renamed) for use, learned in other._learned.items()}

    def guess(self, n_ubatch: int, measured: Mapping[int, Buffers]) -> None:
        """Estimate the buffers that were not measured, but the shared ones, from those with the two nearest ones."""
        for use, learned in self._learned.items():
            known = [(size, other._learned[use]) for size, other in measured.items() if other._learned[use].is_measured]
            if known and not learned.is_measured:
                self._learned[use] = LearnedCompute.guessed(n_ubatch, known)

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
        kinds = range(len(CACHED))
        return Room(*(tuple(most - compute[k] for most, compute in zip(left, computes, strict=True)) for k in kinds))

    def _compute(self, device: str, n_ctx: int, is_whole: bool, optimistic: bool) -> tuple[int, ...]:
        """Estimate a device's compute bytes for each kind of caches."""
        whole, layers, compute, states, nothing = (self._learned[use].at(device, n_ctx) for use in _USES[:-1])
        shared = self.shared.at(device, n_ctx) or 0
        if is_whole:
            known = layers if compute is None else compute
            other = whole if whole is not None else None if optimistic else known
            return (shared if other is None else other,) * len(CACHED)
        other = shared if optimistic or whole is None else whole
        if compute is None and states is not None:
            compute = states
        elif compute is None:
            compute = max(other if layers is None else layers, nothing or 0)
        elif states is None:
            # the buffer of attention says nothing of it: a guess too low costs a load, one too high is not tried
            states = nothing or shared
        # nor does it of the buffer with all layers on devices
        if layers is None:
            layers = compute if whole is None and not optimistic else min(other, compute)
        return layers, compute, compute if states is None else states, compute if nothing is None else nothing
