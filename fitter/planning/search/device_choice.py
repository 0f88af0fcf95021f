"""Which devices a plan is made on, and in which order: fewer, others, another first, where one may be better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cmp_to_key

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.objective import GAIN, beats, is_better, is_worth_a_load, ordered
from fitter.planning.pricing.pricing import bound_of, host_only_everywhere
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import context_limit
from fitter.planning.request.given import user_chose_devices, wants_layers_on_devices
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search import choices
from fitter.planning.search.capacity import is_too_large
from fitter.planning.search.context_choice import best_on
from fitter.planning.search.expectations import expected_partial, expected_plan
from fitter.planning.search.search_state import CutShort, SearchState
from fitter.planning.speed.explain import FAR

_SLOW = 0.7
"""The share of the fastest device's bandwidth below which another one is slow."""

_LITTLE = 0.25
"""The share of the largest device's room below which another one has little."""

_MOST_GAINED = 2.0
"""How many times as fast a plan with caches apart from their layers is at most that is worth another proposal."""

_MAX_FOR_LAST = 3
"""How many devices are asked for a last layer alone."""

_UNSURE = 0.05
"""The share of its time by which a plan must be expected to be better where its compute buffers are not known."""

_MAX_UNUSED = 2
"""How many devices without anything are counted on alone: several of them can be in each other's way."""

_MAX_OTHERS, _LEAST_OTHERS = 5, 2
"""How many other choices of devices are asked for where some promise to be better, and where none does."""


def in_better_order(state: SearchState) -> SearchState:
    """``state``, or what is known of the devices with another one first, where that is estimated faster.

    llama.cpp has the first one compute with weights of the host in a prompt, over its own link (``op_offload``).
    """
    devices, n_ctx, spread = state.devices, state.smallest_context, state.request.is_expert_model
    if not state.chooses_devices or not is_too_large(state, n_ctx):
        return state
    prices = state.prices()
    # a remote device never computes with them, so that it does not matter where those stand
    local = [d for d in range(len(devices)) if not prices.is_remote(d)]
    remote = [d for d in range(len(devices)) if d not in local]
    seconds = {d: prices.streaming(d) for d in local}
    if not local or not is_worth_a_load(min(seconds.values()), seconds[local[0]]):
        return state
    first = min(local, key=lambda d: seconds[d])
    others = [d for d in local if d != first]
    reordered = state.on(tuple(devices[d] for d in (*remote, first, *others)))
    before, after = (expected_partial(each, n_ctx, spread) for each in (state, reordered))
    if not is_worth_a_load(after, before):
        return state
    state.callbacks.on_choice(choices.which_device_is_first(devices[first], after, devices[local[0]], before))
    return reordered


