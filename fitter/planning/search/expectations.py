"""Expected plans: context and seconds that devices are likely to give, without a dummy load. Tokens and seconds.

The search asks llama.cpp only about contexts and devices that promise enough here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fitter.planning.placing.placement import Placement, on_host
from fitter.planning.search.proposals import place_fastest, place_whole
from fitter.planning.search.search_state import SearchState


def expected_plan(state: SearchState, n_ctx: int, *, optimistic: bool = False) -> float | None:
    """Estimate the seconds of the best plan on the state's devices; ``None`` where nothing is priced or fits.

    Args:
        n_ctx: the context.
        optimistic: count no compute buffers that were not measured for this kind of plan.
    """
    placement = expected_placement(state, n_ctx, optimistic=optimistic)
    return None if placement is None else state.seconds(placement)


def expected_placement(state: SearchState, n_ctx: int, *, optimistic: bool = False) -> Placement | None:
    """Propose the placement of ``expected_plan``."""
    if not state.can_price:
        return None
    if not state.devices:
        return state.default
    if state.buffers.knows(True) and (whole := _whole_placement(state, n_ctx)):
        return whole
    placement = state.place_partial(state.situation(n_ctx, is_whole=False, optimistic=optimistic))
    if placement is None or not (optimistic or _likely_leaves_host_room(state, placement, n_ctx)):
        return None
    return None if state.loses_pipeline(placement, n_ctx) else placement


def _likely_leaves_host_room(state: SearchState, placement: Placement, n_ctx: int) -> bool:
    """Whether the host is likely to have room for its part of ``placement``, which has weights there."""
    host, others = state.request.host, state.buffers.host_without_layers(n_ctx, is_whole=False)
    if host.paging or host.target is None or others is None:
        return True
    return on_host(state.units(n_ctx), placement) + others <= host.target


def expected_seconds(state: SearchState, n_ctx: int) -> float:
    """Estimate the seconds of the best plan on the state's devices; infinite where none is expected to fit."""
    seconds = expected_plan(state, n_ctx)
    return math.inf if seconds is None else seconds


def expected_whole(state: SearchState, n_ctx: int) -> float:
    """Estimate the seconds with all of the model on devices, 0 without prices; infinite where it cannot be."""
    placement = _whole_placement(state, n_ctx)
    if placement is None:
        return math.inf
    return state.seconds(placement) if state.is_priced else 0.0


def _whole_placement(state: SearchState, n_ctx: int) -> Placement | None:
    if state.is_priced:
        state.prices()
    propose = place_fastest if state.chooses_split else place_whole
    placement = propose(state.situation(n_ctx, is_whole=True))
    return None if placement is None or state.loses_pipeline(placement, n_ctx) else placement


def expected_partial(state: SearchState, n_ctx: int) -> float:
    """Estimate the seconds of ``place_partial``'s proposal; infinite where there is none."""
    placement = state.place_partial(state.situation(n_ctx, is_whole=False))
    return state.seconds(placement) if placement else math.inf


def likely_fits_host(state: SearchState, n_ctx: int) -> bool:
    """Whether the host, pools and devices of other models are likely to hold their part at ``n_ctx``."""
    host, used = state.request.host, state.buffers.host_without_layers(n_ctx, is_whole=True)
    if any((state.buffers.shared.at(device.name, n_ctx) or 0) > device.target for device in state.request.beside):
        return False
    if host.paging:
        return True
    for pool in state.request.pools:
        if (state.buffers.in_pool(pool.name, n_ctx) or 0) > pool.target:
            return False
    return host.target is None or used is None or used <= host.target


def last_true(low: int, high: int, holds: Callable[[int], bool], near: int | None = None) -> int:
    """Find the largest number in [low, high) for which ``holds``, true up to a point. Never asks at ``low``.

    ``near``: a number that is probably close to the answer, which then takes fewer questions.
    """
    step = 1
    while near is not None and low < near < high:
        if holds(near):
            low, near = near, near + step
        else:
            high, near = near, near - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
