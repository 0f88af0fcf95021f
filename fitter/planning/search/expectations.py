"""Expected plans: context and seconds that devices are likely to give, without a dummy load. Tokens, seconds, bytes.

The search asks llama.cpp only about contexts and devices that promise enough here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fitter.planning.placing.placement import Placement, on_host
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.proposals import place_whole
from fitter.planning.search.search_state import SearchState

_TIGHT = 0.95
"""Above this share of the devices' memory, weights and caches are measured at the smallest context first.

Without it Gemma 3 12B on 8 GiB takes 6 loads instead of 4."""


def expected_placement(state: SearchState, n_ctx: int, *, optimistic: bool = False) -> Placement | None:
    """Propose the best placement on the state's devices; ``None`` where nothing is priced or fits.

    Args:
        n_ctx: the context.
        optimistic: count no compute buffers that were not measured for this kind of plan.
    """
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


def expected_seconds(state: SearchState, n_ctx: int, *, optimistic: bool = False) -> float:
    """Estimate the seconds of ``expected_placement``; infinite where nothing is priced or fits."""
    placement = expected_placement(state, n_ctx, optimistic=optimistic)
    return math.inf if placement is None else state.seconds(placement)


def expected_whole(state: SearchState, n_ctx: int) -> float:
    """Estimate the seconds with all of the model on devices, 0 without prices; infinite where it cannot be."""
    placement = _whole_placement(state, n_ctx)
    if placement is None:
        return math.inf
    return state.seconds(placement) if state.is_priced else 0.0


def _whole_placement(state: SearchState, n_ctx: int) -> Placement | None:
    if state.is_priced:
        state.prices()
    placement = place_whole(state.situation(n_ctx, is_whole=True))
    return None if placement is None or state.loses_pipeline(placement, n_ctx) else placement


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


def total_target(state: SearchState) -> int:
    """Add up the bytes that a plan may use of all devices."""
    return sum(max(0, device.target) for device in state.open)


def is_too_large(state: SearchState, n_ctx: int) -> bool:
    """Whether all layers with their caches are larger than all devices, without compute buffers."""
    return _exceeds(state, n_ctx, total_target(state))


def is_tight(state: SearchState, n_ctx: int) -> bool:
    """Whether all layers with their caches leave next to nothing for compute buffers."""
    return _exceeds(state, n_ctx, _TIGHT * total_target(state))


def _exceeds(state: SearchState, n_ctx: int, size: float) -> bool:
    # no sizes are recorded for a model that looks as if it fitted: a dummy load tells at once
    if not state.devices or state.request.model_bytes <= size:
        return False
    return sum(unit.weights + unit.cache for unit in state.units(n_ctx)[state.default.first :]) > size


def total_used(state: SearchState, trial: Trial, computing: Sequence[DeviceLimit]) -> int:
    """Add up weights and caches on all devices, and compute buffers on the ``computing`` ones."""
    rows = [trial.breakdown.on(device.name) for device in state.devices]
    compute = sum(trial.breakdown.on(device.name).compute for device in computing)
    return sum(row.model + row.context for row in rows) + compute


def context_in_total(state: SearchState, top: Trial, bottom: Trial) -> int:
    """Find the context that the devices' memory holds in total, packing aside. On one device: the smallest context.

    Upstream's fit (``common_params_fit_impl``) chooses that context before it places a layer. It leaves half a layer
    for each device (a sixth of a layer with experts) to the waste of packing. For a longer context no weights leave the
    devices.

    Args:
        top, bottom: trials at the largest and the smallest context.
    """
    # a device smaller than the waste and its own compute buffer adds nothing
    by_size = sorted(state.devices, key=lambda device: -device.target)
    return max(_in_total(state, top, bottom, by_size[:n]) for n in range(1, len(by_size) + 1))


def _in_total(state: SearchState, top: Trial, bottom: Trial, devices: Sequence[DeviceLimit]) -> int:
    request = state.request
    low, high = request.n_ctx_min, request.n_ctx_max
    if len(devices) < 2:
        return low
    room = sum(device.target for device in devices)
    used_top, used_bottom = (total_used(state, trial, devices) for trial in (top, bottom))
    if used_top <= room:
        return high
    waste = top.weights // max(1, request.n_layer) // (6 if request.is_expert_model else 2)
    room -= (len(devices) + 1) * waste
    if room <= used_bottom or used_top <= used_bottom:
        return low
    n_ctx = low + (high - low) * (room - used_bottom) // (used_top - used_bottom)
    return max(low, n_ctx - n_ctx % request.alignment)


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