class Devices:
    """The choices of devices that were asked for a plan: what is known of each, and its best trial."""

    def __init__(self, state: SearchState) -> None:
        self._request = state.original_request
        self._first = state
        self._floor: int | None = None
        self._done: dict[tuple[str, ...], SearchState] = {}
        self._trials: dict[tuple[str, ...], Trial] = {}
        self._distances: dict[float, float] = {}

    def _best_on(self, state: SearchState, *, is_free: bool = False) -> Trial:
        """The plan on these devices; if weights are spilled at the context of the best so far, unless ``is_free``."""
        names = _names(state.devices)
        if names not in self._trials:
            trial = best_on(state, None if is_free else self._floor and min(self._floor, state.request.n_ctx_max))
            self._done[names], self._trials[names] = state, trial
            if trial.fits:
                # weights that leave the devices are no way to more context than all of the devices have
                self._floor = max(self._floor or 0, trial.params.n_ctx)
        return self._trials[names]

    def without_idle(self, state: SearchState) -> Trial:
        """The best on the devices of ``state``, or on those of them that it has a use for."""
        trial = best = self._best_on(state)
        while state.devices and not user_chose_devices(self._request):
            useless = _useless(state.devices, trial)
            kept = tuple(device for device in state.devices if device not in useless)
            if not useless or (not kept and wants_layers_on_devices(self._request)):
                break
            state = state.on(kept)
            trial = self._best_on(state)
            if not is_better(self._request, best, trial):
                best = trial
        return self._without_unused(state, best)

    def _without_unused(self, state: SearchState, best: Trial) -> Trial:
        """``best``, or a plan with more context where devices on which it has nothing are not counted on."""
        used = tuple(d for d in best.devices if d.name in (best.params.devices or ()))
        is_open = "n_ctx" not in self._request.fixed and best.params.n_ctx < self._request.n_ctx_max
        if user_chose_devices(self._request) or not best.fits or not is_open or not 0 < len(used) < len(best.devices):
            return best
        unused = sorted((d for d in best.devices if d not in used), key=lambda device: -device.target)
        for added in (None, *unused[:_MAX_UNUSED]):
            kept = tuple(device for device in best.devices if device in used or device == added)
            trial = self._best_on(state.on(kept), is_free=True)
            best = trial if is_better(self._request, trial, best) else best
        return best

    def with_more_context(self, best: Trial) -> Trial:
        """``best``, or a better plan without the devices that take no more context than it has."""
        others = context_limit.wider(self._request, best.devices, best.params.n_ctx) if best.fits else ()
        if not others:
            return best
        trial = self.without_idle(self._first.on(others))
        return trial if is_better(self._request, trial, best) else best

    def without_doubtful(self, best: Trial) -> Trial:
        """``best``, or a plan without devices that hold so little that their part in every graph may cost more."""
        while not user_chose_devices(self._request) and best.fits and best.seconds is not None:
            doubtful = self._doubtful(best)
            state = next((state for state, is_small in doubtful if self._promises(state, best, is_small)), None)
            trial = None if state is None else self.without_idle(state)
            if trial is None or not is_better(self._request, trial, best):
                break
            self._say_devices(trial, best)
            best = trial
        return best

    def _doubtful(self, best: Trial) -> Iterator[tuple[SearchState, bool]]:
        """Fewer devices that were not asked for yet, and whether those left out hold little: else they are slow."""
        small = _small(best)
        # a device that has nothing may have something where another one is left out
        for group in dict.fromkeys((*small, *self._slow(best), *_nearly_full(best))):
            for left in dict.fromkeys((best.used[0], best.devices)):
                kept = tuple(device for device in left if device not in group)
                if kept and _names(kept) not in self._trials:
                    yield self._first.on(kept), group in small

    def _slow(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """The slow devices, whose part of the context may cost more time than it is worth: the slowest, then more."""
        speeds = {d: self._request.speeds[d.name].bandwidth for d in best.devices if best.breakdown.on(d.name).used}
        slow = sorted({speed for speed in speeds.values() if speed < _SLOW * max(speeds.values())})
        return [tuple(device for device in speeds if speeds[device] <= speed) for speed in slow]

    def _promises(self, state: SearchState, best: Trial, is_small: bool) -> bool:
        """Whether a plan on the devices of ``state`` is worth its loads, by what is known of the compute buffers."""
        if is_small and len(state.devices) == 1:
            # alone a device needs no buffers for the pipeline, which what is known has in it
            return self._expected(state, best) is not None
        rough = self._expected(state, best, is_plain=True)
        if rough is None or not self._beats((rough[0], rough[1] / _MOST_GAINED), best):
            return False
        likely = self._expected(state, best)
        if likely is None:
            return False
        if is_small:
            return self._beats(likely, best)
        # without a slow device much changes, and what is expected is only about right
        if self._beats((likely[0], likely[1] * (1 - GAIN)), best):
            return True
        if state.buffers.knows(False):
            return False
        # buffers of a model that is on devices as a whole are larger: each device has several, to work ahead with
        hoped = self._expected(state, best, optimistic=True)
        return hoped is not None and self._beats((hoped[0], hoped[1] * (1 + _UNSURE)), best)

    def _expected(
        self, state: SearchState, best: Trial, *, is_plain: bool = False, optimistic: bool = False
    ) -> tuple[int, float] | None:
        state = state.with_buffers_of(self._done.get(_names(best.devices), self._first))
        return expected_plan(state, best, is_plain=is_plain, optimistic=optimistic)

    def _beats(self, likely: tuple[int, float], best: Trial) -> bool:
        return best.expected is None or beats(self._request, likely, (best.params.n_ctx, best.expected))

    def forget_remotes(self, best: Trial) -> None:
        """Leave remote devices out of what else may be asked that were not worth their network to ``best``."""
        speeds, used = self._request.speeds, best.devices
        if not all(device in used for device in self._first.devices):
            kept = (d for d in self._first.devices if d in used or d.name not in speeds or not speeds[d.name].is_remote)
            self._first = self._first.on(tuple(kept))

    def on_others(self, best: Trial) -> Trial:
        """``best``, or what is better of other choices and orders of devices, where it may be far from the best."""
        if user_chose_devices(self._request) or not best.fits or best.seconds is None or not self._first.devices:
            return best
        is_far = self._is_far(best)
        if not is_far and not self._leaves_out(best):
            return best
        for asked, (likely, state) in enumerate(self._others(best)):
            is_promising = likely is not None and self._beats(likely, best)
            if asked >= (_MAX_OTHERS if is_promising else _LEAST_OTHERS if is_far else 0):
                break
            trial = self.without_idle(state)
            if is_better(self._request, trial, best):
                self._say_devices(trial, best)
                best = trial
                is_far = self._is_far(best)
        upstream = self._upstream() if is_far else None
        return upstream if upstream is not None and is_better(self._request, upstream, best) else best

    def with_the_last_layer(self, best: Trial) -> Trial:
        """``best``, or where that has nothing on any device, a plan with the last layer on one.

        It has no cache, so that a device may take it at a context that it does not take otherwise.
        """
        is_open = not user_chose_devices(self._request) and "n_gpu_layers" not in self._request.fixed
        if not is_open or not best.fits or best.seconds is None or best.params.devices:
            return best
        return self._or_last_layer(best)

    def with_few_layers(self, best: Trial) -> Trial:
        """``best``, or where llama.cpp keeps most weights of its layers on the host, a plan with the last layer alone.

        What is left on the devices may save less than the graph's splits cost, with a split for each such weight.
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
        """``best``, or a better plan with the last layer alone on a device."""
        request, n_ctx = self._request, best.params.n_ctx
        last = replace(
            request,
            params=replace(request.params, n_ctx=n_ctx, n_gpu_layers=1),
            fixed=request.fixed | {"n_ctx", "n_gpu_layers"},
            context_limits={},
        )
        by_speed = sorted(request.devices, key=lambda device: -request.speeds[device.name].bandwidth)
        for device in by_speed[:_MAX_FOR_LAST]:
            # a time limit that is reached here takes nothing of what was found before
            with suppress(LlamaCppError, CutShort, TimeLimitError):
                trial = best_on(self._first.on((device,), last))
                best = trial if is_better(request, trial, best) else best
        return best

    def _is_far(self, best: Trial) -> bool:
        return self.distance(best) > FAR

    def distance(self, best: Trial) -> float:
        """How many times what no placement takes less than the time of ``best`` is; 1 where that is not known."""
        layout = self._first.smallest_layout
        if best.seconds is None or layout is None:
            return 1.0
        if best.seconds not in self._distances:
            kept = host_only_everywhere(self._request, *best.used, best.breakdown, layout)
            bound = bound_of(self._request, layout, best.seconds, None, kept)
            self._distances[best.seconds] = bound.times if bound else 1.0
        return self._distances[best.seconds]

    def _leaves_out(self, best: Trial) -> bool:
        """Whether weights are on the host while ``best`` has nothing on some device."""
        is_spilled = best.placement.first > 0 or any(target == HOST for _, target in best.placement.moved)
        return is_spilled and len(best.devices) - len(best.placement.idle) < len(self._first.devices)

    def _others(self, best: Trial) -> list[tuple[tuple[int, float] | None, SearchState]]:
        """Plans on other devices that were not asked for yet, what is expected of each, and the best ones first."""
        speeds = self._request.speeds
        found: dict[tuple[int, float] | None, SearchState] = {}
        alike: set[tuple[object, ...]] = set()
        # what is expected of some devices is expected of more that are of no use as well
        for devices in sorted(self._other_orders(best), key=len):
            kinds = tuple((speeds[device.name], device.target) for device in devices)
            if kinds not in alike and _names(devices) not in self._trials:
                alike.add(kinds)
                state = self._first.on(devices)
                found.setdefault(self._expected(state, best), state)

        def order(one: tuple[int, float] | None, other: tuple[int, float] | None) -> int:
            return ordered(self._request, one, other)

        return [(likely, found[likely]) for likely in sorted(found, key=cmp_to_key(order))]

    def _other_orders(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """Some of the devices, in their order, and all of them by size and by speed."""
        every, speeds = self._first.devices, self._request.speeds
        by_size = sorted(every, key=lambda device: -device.target)
        by_speed = sorted(every, key=lambda device: -speeds[device.name].bandwidth)
        groups = [by_size[:count] for count in range(1, len(every) + 1)]
        groups += [by_speed[:count] for count in range(1, len(every))]
        groups += [[device for device in best.devices if device != left] for left in best.devices]
        groups += [[*best.devices, device] for device in every if device not in best.devices]
        # no set: the same plan must come out each time
        orders = dict.fromkeys(tuple(device for device in every if device in group) for group in groups if group)
        for kept in (best.devices, every) if len(every) > 1 else ():
            orders |= dict.fromkeys((tuple(d for d in by_size if d in kept), tuple(d for d in by_speed if d in kept)))
        return list(orders)

    def _upstream(self) -> Trial | None:
        """What upstream's own rules make of the devices, at the price of it."""
        state = self._first.on(self._first.devices, replace(self._request, strategy="llama.cpp"))
        trial = best_on(state, self._floor and min(self._floor, state.request.n_ctx_max))
        if not trial.fits:
            return None
        return replace(trial, seconds=self._first.on(trial.devices).seconds(trial.placement, trial.breakdown))

    def _say_devices(self, chosen: Trial, other: Trial) -> None:
        if choice := choices.which_devices_take_part(chosen, other):
            self._first.callbacks.on_choice(choice)


def _names(devices: tuple[DeviceLimit, ...]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)


def _useless(devices: tuple[DeviceLimit, ...], trial: Trial) -> list[DeviceLimit]:
    """Devices to do without: those that ``trial`` has nothing on, or that cannot hold even their compute buffer.

    A device that is not worth a layer would still cost its context, and take part in every graph.
    """
    lacking = {name for name, _ in trial.missing}
    idle = [devices[d] for d in trial.placement.idle if devices[d].name in (trial.params.devices or ())]
    useless = idle or [device for device in devices if device.name in lacking]
    if useless and len(idle) == len(devices):
        # where nothing is gained by all of them, fewer may still do: they need smaller compute buffers
        return sorted(idle, key=lambda device: device.target)[: (len(idle) + 1) // 2]
    return useless if trial.fits or not useless else [min(useless, key=lambda device: device.target)]


def _nearly_full(best: Trial) -> list[tuple[DeviceLimit, ...]]:
    """Each device with much less room than the largest, whose little context may cost more time than it is worth."""
    used = [device for device in best.devices if best.breakdown.on(device.name).used]
    largest = max((device.target for device in used), default=0)
    return [(device,) for device in used if device.target < _LITTLE * largest]


def _small(best: Trial) -> list[tuple[DeviceLimit, ...]]:
    """Devices that hold less than others may save in compute buffers without them, all of those and each."""
    rows = {device: best.breakdown.on(device.name) for device in best.devices}
    used = {device: row for device, row in rows.items() if row.used}
    compute = sum(row.compute for row in used.values())
    small = [d for d, row in used.items() if row.model + row.context < (compute - row.compute) / 2]
    small.sort(key=lambda device: used[device].model + used[device].context)
    groups: list[tuple[DeviceLimit, ...]] = [tuple(small)] if 1 < len(small) < len(used) else []
    return groups + [(device,) for device in small if len(used) > 1]
