"""Which plan: on which devices, in which order, and what is asked once more before it goes out. Bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cmp_to_key

from fitter.llama.types import MAX_USED_DEVICES, Params
from fitter.planning import context_limit
from fitter.planning.attempt import Attempt, CutShort, wanted
from fitter.planning.explain import Choice
from fitter.planning.memory import HOST
from fitter.planning.pricing import bound_of
from fitter.planning.request import DeviceLimit, Measure, Record, Request
from fitter.planning.shared import remembered
from fitter.planning.trial import GAIN, Trial, beats, is_better, rank

_SLOW = 0.7
"""The share of the fastest device's bandwidth below which another one is slow."""

_MAX_UNUSED = 2
"""How many devices without anything are counted on alone: several of them can be in each other's way."""

_MAX_OTHERS, _LEAST_OTHERS = 5, 2
"""How many other choices of devices are asked for where some promise to be better, and where none does."""


def search(
    request: Request,
    measure: Measure,
    record: Record,
    on_candidate: Callable[[Params], None] = lambda params: None,
    on_choice: Callable[[Choice], None] = lambda choice: None,
) -> Trial:
    """The best trial that fits, or where none does the one that misses least.

    ``on_candidate`` is told of what may turn out to be the answer, as soon as that can be said, ``on_choice`` of what
    was chosen over what by its price. Raises whatever ``measure`` raises: llama.cpp refusing the user's own parameters
    is an answer too. A time limit is raised where nothing that fits was found before; else it is the best so far.
    """
    try:
        return _search(request, measure, record, on_candidate, on_choice)
    except CutShort as cut:
        return cut.best


def _search(
    request: Request,
    measure: Measure,
    record: Record,
    on_candidate: Callable[[Params], None],
    on_choice: Callable[[Choice], None],
) -> Trial:
    taking = context_limit.usable(request, _usable(request))
    attempt = Attempt(request, taking, remembered(measure), record, on_candidate, on_choice)
    if order := attempt.better_order():
        attempt = attempt.on(order)
    devices = _Devices(request, attempt)
    best = devices.without_idle(attempt)
    if best.fits and (others := context_limit.wider(request, best.devices, best.params.n_ctx)):
        trial = devices.without_idle(attempt.on(others))
        best = trial if is_better(request, trial, best) else best
    best = _worth_their_network(attempt.on(best.devices), best)
    devices.forget_remotes(best)
    return devices.wider(devices.without_doubtful(best))


def _usable(request: Request) -> tuple[DeviceLimit, ...]:
    """The devices that have anything beyond their margin, the largest where there are more than llama.cpp can use."""
    if request.fixed & {"devices", "tensor_split"}:
        return request.devices
    named = wanted(request)
    by_size = sorted(request.devices, key=lambda device: (device not in named, -device.target))
    usable = [device for device in by_size[:MAX_USED_DEVICES] if device.target > 0 or device in named]
    if not usable and "n_gpu_layers" in request.fixed and request.params.n_gpu_layers != 0:
        # what is asked for must be somewhere
        usable = by_size[:MAX_USED_DEVICES]
    return tuple(device for device in request.devices if device in usable)


