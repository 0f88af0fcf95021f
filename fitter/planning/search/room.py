"""Room of each device for weights and caches: its target less its compute buffer. Bytes.

Proposals are packed into it. ``compute_buffers`` estimates the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.placement import Placement, gaps_of
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit

Cached = Literal["attention", "states", "nothing"]
"""Caches that a device computes with: of attention, only recurrent states, or none."""


@dataclass(frozen=True)
class Room:
    """Bytes of weights and caches that each device may hold.

    A device that computes attention has the largest compute buffer, and so the least room (``with_caches``), one with
    recurrent states alone more (``with_states``), one ``without`` caches the most.
    """

    with_caches: tuple[int, ...]
    with_states: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """Return each device's room in ``placement``, by the caches that it computes with."""
        return [self._with(cached)[d] for d, cached in enumerate(cached_on(units, placement))]

    def behind(self, units: Sequence[Unit], first: int) -> tuple[int, ...]:
        """Return the room of each device where the devices share the layers from ``first`` on."""
        return self._with(cached_on(units, Placement(first, (len(units) - first,)))[0])

    def without_devices(self, are_closed: Sequence[bool]) -> Room:
        """Return the room with none on closed devices."""
        kinds = (self.with_caches, self.with_states, self.without)
        return Room(*(tuple(min(0, b) if c else b for b, c in zip(kind, are_closed, strict=True)) for kind in kinds))

    def _with(self, cached: Cached) -> tuple[int, ...]:
        return {"attention": self.with_caches, "states": self.with_states, "nothing": self.without}[cached]


def cached_on(units: Sequence[Unit], placement: Placement) -> list[Cached]:
    """Say for each device with which caches it computes.

    llama.cpp reads a recurrent state before it ends the attention of the layer before. So the device with that state
    computes attention of the last layer on the host too (``ggml_backend_sched_split_graph``).
    """
    cached: list[Cached] = []
    last = next((unit for unit in reversed(units[: placement.first]) if unit.cache), None)
    borrows = last is not None and not last.state
    for start, stop in placement.ranges():
        here = [unit for unit in units[start:stop] if unit.cache]
        if (here and borrows and here[0].state) or [unit for unit in here if unit.cache > unit.state]:
            cached.append("attention")
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
    with_caches, with_states, without = map(list, (room.with_caches, room.with_states, room.without))
    cached = cached_on(units, trial.placement)
    for d, device in enumerate(trial.devices if devices is None else devices):
        if d not in trial.placement.idle:
            left = device.target - trial.breakdown.on(device.name).compute - off[d]
            without[d] = max(left, without[d])
            with_caches[d] = left if cached[d] == "attention" else min(with_caches[d], left)
            if cached[d] == "nothing":
                with_states[d] = min(with_states[d], left)
            else:
                with_states[d] = left if cached[d] == "states" else max(left, with_states[d])
    return Room(tuple(with_caches), tuple(with_states), tuple(without))


def off_by(trial: Trial, units: Sequence[Unit]) -> list[int]:
    """Compute by how many bytes each device's weights and caches in ``trial`` are above their estimate by ``units``."""
    rows = [trial.breakdown.on(device.name) for device in trial.devices]
    return gaps_of(units, [row.model + row.context for row in rows], trial.placement)
