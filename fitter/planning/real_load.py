"""Room for what a real load takes beyond llama.cpp's dummy load. Bytes.

A dummy load's compute buffers are those of one graph, without the devices that its builder chose for single nodes. A
real load may need more on any device, and on the host. Margins are kept by the dummy load's figure, as upstream's fit
keeps them, and the difference is a part of what they are for. It must not exceed them: with the larger figure of both,
everything is to have room in what is free. That one is known only of the user's own file, at the end of a search: where
room is short then, margins are raised to the difference, and the search is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fitter.llama.types import Breakdown
from fitter.planning.request import DeviceLimit, Request
from fitter.planning.shared import HOST_NAME
from fitter.planning.trial import missing_of


def room_for(request: Request, breakdown: Breakdown) -> dict[str, int]:
    """By the name of a device, or ``host``, what ``breakdown`` takes beyond itself when it is loaded for real.

    Empty where that has room in what is free. Which devices need more changes with the placement, so all get what the
    most needy one does.
    """
    most, without_margins = breakdown.most, _with_margins(request, lambda margin, name: 0)
    if not missing_of(without_margins, most, without_margins.devices):
        return {}
    found = {device.name: most.on(device.name).used - breakdown.on(device.name).used for device in request.devices}
    return {**dict.fromkeys(found, max(found.values(), default=0)), HOST_NAME: most.host.used - breakdown.host.used}


def with_room(request: Request, room: Mapping[str, int]) -> Request:
    """``request`` with margins of ``room`` at least."""
    return _with_margins(request, lambda margin, name: max(margin, room.get(name, 0)))


def _with_margins(request: Request, margin: Callable[[int, str], int]) -> Request:
    def changed(device: DeviceLimit) -> DeviceLimit:
        return replace(device, margin=margin(device.margin, device.name))

    return replace(
        request,
        devices=tuple(map(changed, request.devices)),
        beside=tuple(map(changed, request.beside)),
        host=replace(request.host, margin=margin(request.host.margin, HOST_NAME)),
    )