class _Devices:
    """Which devices a plan is made on: asks for a plan on fewer, or in another order, where one may be better."""

    def __init__(self, request: Request, attempt: Attempt) -> None:
        self._request = request
        self._first = attempt
        self._floor: int | None = None
        self._done: dict[tuple[str, ...], Attempt] = {}
        self._trials: dict[tuple[str, ...], Trial] = {}

    @property
    def _are_given(self) -> bool:
        """Whether it is the user who says which devices take part."""
        return bool(self._request.fixed & {"devices", "tensor_split"} or wanted(self._request))

    def _run(self, attempt: Attempt, *, is_free: bool = False) -> Trial:
        """The plan of ``attempt``; if weights are spilled at the context of the best so far, unless it ``is_free``."""
        names = tuple(device.name for device in attempt.devices)
        if names not in self._trials:
            attempt.floor = None if is_free else self._floor and min(self._floor, attempt.request.n_ctx_max)
            trial = attempt.run()
            self._done[names], self._trials[names] = attempt, trial
            if trial.fits:
                # weights that leave the devices are no way to more context than all of the devices have
                self._floor = max(self._floor or 0, trial.params.n_ctx)
        return self._trials[names]

    def without_idle(self, attempt: Attempt) -> Trial:
        """The best on the devices of ``attempt``, or on those of them that it has a use for."""
        trial = best = self._run(attempt)
        while attempt.devices and not self._are_given:
            # a device that is not worth a layer would still cost its context, and take part in every graph; one that
            # cannot hold even its compute buffer is no device
            lacking = {name for name, _ in trial.missing}
            idle = [
                attempt.devices[d]
                for d in trial.placement.idle
                if attempt.devices[d].name in (trial.params.devices or ())
            ]
            useless = idle or [device for device in attempt.devices if device.name in lacking]
            if not useless:
                break
            if len(idle) == len(attempt.devices):
                # where nothing is gained by all of them, fewer may still do: they need smaller compute buffers
                useless = sorted(idle, key=lambda device: device.target)[: (len(idle) + 1) // 2]
            elif not trial.fits:
                useless = [min(useless, key=lambda device: device.target)]
            kept = tuple(device for device in attempt.devices if device not in useless)
            if not kept and "n_gpu_layers" in self._request.fixed and self._request.params.n_gpu_layers != 0:
                break
            attempt = attempt.on(kept)
            trial = self._run(attempt)
            if not is_better(self._request, best, trial):
                best = trial
        return self._without_unused(attempt, best)

    def _without_unused(self, attempt: Attempt, best: Trial) -> Trial:
        """``best``, or a plan with more context where devices on which it has nothing are not counted on."""
        used = tuple(d for d in best.devices if d.name in (best.params.devices or ()))
        is_open = "n_ctx" not in self._request.fixed and best.params.n_ctx < self._request.n_ctx_max
        if self._are_given or not best.fits or not is_open or not 0 < len(used) < len(best.devices):
            return best
        unused = sorted((d for d in best.devices if d not in used), key=lambda device: -device.target)
        for added in (None, *unused[:_MAX_UNUSED]):
            kept = tuple(device for device in best.devices if device in used or device == added)
            trial = self._run(attempt.on(kept), is_free=True)
            best = trial if is_better(self._request, trial, best) else best
        return best

    def without_doubtful(self, best: Trial) -> Trial:
        """``best``, or a plan without devices that hold so little that their part in every graph may cost more."""
        while not self._are_given and best.fits and best.seconds is not None:
            trial = None
            small = self._small(best)
            used, every = best.used[0], best.devices
            # a device that has nothing may have something where another one is left out
            groups = [(group, left) for group in (*small, *self._slow(best)) for left in dict.fromkeys((used, every))]
            for group, left in groups:
                kept = tuple(device for device in left if device not in group)
                names = tuple(device.name for device in kept)
                if not kept or names in self._trials:
                    continue
                attempt = self._first.on(kept)
                if self._is_promising(best, attempt, group in small):
                    trial = self.without_idle(attempt)
                    break
            if trial is None or not is_better(self._request, trial, best):
                break
            self._first.explain_devices(trial, best)
            best = trial
        return best

    def _small(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """Devices that hold less than others may save in compute buffers without them, all of those and each."""
        rows = {device: best.breakdown.on(device.name) for device in best.devices}
        used = {device: row for device, row in rows.items() if row.used}
        compute = sum(row.compute for row in used.values())
        small = [d for d, row in used.items() if row.model + row.context < (compute - row.compute) / 2]
        small.sort(key=lambda device: used[device].model + used[device].context)
        groups: list[tuple[DeviceLimit, ...]] = [tuple(small)] if 1 < len(small) < len(used) else []
        return groups + [(device,) for device in small if len(used) > 1]

    def _slow(self, best: Trial) -> list[tuple[DeviceLimit, ...]]:
        """The slow devices, whose part of the context may cost more time than it is worth: the slowest, then more."""
        speeds = {d: self._request.speeds[d.name].bandwidth for d in best.devices if best.breakdown.on(d.name).used}
        slow = sorted({speed for speed in speeds.values() if speed < _SLOW * max(speeds.values())})
        return [tuple(device for device in speeds if speeds[device] <= speed) for speed in slow]

    def _is_promising(self, best: Trial, attempt: Attempt, is_small: bool) -> bool:
        """Whether a plan on the devices of ``attempt`` is worth its loads, by what is known of the compute buffers."""
        known = self._done.get(tuple(device.name for device in best.devices), self._first)
        expected = attempt.knowing(known).expected(best)
        if expected is None:
            return False
        if not is_small:
            # without a slow device much changes, and what is expected is only about right
            expected = (expected[0], expected[1] * (1 - GAIN))
        # alone a device needs no buffers for the pipeline, which what is known has in it
        return (is_small and len(attempt.devices) == 1) or self._beats(expected, best)

    def forget_remotes(self, best: Trial) -> None:
        """Leave remote devices out of what else may be asked that were not worth their network to ``best``."""
        speeds, used = self._request.speeds, best.devices
        if not all(device in used for device in self._first.devices):
            kept = (d for d in self._first.devices if d in used or d.name not in speeds or not speeds[d.name].is_remote)
            self._first = self._first.on(tuple(kept))

    def wider(self, best: Trial) -> Trial:
        """``best``, or what is better of other choices and orders of devices, where it may be far from the best."""
        request = self._request
        if self._are_given or not best.fits or best.seconds is None or len(self._first.devices) == 0:
            return best
        is_far = self._is_far(best)
        if not is_far and not self._leaves_out(best):
            return best
        for asked, (expected, attempt) in enumerate(self._others(best)):
            is_promising = expected is not None and self._beats(expected, best)
            if asked >= (_MAX_OTHERS if is_promising else _LEAST_OTHERS if is_far else 0):
                break
            trial = self.without_idle(attempt)
            if is_better(request, trial, best):
                self._first.explain_devices(trial, best)
                best = trial
                is_far = self._is_far(best)
        upstream = self._upstream() if is_far else None
        return upstream if upstream is not None and is_better(request, upstream, best) else best

    def _beats(self, expected: tuple[int, float], best: Trial) -> bool:
        return best.expected is None or beats(self._request, expected, (best.params.n_ctx, best.expected))

    def _is_far(self, best: Trial) -> bool:
        """Whether the time of ``best`` is far above what no placement takes less than."""
        layout = self._first.smallest_layout
        if best.seconds is None or layout is None:
            return False
        bound = bound_of(self._request, layout, best.seconds)
        return bound is not None and bound.is_far

    def _leaves_out(self, best: Trial) -> bool:
        """Whether weights are on the host while ``best`` has nothing on some device."""
        used = len(best.devices) - len(best.placement.idle)
        return _is_spilled(best) and used < len(self._first.devices)

    def _others(self, best: Trial) -> list[tuple[tuple[int, float] | None, Attempt]]:
        """Plans on other devices that were not asked for yet, what is expected of each, and the best ones first."""
        known = self._done.get(tuple(device.name for device in best.devices), self._first)
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
        found: dict[tuple[int, float] | None, Attempt] = {}
        alike: set[tuple[object, ...]] = set()
        # what is expected of some devices is expected of more that are of no use as well
        for devices in sorted(orders, key=len):
            kinds = tuple((speeds[device.name], device.target) for device in devices)
            if kinds not in alike and tuple(device.name for device in devices) not in self._trials:
                alike.add(kinds)
                attempt = self._first.on(devices)
                found.setdefault(attempt.knowing(known).expected(best), attempt)

        def order(one: tuple[int, float] | None, other: tuple[int, float] | None) -> int:
            if one is None or other is None:
                return (one is None) - (other is None)
            return beats(self._request, other, one) - beats(self._request, one, other)

        return [(expected, found[expected]) for expected in sorted(found, key=cmp_to_key(order))]

    def _upstream(self) -> Trial | None:
        """What upstream's own rules make of the devices, at the price of it."""
        request = replace(self._request, strategy="llama.cpp")
        attempt = self._first.on(self._first.devices, request)
        attempt.floor = self._floor and min(self._floor, attempt.request.n_ctx_max)
        trial = attempt.run()
        if not trial.fits:
            return None
        return replace(trial, seconds=self._first.on(trial.devices).seconds(trial.placement, trial.breakdown))


def _is_spilled(trial: Trial) -> bool:
    """Whether weights of layers are on the host."""
    return trial.placement.first > 0 or any(target == HOST for _, target in trial.placement.moved)


def _worth_their_network(last: Attempt, best: Trial) -> Trial:
    """``best``, or a plan without remote devices whose part takes less time elsewhere."""
    asked: set[tuple[DeviceLimit, ...]] = set()
    while True:
        attempt = last.on(best.devices)
        doubtful = next((group for group in attempt.doubtful_remotes(best.placement) if group not in asked), None)
        if doubtful is None:
            return best
        asked.add(doubtful)
        best = replace(best, seconds=attempt.seconds(best.placement, best.breakdown))
        trial = last.on(tuple(device for device in best.devices if device not in doubtful)).run()
        is_better = rank(trial) > rank(best)
        if last.request.objective != "context" and attempt.are_slower_than_host(doubtful) and trial.fits and best.fits:
            # what the host could hold as well is no reason to take more context from something slower
            is_better = (trial.seconds or 0.0) < (best.seconds or 0.0)
        last.explain_remote(doubtful, *((trial, best) if is_better else (best, trial)))
        best = trial if is_better else best
