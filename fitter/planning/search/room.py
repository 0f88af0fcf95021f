"""Room of each device for weights and caches: its target less its compute buffer. Bytes.

Proposals are packed into it. ``compute_buffers`` estimates the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.placement import Placement, caches_on, weights_on
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit


@dataclass(frozen=True)
class Room:
    """Bytes of weights and caches that each device may hold.

    A device with a cache computes attention, for which its compute buffer is larger: it has less room ``with_caches``
    than ``without``.
    """

    with_caches: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """Return each device's room in ``placement``, with or without a cache."""
        caches = caches_on(units, placement)
        rooms = zip(caches, self.with_caches, self.without, strict=True)
        return [with_cache if cache else without for cache, with_cache, without in rooms]


def room_left_by(
    trial: Trial, units: Sequence[Unit], room: Room, off: Sequence[int], devices: Sequence[DeviceLimit] | None = None
) -> Room:
    """Correct ``room`` by the compute buffers of ``trial``, for the devices that it uses.

    ``devices``: the trial's devices, limited where they share memory with the host.
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
    """Compute by how many bytes each device's weights and caches in ``trial`` are above their estimate by ``units``."""
    off = []
    weights_and_caches = zip(weights_on(units, trial.placement), caches_on(units, trial.placement), strict=True)
    for device, (weights, cache) in zip(trial.devices, weights_and_caches, strict=True):
        row = trial.breakdown.on(device.name)
        off.append(row.model + row.context - weights - cache)
    return off
