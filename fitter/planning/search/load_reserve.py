"""Room for what a real load takes beyond llama.cpp's dummy load. Bytes.

A dummy load's compute buffers are those of one graph, without the devices that its builder chose for single nodes. A
real load may need more on any device, and on the host. Margins are kept by the dummy load's figure, as upstream's fit
keeps them, and the difference is a part of what they are for. It must not exceed them: with the larger figure of both,
everything is to have room in what is free. That one is known only of the user's own file, at the end of a search:
room is short then, margins are raised to the difference, and the search is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.pricing.trial import missing_of
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.request.shared_margin import used_of
from fitter.planning.search import scratch


def reserve_for(request: Request, breakdown: Breakdown, params: Params) -> dict[str, int]:
    """By the name of a device, or ``host``, what ``breakdown`` of ``params`` takes beyond itself when it is loaded.

    Empty where that has room in what is free. Which devices need more changes with the placement, so all get what the
    most needy one does.
    """
    scores = scratch.scores_of(request, params, breakdown)
    without_margins = _with_margins(request, lambda margin, name: 0)
    most = _with_scratch(breakdown.most, {name: size + scratch.others() for name, size in scores.items()})
    if not missing_of(without_margins, most, without_margins.devices):
        return {}
    real = breakdown.most
    found = {device.name: real.on(device.name).used - breakdown.on(device.name).used for device in request.devices}
    largest = max(found.values(), default=0)
    if scores:
        largest += math.ceil(max(scores.values()) * _shorter(request, breakdown, scores)) + scratch.others()
    more = {HOST_NAME: real.host.used - breakdown.host.used}
    for pool in request.pools:
        before, after = (used_of(pool, each, request.model_bytes) for each in (breakdown, real))
        more[pool.name] = after - before + sum(scores.get(name, 0) for name in pool.devices)
    return {**dict.fromkeys(found, largest), **more}


def _with_scratch(breakdown: Breakdown, sizes: Mapping[str, int]) -> Breakdown:
    rows = (Row("not counted", name, False, 0, 0, size) for name, size in sizes.items())
    return replace(breakdown, rows=(*breakdown.rows, *rows))


def _shorter(request: Request, breakdown: Breakdown, scores: Mapping[str, int]) -> float:
    """At which share of its context there is room for scratch memory, which shrinks as well; 1 where it is fixed.

    Of the compute buffer, only a part does: with more of it the share would be smaller, and too little be left free.
    """
    if "n_ctx" in request.fixed or breakdown.n_ctx <= request.n_ctx_min:
        return 1.0
    shares = [1.0]
    for device in request.devices:
        if size := scores.get(device.name):
            used = breakdown.on(device.name)
            shrinking = used.context + used.compute
            left = device.free - used.used - scratch.others()
            shares.append((shrinking + left) / (shrinking + size))
    return max(min(shares), request.n_ctx_min / breakdown.n_ctx)


def with_reserve(request: Request, room: Mapping[str, int]) -> Request:
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
        pools=tuple(replace(pool, margin=margin(pool.margin, pool.name)) for pool in request.pools),
    )
