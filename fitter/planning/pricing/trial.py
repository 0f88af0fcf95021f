"""A trial: a placement that llama.cpp measured with a dummy load, and the memory that it lacks. Bytes.

The search accepts nothing but trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.request.pool_margin import pools_missing
from fitter.planning.request.request import DeviceLimit, Request


@dataclass(frozen=True)
class Trial:
    """A placement that llama.cpp measured.

    Attributes:
        missing: pairs of a device's or pool's name, or ``host``, and the bytes that it lacks.
        seconds: the estimated objective; ``None`` where nothing is priced.
        expected: the estimate before llama.cpp counted the graph's splits. Proposals are compared with this one.
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
    def lost_flash(self) -> bool:
        """Whether llama.cpp turned flash attention off by itself."""
        return self.params.flash_attn == "auto" and self.breakdown.flash_attn is False

    @property
    def weights(self) -> int:
        """Bytes of weights on devices."""
        return sum(row.model for row in self.breakdown.rows if not row.is_host)

    @property
    def used(self) -> tuple[tuple[DeviceLimit, ...], Placement]:
        """The devices that llama.cpp was told of, and the placement on those."""
        names = self.params.devices or ()
        indices = [d for d, device in enumerate(self.devices) if device.name in names]
        return tuple(self.devices[d] for d in indices), self.placement.on(indices)

    @property
    def uses_integrated(self) -> bool:
        """Whether it uses an integrated GPU that llama.cpp does not use by default."""
        return not all(device.is_default for device in self.used[0])

    @property
    def deficit(self) -> int:
        """Bytes missing in all."""
        return sum(missing for _, missing in self.missing)


def missing_of(request: Request, breakdown: Breakdown, devices: Sequence[DeviceLimit]) -> tuple[tuple[str, int], ...]:
    """List the bytes that devices, host and pools lack of their margin. Those that lack nothing are left out."""
    occupied = {device.name for device in request.beside}
    all_devices = (*devices, *(device for device in request.beside if device not in devices))
    lacks = [(device.name, breakdown.on(device.name).used - device.target) for device in all_devices]
    host, target = breakdown.host, request.host.target
    if target is not None:
        lacks.append(("host", host.used - (host.model if request.host.paging else 0) - target))
    # a device with nothing on it lacks nothing, however little of it is free
    used = occupied | {"host"} | {row.device for row in breakdown.rows if row.used and not row.is_host}
    lacks = [(name, lack) for name, lack in lacks if name in used]
    return tuple((name, lack) for name, lack in (*lacks, *pools_missing(request, breakdown)) if lack > 0)
