"""Room for what a real load takes beyond llama.cpp's dummy load. Bytes.

A dummy load's compute buffers are those of one graph, without the devices that its builder chose for single nodes. A
real load may need more on any device, and on the host. A plan says the dummy load's figure, as llama-fit-params does,
but is to keep its margins with the larger of both. The larger one is known only of the user's own file, at the end of a
search: where a margin is short then, margins are raised by the difference, and the search is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fitter.llama.types import Breakdown
from fitter.planning.request import DeviceLimit, Request
from fitter.planning.trial import missing_of

HOST = "host"
MOST_ROUNDS = 4
"""How often a search is made again at most. Once was enough in all cases tried."""


def room_for(request: Request, breakdown: Breakdown) -> dict[str, int]:
    """By the name of a device, or ``host``, what ``breakdown`` needs beside the margins when it is loaded for real.

    Empty where every margin is kept. Which devices need more changes with the placement, so all get what the most needy
    one does.
    """
    most = breakdown.most
    if not missing_of(request, most, request.devices):
        return {}
    found = {device.name: most.on(device.name).used - breakdown.on(device.name).used for device in request.devices}
    return {**dict.fromkeys(found, max(found.values(), default=0)), HOST: most.host.used - breakdown.host.used}


def with_room(request: Request, room: Mapping[str, int]) -> Request:
    """``request`` with margins that are larger by ``room``."""

    def raised(device: DeviceLimit) -> DeviceLimit:
        return replace(device, margin=device.margin + room.get(device.name, 0))

    return replace(
        request,
        devices=tuple(map(raised, request.devices)),
        beside=tuple(map(raised, request.beside)),
        host=replace(request.host, margin=request.host.margin + room.get(HOST, 0)),
    )
