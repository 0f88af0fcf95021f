"""Notes on the devices that a plan leaves idle, each with the reason. Bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import WORTH_SHARING
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import user_chose_split
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search.expectations import expected_seconds
from fitter.planning.search.search_state import SearchState
from fitter.text import mib, mib_up


def idle_notes(state: SearchState, best: Trial, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Name the devices that have nothing of the model in ``best``, a line for each reason.

    Args:
        state: The search of the variant of ``best``, on its devices.
        trials: All trials that fit.
    """
    request = state.request
    wants_none = "n_gpu_layers" in request.fixed and request.params.n_gpu_layers == 0
    if user_chose_split(request) or wants_none or best.seconds is None:
        return ()
    rows = {device: best.breakdown.on(device.name) for device in request.devices}
    idle = [device for device, row in rows.items() if not row.model + row.context]
    used = [device for device in request.devices if device not in idle]
    compute = min((rows[device].compute for device in used), default=0)
    groups: dict[tuple[bool, str], list[str]] = {}
    for device in idle:
        reason = _reason(state, best, trials, device, compute)
        groups.setdefault((rows[device].compute > 0, reason), []).append(device.name)
    return tuple(_said(names, has_buffer, reason) for (has_buffer, reason), names in groups.items())


def _said(names: Sequence[str], has_buffer: bool, reason: str) -> str:
    """Say why devices have nothing of the model; one with a compute buffer computes prompts with the host's weights."""
    ending = "s" if len(names) == 1 else ""
    does = f"only compute{ending} prompts" if has_buffer else f"stay{ending} idle"
    return f"{', '.join(names)} {does}: {reason}"


def _reason(state: SearchState, best: Trial, trials: Sequence[Trial], device: DeviceLimit, compute: int) -> str:
    if device.target <= 0:
        return (
            f"of {mib(device.total)} MiB, {mib(device.free)} MiB are free, and {mib(device.margin)} MiB must stay free"
        )
    units = state.units(best.params.n_ctx)
    needed = compute + min(unit.weights + unit.cache for unit in units)
    if device.target < needed:
        return (
            f"{mib(device.target)} MiB beyond the margin are less than a compute buffer and a layer, about "
            f"{mib_up(needed)} MiB"
        )
    assert best.seconds is not None
    unified = "" if device.is_default else "it shares the host's memory, and "
    measured = [
        trial.seconds
        for trial in trials
        if trial.params.n_ctx == best.params.n_ctx and trial.seconds and trial.breakdown.on(device.name).model
    ]
    seconds = min(measured) if measured else _expected(state, best, device)
    if math.isinf(seconds) or (not measured and seconds < best.seconds * (1 - WORTH_SHARING)):
        # a plan so much quicker would have been found, so it was tried, and its buffers had no room
        params, is_users = best.params, state.request.fixed & {"n_batch", "n_ubatch"}
        buffers = f": a micro batch of {params.n_ubatch} tokens has large compute buffers (-ub, -b)" if is_users else ""
        return f"{unified}no plan with it {'fits' if buffers else 'is expected to fit'}{buffers}"
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2
    after, before = (f"{each:.{digits}f} s" for each in (seconds, best.seconds))
    if after == before or seconds < best.seconds:
        gain = "no" if after == before else "too little"
        return f"{unified}a layer there saves {gain} time ({after} instead of {before})"
    return f"{unified}with a layer there the request would take about {after} instead of {before}"


def _expected(state: SearchState, best: Trial, device: DeviceLimit) -> float:
    """Estimate the seconds of a plan with ``device``, too: where all layers are on devices, with the last one there."""
    used, placement = best.used
    wider = state.on((*used, device)).with_buffers_of(state)
    counts = dict(zip(used, placement.counts, strict=True))
    last = next((each for each in reversed(used) if counts[each]), None)
    if placement.is_spilled or last is None:
        return expected_seconds(wider, best.params.n_ctx)
    counts |= {last: counts[last] - 1, device: 1}
    # the user's devices stay, those that have nothing too
    return wider.seconds(Placement(placement.first, tuple(counts.get(each, 0) for each in wider.devices)))
