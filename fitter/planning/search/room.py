"""What each device has room for, by the compute buffers that were measured so far. Bytes.

A compute buffer depends on what is on a device: on whether all of the model is, and on whether there is a cache, which
attention is computed with. So they are learned apart.
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
    """What each device may hold of weights and caches.

    Compute buffers are larger where attention is computed: there is less room ``with_caches`` than ``without`` any.
    """

    with_caches: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """The room for ``placement``: of each device by whether it has a cache."""
        caches = caches_on(units, placement)
        return [w if cache else o for w, o, cache in zip(self.with_caches, self.without, caches, strict=True)]


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
