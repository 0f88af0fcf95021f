"""Choice of the devices of a plan and their order: fewer, others, or another first one, where that may be better.

Steps of ``search_order``. ``context_choice`` finds the best trial on each choice of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Layout, Params
from fitter.planning.pricing.objective import WORTH_SHARING, is_worth_a_load, rank
from fitter.planning.pricing.pricing import bound_of, host_only_everywhere
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import needs_devices, pinned_devices, user_chose_devices, user_chose_split
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search import choices
from fitter.planning.search.capacity import is_too_large
from fitter.planning.search.context_choice import best_at
from fitter.planning.search.expectations import expected_partial, expected_plan
from fitter.planning.search.search_state import CutShort, SearchState
from fitter.planning.speed.explain import FAR
from fitter.planning.speed.work import resized_layout

_SLOW = 0.7
"""A device with less than this share of the fastest one's bandwidth is slow.

With none, Qwen3 235B on an RTX 5090 and a GTX 1080 Ti takes 32 % longer for a prompt of 30,000 tokens."""

_MAX_FOR_LAST = 3
"""So many devices, the fastest first, are tested with the last layer alone.

With one, GLM-4.5 Air on three nearly full Arc Pro B60 (machine 102 of ``tools.search``) takes 1.9 times as long."""


def in_better_order(state: SearchState) -> SearchState:
    """Put the device first that streams weights of the host fastest, where that is estimated faster.

    In prompts, llama.cpp has the first device compute with the host's weights, over its own link (``op_offload``).
    """
    devices, n_ctx = state.devices, state.smallest_context
    if not state.chooses_devices or not is_too_large(state, n_ctx):
        return state
    prices = state.prices()
    # a remote device never computes with them, so its place does not matter
    local = [d for d in range(len(devices)) if not prices.is_remote(d)]
    remote = [d for d in range(len(devices)) if d not in local]
    seconds = {d: prices.streaming(d) for d in local}
    if not local or not is_worth_a_load(min(seconds.values()), seconds[local[0]]):
        return state
    first = min(local, key=lambda d: seconds[d])
    others = [d for d in local if d != first]
    reordered = state.on(tuple(devices[d] for d in (*remote, first, *others)))
    before, after = (expected_partial(order, n_ctx) for order in (state, reordered))
    if not is_worth_a_load(after, before):
        return state
    state.callbacks.on_choice(choices.which_device_is_first(devices[first], after, devices[local[0]], before))
    return reordered


class Devices:
    """The tested choices of devices, with the state of the search and the best trial on each.

    Args:
        state: the search on all devices that llama.cpp uses by default.
        others: further devices, which ``on_others`` may add.
    """

    def __init__(self, state: SearchState, others: Sequence[DeviceLimit] = ()) -> None:
        self._request = state.original_request
        self._first = state
        self._every = (*state.open, *others)
        self._states: dict[tuple[tuple[DeviceLimit, ...], Params], SearchState] = {}
        self._trials: dict[tuple[str, ...], Trial] = {}
        self._distances: dict[tuple[float, int], float] = {}

    def note(self, trial: Trial, state: SearchState) -> None:
        """Remember the best trial on the devices of ``state``, which was found elsewhere."""
        self._trials[_names(state.open)], self._states[trial.devices, trial.params] = trial, state

    def _best_on(self, state: SearchState) -> Trial:
        """Find the best trial on the devices of ``state``, once."""
        names = _names(state.open)
        if names not in self._trials:
            trial = self._trials[names] = best_at(state)
            self._states[trial.devices, trial.params] = state
        return self._trials[names]

    def state_of(self, trial: Trial) -> SearchState:
        """Return the state of the search on the devices of ``trial``."""
        return self._states.get((trial.devices, trial.params), self._first)

    def first_of_equal(self, devices: Iterable[DeviceLimit]) -> tuple[DeviceLimit, ...]:
        """Replace devices by the first ones that are equal to them, in the user's order."""
        left: dict[tuple[object, ...], list[DeviceLimit]] = {}
        for device in self._every:
            left.setdefault(self._kind(device), []).append(device)
        return tuple((left.get(self._kind(device)) or [device]).pop(0) for device in devices)

    def _kind(self, device: DeviceLimit) -> tuple[object, ...]:
        is_named = device in pinned_devices(self._request) or "devices" in self._request.fixed
        return self._request.speeds.get(device.name), device.target, device.largest_tensor, is_named and device.name

    def without_idle(self, state: SearchState) -> Trial:
        """Find the best trial on the devices of ``state``, or on those that it has a use for."""
        trial = best = self._best_on(state)
        while state.devices and not user_chose_devices(self._request):
            useless = _useless(state.devices, trial)
            useful = self.first_of_equal(device for device in state.devices if device not in useless)
            if not useless or (not useful and needs_devices(self._request)):
                break
            state = state.on(useful)
            trial = self._best_on(state)
            if rank(best) <= rank(trial):
                best = trial
        return best

    def without_doubtful(self, best: Trial) -> Trial:
        """Leave out doubtful devices, whose part in every graph may cost too much, as long as the plan gets better."""
        while not user_chose_devices(self._request) and best.fits and best.seconds is not None:
            doubtful = self._doubtful(best)
            state = next((state for state, is_small in doubtful if self._promises(state, best, is_small)), None)
            trial = None if state is None else self.without_idle(state)
            if trial is None or rank(trial) <= rank(best):
                break
            self._say_devices(trial, best)
            best = trial
        return best

    def _doubtful(self, best: Trial) -> Iterator[tuple[SearchState, bool]]:
        """Yield untested choices of fewer devices, each with whether those left out hold little (or else are slow)."""
        small = _small(best)
        # an idle device may get something where another one is left out
        for group in dict.fromkeys((*small, *self._slow(best))):
            for devices in dict.fromkeys((best.used[0], best.devices)):
                others = self.first_of_equal(device for device in devices if device not in group)
                if others and _names(others) not in self._trials:
                    yield self._first.on(others), group in small

    def _slow(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """Group the slow devices, whose part of the context may cost too much time: the slowest, then more of them."""
        speeds = {d: self._request.speeds[d.name].bandwidth for d in best.devices if best.breakdown.on(d.name).used}
        slow = sorted({speed for speed in speeds.values() if speed < _SLOW * max(speeds.values())})
        return [tuple(device for device in speeds if speeds[device] <= speed) for speed in slow]

    def _promises(self, state: SearchState, best: Trial, is_small: bool) -> bool:
        """Whether a plan on the devices of ``state`` is worth its dummy loads, by the known compute buffers."""
        if is_small and len(state.devices) == 1:
            # known buffers include the pipeline's, which a single device does not need
            return self._expected_plan(state, best) is not None
        likely = self._expected_plan(state, best)
        if likely is None:
            return False
        if self._beats(likely, best) or is_small or state.buffers.knows(False):
            return self._beats(likely, best)
        # buffers of a whole model are larger: each device has several, to work ahead
        most = self._expected_plan(state, best, optimistic=True)
        return most is not None and self._beats(most, best)

    def _expected_plan(self, state: SearchState, best: Trial, *, optimistic: bool = False) -> float | None:
        state = state.with_buffers_of(self.state_of(best))
        return expected_plan(state, best.params.n_ctx, optimistic=optimistic)

    def _beats(self, likely: float, best: Trial) -> bool:
        return best.expected is None or is_worth_a_load(likely, best.expected)

    def forget_remotes(self, best: Trial) -> None:
        """Leave out of all further choices the remote devices that ``best`` does without."""
        speeds = self._request.speeds
        forgotten = {
            d for d in self._first.open if d not in best.devices and d.name in speeds and speeds[d.name].is_remote
        }
        if forgotten:
            self._every = tuple(device for device in self._every if device not in forgotten)
            self._first = self._first.on(tuple(device for device in self._first.open if device not in forgotten))

    def on_others(self, best: Trial) -> Trial:
        """Try other choices and orders of devices where ``best`` is far from its bound or leaves a device idle.

        Where the user names the devices, some of them may get nothing if not all of the model is on them.
        """
        request = self._request
        if not self._every or user_chose_split(request) or best.seconds is None:
            return best
        is_at_bound = best.fits and not is_worth_a_load(1.0, self._distance_at(best))
        if is_at_bound or ("devices" in request.fixed and not best.placement.is_spilled):
            return best
        for likely, state in self._untested(best):
            if best.fits and (likely is None or not self._beats(likely, best)):
                break
            trial = self.without_idle(state)
            if rank(trial) > rank(best):
                self._say_devices(trial, best)
                best = trial
        return best

    def or_upstream(self, best: Trial) -> Trial:
        """Try the plan of upstream's own rules where ``best`` is far from its bound."""
        is_open = (
            not user_chose_devices(self._request) and best.fits and best.seconds is not None and self._first.devices
        )
        upstream = self._upstream() if is_open and self._distance_at(best) > FAR else None
        return upstream if upstream is not None and rank(upstream) > rank(best) else best

    def with_the_last_layer(self, best: Trial) -> Trial:
        """Try the last layer on a device where ``best`` has nothing on any.

        It has no cache, so a device may take it at a context at which it takes no other layer.
        """
        is_open = "n_gpu_layers" not in self._request.fixed
        is_idle = len(best.placement.idle) == len(best.devices)
        return self._or_last_layer(best) if is_open and is_idle and best.fits and best.seconds is not None else best

    def with_few_layers(self, best: Trial) -> Trial:
        """Try the last layer alone on a device where llama.cpp keeps most weights of device layers on the host.

        Each such weight costs a split of the graph; together they may cost more than the devices save.
        """
        request = self._request
        is_open = not user_chose_devices(request) and "n_gpu_layers" not in request.fixed
        splits = best.breakdown.n_splits
        if not is_open or not best.fits or not best.params.devices or splits is None or splits[1] <= request.n_layer:
            return best
        state = self._first.on(best.devices)
        if not state.keeps_on_host:
            return best
        return self._or_last_layer(replace(best, seconds=state.seconds(best.placement, best.breakdown)))

    def _or_last_layer(self, best: Trial) -> Trial:
        """Try the last layer alone on each of the fastest devices; return the best trial."""
        request = self._request
        last = replace(
            request,
            params=replace(request.params, n_gpu_layers=1),
            fixed=request.fixed | {"n_gpu_layers"},
            context_limits={},
        )
        by_speed = sorted(request.devices, key=lambda device: -request.speeds[device.name].bandwidth)
        groups = [(device,) for device in by_speed[:_MAX_FOR_LAST]]
        for devices in [self._first.devices] if user_chose_devices(request) else groups:
            # a time limit that is reached here keeps the best so far
            with suppress(LlamaCppError, CutShort, TimeLimitError):
                state = self._first.on(devices, last)
                trial = best_at(state)
                best = trial if rank(trial) > rank(best) else best
        return best

    def distance(self, best: Trial) -> float:
        """Compute the time of ``best`` as a multiple of the lower bound at the smallest context; 1 without a bound."""
        layout = self._first.smallest_layout
        return 1.0 if layout is None else self._times(best, layout)

    def _distance_at(self, best: Trial) -> float:
        """Compute ``distance`` at the context of ``best``."""
        layout = self._first.smallest_layout
        if layout is None:
            return 1.0
        return self._times(best, resized_layout(self._request.facts, layout, self._request.params, best.params))

    def _times(self, best: Trial, layout: Layout) -> float:
        if best.seconds is None:
            return 1.0
        key = best.seconds, layout.n_ctx
        if key not in self._distances:
            kept = host_only_everywhere(self._request, *best.used, best.breakdown, layout)
            is_off = best.breakdown.flash_attn is False
            bound = bound_of(self._request, layout, best.seconds, None, kept, is_without_flash=is_off)
            self._distances[key] = bound.times if bound else 1.0
        return self._distances[key]

    def _untested(self, best: Trial) -> list[tuple[float | None, SearchState]]:
        """List untested choices of devices, each with its expected seconds, the most promising first."""
        states: dict[float | None, SearchState] = {}
        # of choices with the same expectation the smallest counts: more devices are of no use
        for devices in dict.fromkeys(map(self.first_of_equal, sorted(self._other_orders(best), key=len))):
            if _names(devices) not in self._trials:
                state = self._first.on(devices)
                likely = self._expected_plan(state, best)
                if likely is not None and not all(device.is_default for device in devices):
                    # other micro batches may save more
                    likely /= 1 - WORTH_SHARING / 2
                states.setdefault(likely, state)
        return sorted(states.items(), key=lambda each: math.inf if each[0] is None else each[0])

    def _other_orders(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """List choices of devices: some in the user's order, and all by size and by speed."""
        devices, speeds, used = self._every, self._request.speeds, self.state_of(best).open
        if not best.fits:
            return [devices] if len(devices) > len(self._first.open) else []
        by_size = sorted(devices, key=lambda device: -device.target)
        by_speed = sorted(devices, key=lambda device: -speeds[device.name].bandwidth)
        groups = [by_size[:count] for count in range(1, len(devices) + 1)]
        groups += [by_speed[:count] for count in range(1, len(devices))]
        groups += [[device for device in used if device != removed] for removed in used]
        wider = [[*used, device] for device in devices if device not in used]
        # not a set: the order must be the same in each run
        orders = dict.fromkeys(tuple(d for d in devices if d in group) for group in (*groups, *wider) if group)
        if "devices" in self._request.fixed or len(devices) < 2:
            return list(orders)
        for group in (used, devices, *(group for group in wider if not group[-1].is_default)):
            orders |= dict.fromkeys((tuple(d for d in by_size if d in group), tuple(d for d in by_speed if d in group)))
        return list(orders)

    def _upstream(self) -> Trial | None:
        """Make the plan of upstream's own rules on all devices, with its price; ``None`` if it does not fit."""
        state = self._first.on(self._first.devices, replace(self._request, strategy="llama.cpp"))
        trial = best_at(state)
        if not trial.fits:
            return None
        return replace(trial, seconds=self._first.on(trial.devices).seconds(trial.placement, trial.breakdown))

    def _say_devices(self, chosen: Trial, other: Trial) -> None:
        if choice := choices.which_devices_take_part(chosen, other):
            self._first.callbacks.on_choice(choice)


def _names(devices: tuple[DeviceLimit, ...]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)


def _useless(devices: tuple[DeviceLimit, ...], trial: Trial) -> list[DeviceLimit]:
    """List devices on which ``trial`` has nothing, or which cannot hold even their compute buffer.

    Such a device would still cost its context, and take part in every graph.
    """
    lacking = {name for name, _ in trial.missing}
    idle = [devices[d] for d in trial.placement.idle if devices[d].name in (trial.params.devices or ())]
    useless = idle or [device for device in devices if device.name in lacking]
    if useless and len(idle) == len(devices):
        # all devices are idle: fewer of them need smaller compute buffers, and may be of use
        return sorted(idle, key=lambda device: device.target)[: (len(idle) + 1) // 2]
    return useless if trial.fits or not useless else [min(useless, key=lambda device: device.target)]


def _small(best: Trial) -> list[tuple[DeviceLimit, ...]]:
    """Devices that cost more compute buffer than they hold: first all of them, then each alone."""
    rows = {device: best.breakdown.on(device.name) for device in best.devices}
    used = {device: row for device, row in rows.items() if row.used}
    compute = sum(row.compute for row in used.values())
    small = [d for d, row in used.items() if row.model + row.context < (compute - row.compute) / 2]
    small.sort(key=lambda device: used[device].model + used[device].context)
    groups: list[tuple[DeviceLimit, ...]] = [tuple(small)] if 1 < len(small) < len(used) else []
    return groups + [(device,) for device in small if len(used) > 1]
