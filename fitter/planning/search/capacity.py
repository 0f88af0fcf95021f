"""Total capacity of the devices, packing aside: it rules contexts out before a dummy load. Bytes.

Weights and caches are summed over all devices here; ``proposals`` packs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.search_state import SearchState

_TIGHT = 0.95
"""Above this share of the devices' memory, weights and caches are measured at the smallest context first.

Without it Gemma 3 12B on 8 GiB takes 6 loads instead of 4."""


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
