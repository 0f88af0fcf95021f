"""A placement that llama.cpp measured, and what it lacks. Bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.request.shared_margin import pools_missing


@dataclass(frozen=True)
class Trial:
    """A placement that llama.cpp measured. ``missing`` pairs a device's or pool's name, or ``host``, with its lack.

    ``seconds`` is the objective as it is estimated, ``None`` where nothing is priced; ``expected`` is what it was
    before llama.cpp counted the graph's splits, which is what to compare a proposal with.
    """

    placement: Placement
    devices: tuple[DeviceLimit, ...]
    params: Params
    breakdown: Breakdown
    missing: tuple[tuple[str, int], ...]
    seconds: float | None = None
    expected: float | None = None

    @property
    def fits(self) -> bool:
        """Whether every device and the host keep their margin."""
        return not self.missing

    @property
    def weights(self) -> int:
        """Bytes of weights on devices."""
        return sum(row.model for row in self.breakdown.rows if not row.is_host)

    @property
    def used(self) -> tuple[tuple[DeviceLimit, ...], Placement]:
        """The devices that llama.cpp was told of, and the placement on those."""
        names = self.params.devices or ()
        kept = [d for d, device in enumerate(self.devices) if device.name in names]
        return tuple(self.devices[d] for d in kept), self.placement.on(kept)

    @property
    def deficit(self) -> int:
        """Bytes missing in all."""
        return sum(missing for _, missing in self.missing)


def missing_of(request: Request, breakdown: Breakdown, devices: Sequence[DeviceLimit]) -> tuple[tuple[str, int], ...]:
    """What each device, the host and each pool lack of their margin, those that lack nothing left out."""
    occupied = {device.name for device in request.beside}
    every = (*devices, *(device for device in request.beside if device not in devices))
    lacks = [(device.name, breakdown.on(device.name).used - device.target) for device in every]
    host, target = breakdown.host, request.host.target
    if target is not None:
        lacks.append(("host", host.used - (host.model if request.host.paging else 0) - target))
    # a device that nothing was put on has nothing to answer for, however little of it is free
    used = occupied | {"host"} | {row.device for row in breakdown.rows if row.used and not row.is_host}
    found = tuple((name, lack) for name, lack in lacks if lack > 0 and name in used)
    return (*found, *((name, lack) for name, lack in pools_missing(request, breakdown) if lack > 0))
