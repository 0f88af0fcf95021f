"""What the devices hold in total, packing aside: which contexts are beyond them, and which need not be asked. Bytes."""

from __future__ import annotations

from collections.abc import Sequence

from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.search_state import SearchState

_TIGHT = 0.95
"""Share of the devices' memory from which weights and caches are asked about at the smallest context first."""


def total_target(state: SearchState) -> int:
    """The most that a plan may use of all devices."""
    return sum(max(0, device.target) for device in state.devices)


def is_too_large(state: SearchState, n_ctx: int) -> bool:
    """Whether all layers with their caches are more than all devices hold, compute buffers left out."""
    # a model that looks as if it fitted is better asked about at once
    if not state.devices or state.request.model_bytes <= total_target(state):
        return False
    return _weights_and_caches(state, n_ctx) > total_target(state)


def is_tight(state: SearchState, n_ctx: int) -> bool:
    """Whether all layers with their caches leave next to nothing for compute buffers."""
    if not state.devices or state.request.model_bytes <= _TIGHT * total_target(state):
        return False
    return _weights_and_caches(state, n_ctx) > _TIGHT * total_target(state)


def _weights_and_caches(state: SearchState, n_ctx: int) -> int:
    return sum(unit.weights + unit.cache for unit in state.units(n_ctx)[state.default.first :])


def total_used(state: SearchState, trial: Trial, computing: Sequence[DeviceLimit]) -> int:
    """Bytes of weights and caches on all devices, and of compute buffers on those that are ``computing``."""
    rows = [trial.breakdown.on(device.name) for device in state.devices]
    compute = sum(trial.breakdown.on(device.name).compute for device in computing)
    return sum(row.model + row.context for row in rows) + compute


def context_in_total(state: SearchState, top: Trial, bottom: Trial) -> int:
    """The context that the devices' memory holds in total, packing aside; on one device packing is all there is.

    Upstream's fit (``common_params_fit_impl``) settles on that context before it places a layer, and leaves half a
    layer per device (a sixth of one with experts) for what packing wastes. Weights leave the devices for no more.
    ``top`` and ``bottom`` are trials at the largest and the smallest context.
    """
    # a device adds nothing that has less than packing wastes and its own compute buffer take
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
