"""Reserve for real loads, which need more memory than llama.cpp's dummy loads. Bytes.

A dummy load's compute buffers are for one graph, without the devices that its builder chose for single nodes. A real
load may need more on any device, and on the host. Margins are kept by the dummy load's size, as in upstream's fit; the
difference may use them up, but no more. It is known at the end of a search, of the confirmed plan. If it exceeds
a margin, margins are raised to it, and the search is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.pricing.trial import missing_of
from fitter.planning.request.pool_margin import used_of
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.search import scratch


def reserve_for(request: Request, breakdown: Breakdown, params: Params) -> dict[str, int]:
    """Compute the extra bytes that a real load needs over the dummy load, by device, pool, or ``host``.

    Empty where the free memory holds them. Which devices need more changes with the placement, so all get the largest
    reserve of any.
    """
    scores = scratch.scores_of(request, params, breakdown)
    without_margins = _with_margins(request, lambda margin, name: 0)
    most = _with_scratch(breakdown.most, {name: size + scratch.others() for name, size in scores.items()})
    if not missing_of(without_margins, most, without_margins.devices):
        return {}
    real = breakdown.most
    extra = {device.name: real.on(device.name).used - breakdown.on(device.name).used for device in request.devices}
    largest = max(extra.values(), default=0)
    if scores:
        largest += math.ceil(max(scores.values()) * _context_share(request, breakdown, scores)) + scratch.others()
    reserve = {**dict.fromkeys(extra, largest), HOST_NAME: real.host.used - breakdown.host.used}
    for pool in request.pools:
        dummy_used, real_used = (used_of(pool, rows, request.model_bytes) for rows in (breakdown, real))
        reserve[pool.name] = real_used - dummy_used + sum(scores.get(name, 0) for name in pool.devices)
    return reserve


def _with_scratch(breakdown: Breakdown, sizes: Mapping[str, int]) -> Breakdown:
    rows = (Row("not counted", name, False, 0, 0, size) for name, size in sizes.items())
    return replace(breakdown, rows=(*breakdown.rows, *rows))


def _context_share(request: Request, breakdown: Breakdown, scores: Mapping[str, int]) -> float:
    """Estimate the share of the context at which scratch memory has room, since it shrinks too; 1 for a fixed context.

    Only a part of the compute buffer shrinks with the context, but all of it is counted here: a smaller share would
    leave too little free.
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


def with_reserve(request: Request, reserve: Mapping[str, int]) -> Request:
    """Raise the margins of ``request`` to at least ``reserve``."""
    return _with_margins(request, lambda margin, name: max(margin, reserve.get(name, 0)))


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
