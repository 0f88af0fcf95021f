"""Expected plans: context and seconds that devices are likely to give, without a dummy load. Tokens and seconds.

The search asks llama.cpp only about contexts and devices that promise enough here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fitter.planning.pricing.objective import beats
from fitter.planning.pricing.trial import Trial
from fitter.planning.search.proposals import place_fastest, place_whole
from fitter.planning.search.search_state import SearchState


def expected_plan(state: SearchState, best: Trial, *, optimistic: bool = False) -> tuple[int, float] | None:
    """Estimate context and seconds of the best plan on the state's devices; ``None`` where nothing is priced.

    Args:
        best: a trial on other devices. The same kind of plan is expected here.
        optimistic: count no compute buffers that were not measured for this kind of plan.
    """
    if not state.can_price:
        return None
    on_devices = _expected_whole(state, best)
    n_ctx = max(state.smallest_context, best.params.n_ctx)
    if on_devices is not None and on_devices[0] >= n_ctx:
        return on_devices
    spread = spill_styles(state, n_ctx)[0]
    placement = state.place_partial(state.situation(n_ctx, state.room(n_ctx, False, optimistic)), spread)
    spilled = None if placement is None else (n_ctx, state.seconds(placement))
    if on_devices is None or spilled is None:
        return on_devices or spilled
    return on_devices if beats(state.request, on_devices, spilled) else spilled


def _expected_whole(state: SearchState, best: Trial) -> tuple[int, float] | None:
    """Estimate the plan with all of the model on devices; ``None`` where it is not likely to fit."""
    if not state.buffers.knows(True):
        return None
    request, low = state.request, state.smallest_context
    n_ctx, step = best.params.n_ctx, request.alignment
    if "n_ctx" not in request.fixed:
        top = -(-request.n_ctx_max // step)
        n_ctx = step * last_true(low // step, top + 1, lambda n: likely_fits_whole(state, n * step))
        n_ctx = max(low, min(n_ctx, request.n_ctx_max))
    state.prices()
    propose = place_fastest if state.chooses_devices else place_whole
    placement = propose(state.situation(n_ctx, state.room(n_ctx, True)))
    return None if placement is None else (n_ctx, state.seconds(placement))


def expected_partial(state: SearchState, n_ctx: int, spread: bool, *, is_plain: bool = False) -> float:
    """Estimate the seconds of ``place_partial``'s proposal; infinite where there is none."""
    at = state.situation(n_ctx, state.room(n_ctx, False))
    placement = state.place_partial(at, spread, is_plain=is_plain)
    return state.seconds(placement) if placement else math.inf


def spill_styles(state: SearchState, n_ctx: int, *, is_plain: bool = False) -> list[bool]:
    """List the ways to spill, the more promising first: single tensors of any layer (``True``), or whole layers."""
    request = state.request
    # experts apart from a remote device's layer cost another trip over the network
    is_far = state.is_priced and any(map(state.prices().is_remote, range(len(state.devices))))
    is_settled = request.is_expert_model and not is_far
    if not state.is_priced or is_settled or request.fixed & {"n_gpu_layers", "tensor_split"}:
        return [request.is_expert_model]
    seconds = {spread: expected_partial(state, n_ctx, spread, is_plain=is_plain) for spread in (False, True)}
    return sorted(seconds, key=lambda spread: seconds[spread])


def likely_fits_whole(state: SearchState, n_ctx: int) -> bool:
    """Whether the whole model is likely to fit on devices at ``n_ctx``."""
    return likely_fits_host(state, n_ctx) and place_whole(state.situation(n_ctx, state.room(n_ctx, True))) is not None


def likely_fits_host(state: SearchState, n_ctx: int) -> bool:
    """Whether the host, pools and devices of other models are likely to hold their part at ``n_ctx``."""
    host, used = state.request.host, state.buffers.on_host(n_ctx)
    if any((state.buffers.shared.at(device.name, n_ctx) or 0) > device.target for device in state.request.beside):
        return False
    if host.paging:
        return True
    for pool in state.request.pools:
        if (state.buffers.in_pool(pool.name, n_ctx) or 0) > pool.target:
            return False
    return host.target is None or used is None or used <= host.target


def last_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Find the largest number in [low, high) for which ``holds``, true up to a point. Never asks at ``low``."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
