"""Choice of remote devices: a plan leaves them out where their layers take less time elsewhere. Seconds.

A step of ``search_order``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import pinned_devices
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search import choices
from fitter.planning.search.context_choice import best_at
from fitter.planning.search.search_state import SearchState


def worth_their_network(state: SearchState, best: Trial) -> Trial:
    """Leave out remote devices that are not worth their network, as long as the plan gets better."""
    state = state.on(best.devices)
    tested: set[tuple[DeviceLimit, ...]] = set()
    while True:
        current = state.on(best.devices)
        doubtful = next((group for group in _doubtful(current, best.placement) if group not in tested), None)
        if doubtful is None:
            return best
        tested.add(doubtful)
        best = replace(best, seconds=current.seconds(best.placement, best.breakdown))
        trial = best_at(state.on(tuple(device for device in best.devices if device not in doubtful)))
        is_better = rank(trial) > rank(best)
        chosen, other = (trial, best) if is_better else (best, trial)
        if choice := choices.are_remotes_worth_it(doubtful, chosen, other):
            state.callbacks.on_choice(choice)
        best = chosen


def _doubtful(state: SearchState, placement: Placement) -> list[tuple[DeviceLimit, ...]]:
    """List groups of remote devices that a plan may be better without.

    First all that are slower than the host. Then each one whose layers in ``placement`` are estimated to take less time
    elsewhere, the most doubtful first.
    """
    devices, request = state.devices, state.request
    if not state.is_priced or request.fixed & {"devices", "tensor_split", "n_gpu_layers"}:
        return []
    pinned = pinned_devices(request)
    remote = [d for d, device in enumerate(devices) if request.speeds[device.name].is_remote and device not in pinned]
    if not remote:
        return []
    prices = state.prices()
    seconds = [prices.unit_seconds(d) for d in (*range(len(devices)), HOST)]
    slower = tuple(devices[d] for d in remote if _are_slower_than_host(state, (devices[d],)))
    gained: dict[int, float] = {}
    for d, (start, stop) in enumerate(placement.ranges()):
        if d in remote and start < stop:
            there = float_sum(seconds[d][start:stop]) + prices.visits[d]
            gained[d] = there - min(
                float_sum(by_unit[start:stop]) for other, by_unit in enumerate(seconds) if other != d
            )
    one_by_one: list[tuple[DeviceLimit, ...]] = [
        (devices[d],) for d in sorted(gained, key=lambda d: -gained[d]) if gained[d] > 0
    ]
    is_used = any(devices[d] in slower for d in gained)
    return [slower, *(group for group in one_by_one if group != slower)] if is_used else one_by_one


def _are_slower_than_host(state: SearchState, remote: Sequence[DeviceLimit]) -> bool:
    """Whether each of ``remote`` takes longer for the whole model than the host."""
    prices = state.prices()
    on_host = float_sum(prices.unit_seconds(HOST))
    places = [state.devices.index(device) for device in remote]
    return all(float_sum(prices.unit_seconds(d)) + prices.visits[d] > on_host for d in places)
