"""The search with split mode ``tensor``: every tensor in parts over all devices, which compute at once. Bytes.

What a device takes is a part that it has whatever its share (compute buffers, what each one has a copy of) and its
share of the rest, in steps of llama.cpp's own. So shares are corrected by what a dummy load measures, until every
margin is kept; the context is the largest that leaves such shares. Where there are none, the experts of as few layers
as that takes go to the host, of a model without experts feed-forward weights or whole layers, whichever is faster.
Always those of a layer together: with a part of them elsewhere, llama.cpp cannot split what is computed in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from fitter.errors import LlamaCppError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Params, TensorBuftOverride
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement, merge_overrides, pattern_for
from fitter.planning.pricing.objective import is_better, objective_seconds, rank
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.split_price import price_split
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.constraints import check_split_devices
from fitter.planning.request.given import units_on_devices, usable_devices
from fitter.planning.request.request import DeviceLimit, Measure, Record, Request
from fitter.planning.search.levers import Candidate

PARTS = 10000
"""A share of a device is a whole number of these: less than llama.cpp's steps."""

_CORRECTIONS = 5
"""How often shares are corrected for one context, at most."""
_CONTEXTS = 10
"""How many contexts are tried between the smallest and the largest one, at most."""

Seconds = Callable[[Params, Breakdown, Placement], float | None]
"""The objective of what was measured, ``None`` where nothing is priced. All layers on devices are on the first one."""


@dataclass(frozen=True)
class _Way:
    """What is on which devices, with ``shares``, or equal ones where that is ``None``.

    The first layers may be on the host, and of those after them the experts, or the feed-forward weights, of the first
    ``parted`` that have such.
    """

    devices: tuple[DeviceLimit, ...]
    shares: tuple[float, ...] | None = None
    parted: int = 0
    layers_on_host: int = 0


def search_split(
    request: Request,
    measure: Measure,
    record: Record,
    seconds: Seconds,
    on_candidate: Callable[[Params], None] = lambda params: None,
) -> Trial:
    """The best trial with split mode ``tensor`` that fits, or where none does the one that lacks least.

    ``record`` is asked only where something has to leave the devices. Raises ``UsageError`` where there is only one
    device for it, and whatever ``measure`` raises.
    """
    devices = usable_devices(request)
    check_split_devices("tensor", [device.name for device in request.devices])
    if len(devices) < 2:
        there = f"only {devices[0].name} has" if devices else "none has"
        raise UsageError(
            f"split mode 'tensor' needs two devices or more with room beyond their margin, and {there} any: use "
            "--split-mode layer, or a smaller --fit-target"
        )
    search = _Search(request, measure, record, seconds)
    best = search.best_on(devices)
    is_given = bool(request.fixed & {"devices", "tensor_split"} or request.pinned)
    by_room = sorted(devices, key=lambda device: device.target, reverse=True)
    for count in range(len(devices) - 1, 1, -1):
        if is_given:
            break
        kept = set(by_room[:count])
        try:
            fewer = search.best_on(tuple(device for device in devices if device in kept))
        except LlamaCppError:
            continue
        except TimeLimitError:
            break
        if not is_better(request, fewer, best):
            break
        best = fewer
    if best.fits:
        on_candidate(best.params)
    return best


def split_candidate(
    request: Request, measure: Measure, record: Record, on_candidate: Callable[[Params], None]
) -> Candidate:
    """Find the best plan with split mode ``tensor``, with its price. Raises what ``search_split`` raises."""
    prices: dict[Params, Price | None] = {}
    recorded = cache(record)

    def seconds(params: Params, breakdown: Breakdown, placement: Placement) -> float | None:
        try:
            layout = recorded(replace(request.params, n_ctx=request.n_ctx_min))
        except LlamaCppError:
            # the plan holds without a price
            return None
        price = prices[params] = price_split(request, params, breakdown, layout, placement)
        return None if price is None else objective_seconds(request, price.estimate)

    trial = search_split(request, measure, recorded, seconds, on_candidate)
    return Candidate(request, trial, prices.get(trial.params))


class _Search:
    """One search; what was measured is remembered. ``best``: what a time limit ends with, on the devices tried last."""

    def __init__(self, request: Request, measure: Measure, record: Record, seconds: Seconds) -> None:
        self._request = request
        self._measure = measure
        self._record = record
        self._seconds = seconds
        self._trials: dict[Params, Trial] = {}
        self.best: Trial | None = None

    def best_on(self, devices: tuple[DeviceLimit, ...]) -> Trial:
        """The best trial on exactly these devices."""
        request = self._request
        is_set = "n_ctx" in request.fixed
        least = request.params.n_ctx if is_set else request.n_ctx_min
        way = _Way(devices, self._first_shares(devices))
        try:
            way, trial = self._balanced(way, least)
        except LlamaCppError:
            if way.shares is None or "tensor_split" in request.fixed:
                raise
            # a model that llama.cpp can only compute with in equal parts
            way, trial = self._balanced(_Way(devices), least)
        self.best = trial if trial.fits else None
        try:
            is_widest = is_set or request.n_ctx_max <= least
            if request.objective == "context" and not is_widest:
                return self._widest(way, trial if trial.fits else self._spilled(way, trial, least))
            if not trial.fits:
                return self._spilled(way, trial, least)
            return trial if is_widest else self._with_more_context(way, trial)
        except TimeLimitError:
            if self.best is None:
                raise
            return self.best

    def _first_shares(self, devices: tuple[DeviceLimit, ...]) -> tuple[float, ...] | None:
        """As fast as each device is: then all of them end at the same time."""
        speeds = self._request.speeds
        known = [speeds[device.name].bandwidth if device.name in speeds else 0.0 for device in devices]
        if not all(known) or max(known) <= 1.02 * min(known):
            return None
        return _parts(known)

    def _balanced(self, way: _Way, n_ctx: int) -> tuple[_Way, Trial]:
        """The way with shares that keep every margin where there are such, and what was measured."""
        trial = self._trial(way, n_ctx)
        best = way, trial
        if "tensor_split" in self._request.fixed:
            return best
        for attempt in range(_CORRECTIONS):
            # once less than everything was too little, since llama.cpp's steps are coarse
            spare = min(1.0, attempt / 2)
            corrected = None if trial.fits else self._corrected(way, trial, spare)
            if corrected is None or corrected == way.shares:
                break
            way = replace(way, shares=corrected)
            try:
                trial = self._trial(way, n_ctx)
            except LlamaCppError:
                # such shares are none that llama.cpp can compute with
                break
            if rank(trial) > rank(best[1]):
                best = way, trial
        return best

    def _corrected(self, way: _Way, trial: Trial, spare: float) -> tuple[float, ...] | None:
        """Shares that take from devices which lack something for those with room; ``None`` where that is too little.

        ``spare``: the part of all room that is left in the end which is spread over the devices by their size.
        """
        slacks = [device.target - trial.breakdown.on(device.name).used for device in way.devices]
        rows = [trial.breakdown.on(device.name) for device in way.devices]
        shared, target = sum(row.model + row.context for row in rows), sum(device.target for device in way.devices)
        if sum(slacks) < 0 or not shared or target <= 0:
            return None
        wanted = [spare * sum(slacks) * max(0, device.target) / target for device in way.devices]
        over = [slack - want for slack, want in zip(slacks, wanted, strict=True)]
        room, lack = sum(each for each in over if each > 0), -sum(each for each in over if each < 0)
        shares = _normal(way.shares or (1.0,) * len(way.devices))
        moved = [
            share + (each if each < 0 else each * lack / room if room else 0) / shared
            for share, each in zip(shares, over, strict=True)
        ]
        return _parts([max(0.0, share) for share in moved])

    def _with_more_context(self, way: _Way, trial: Trial) -> Trial:
        """The trial with the largest context that fits."""
        request = self._request
        step = request.alignment
        low, high, best = trial.params.n_ctx, request.n_ctx_max, trial
        room_low, room_high = self._room(way, best), -math.inf
        if tops := self._allowed(way, high):
            top_way, top = tops
            if top.fits:
                return top
            room_high = self._room(top_way, top)
        for count in range(_CONTEXTS):
            if high - low <= step:
                break
            is_guess = count < _CONTEXTS // 2 and room_low > room_high > -math.inf
            part = max(0.0, room_low) / (room_low - room_high) if is_guess else 0.5
            guess = int(low + (high - low) * min(1.0, part)) // step * step
            guess = min(max(guess, (low // step + 1) * step), (high - 1) // step * step)
            tries = self._allowed(way, guess)
            if tries and tries[1].fits:
                way, best = tries
                low, room_low = guess, self._room(way, best)
                self.best = best
            else:
                high, room_high = guess, self._room(*tries) if tries else -math.inf
        return best

    def _allowed(self, way: _Way, n_ctx: int) -> tuple[_Way, Trial] | None:
        """What ``_balanced`` finds, ``None`` where llama.cpp cannot have a context that nobody asked for."""
        try:
            return self._balanced(way, n_ctx)
        except LlamaCppError:
            return None

    def _widest(self, way: _Way, trial: Trial) -> Trial:
        """The trial with the largest context, with as much on the host as that takes."""
        request = self._request

        def attempt(n_ctx: int) -> Trial | None:
            found = self._allowed(way, n_ctx)
            return self._spilled(*found, n_ctx) if found and not found[1].fits else found and found[1]

        low, high, best = trial.params.n_ctx, request.n_ctx_max, trial
        if not trial.fits or ((top := attempt(high)) and top.fits):
            return top if trial.fits and top else trial
        for _ in range(_CONTEXTS):
            guess = (low + high) // 2 // request.alignment * request.alignment
            if guess <= low:
                break
            tried = attempt(guess)
            if tried and tried.fits:
                low = guess
                self.best = best = tried
            else:
                high = guess
        return best

    def _room(self, way: _Way, trial: Trial) -> float:
        """Bytes left on all devices, or where shares are the user's on the one that has least."""
        slacks = [float(device.target - trial.breakdown.on(device.name).used) for device in way.devices]
        return min(slacks) * len(slacks) if "tensor_split" in self._request.fixed else sum(slacks)

    def _spilled(self, way: _Way, trial: Trial, n_ctx: int) -> Trial:
        """The trial with as little on the host as lets the rest fit; the one that lacks least where none does."""
        count = len(self._units)
        is_free = "n_gpu_layers" not in self._request.fixed

        def parted(number: int) -> _Way:
            return replace(way, parted=number)

        def without_layers(number: int) -> _Way:
            return replace(way, layers_on_host=number)

        def both(number: int) -> _Way:
            return replace(way, parted=count, layers_on_host=number)

        best, is_enough = self._least_on_host(trial, n_ctx, parted, [unit.movable for unit in self._units])
        layers = [unit.weights + unit.cache for unit in self._every_unit[:-1]]
        if is_free and not self._request.is_expert_model:
            # what is read as a whole is read as fast wherever it is: a layer's caches and its hops decide
            whole, _ = self._least_on_host(trial, n_ctx, without_layers, layers)
            best = whole if is_better(self._request, whole, best) else best
        elif is_free and not is_enough:
            left, _ = self._least_on_host(best, n_ctx, both, [unit.need for unit in self._every_unit[:-1]])
            best = left if is_better(self._request, left, best) else best
        return best

    @cached_property
    def _every_unit(self) -> tuple[Unit, ...]:
        request = self._request
        layout = self._record(replace(request.params, n_ctx=request.n_ctx_min))
        return units_of(layout, request.n_layer, request.is_movable, request.pinned)

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        """The layers on devices with weights that can be elsewhere."""
        first = self._request.n_layer + 1 - units_on_devices(self._request)
        return tuple(unit for unit in self._every_unit if unit.items and unit.index >= first)

    def _least_on_host(
        self, start: Trial, n_ctx: int, on_host: Callable[[int], _Way], sizes: Sequence[int]
    ) -> tuple[Trial, bool]:
        """The trial with the smallest number for ``on_host`` with which all devices keep their margin, and whether one
        does; of trials with which none does, ``start`` among them, the one that lacks least.

        ``sizes``: what each of them frees, which is where the search begins. What the host lacks then, it lacks with
        every larger number as well.
        """
        best, enough = start, start

        def is_enough(number: int) -> bool:
            nonlocal best, enough
            try:
                found = self._balanced(on_host(number), n_ctx)[1]
            except LlamaCppError:
                # nobody asked for this
                return False
            if found.fits and (self.best is None or is_better(self._request, found, self.best)):
                self.best = found
            best = found if rank(found) > rank(best) else best
            if lacks_of(found):
                return False
            enough = found
            return True

        def lacks_of(trial: Trial) -> int:
            names = {device.name for device in trial.devices}
            lacks = [lack for name, lack in trial.missing if name in names]
            return max(lacks) * len(names) if lacks and "tensor_split" in self._request.fixed else sum(lacks)

        lacking = lacks_of(start)
        guess = next((i for i, size in enumerate(accumulate(sizes), 1) if size >= lacking), len(sizes))
        if smallest(len(sizes), is_enough, guess) is None:
            return best, False
        return enough, True

    def _trial(self, way: _Way, n_ctx: int) -> Trial:
        params = self._params(way, n_ctx)
        if params not in self._trials:
            breakdown = self._measure(params)
            missing = missing_of(self._request, breakdown, way.devices)
            n_units, used = self._request.n_layer + 1, units_on_devices(self._request) - way.layers_on_host
            moved = tuple((item, HOST) for unit in self._parted(way) for item in unit.items)
            placement = Placement(n_units - used, (used, *(0 for _ in way.devices[1:])), moved)
            seconds = self._seconds(params, breakdown, placement)
            self._trials[params] = Trial(placement, way.devices, params, breakdown, missing, seconds, seconds)
        return self._trials[params]

    def _params(self, way: _Way, n_ctx: int) -> Params:
        request = self._request
        params = replace(request.params, n_ctx=n_ctx, devices=tuple(device.name for device in way.devices))
        if "tensor_split" not in request.fixed:
            params = replace(params, tensor_split=way.shares)
        if "n_gpu_layers" not in request.fixed:
            params = replace(params, n_gpu_layers=request.n_layer + 1 - way.layers_on_host)
        parted = self._parted(way)
        if not parted:
            return params
        own = TensorBuftOverride(pattern_for([item for unit in parted for item in unit.items]), "CPU")
        return replace(params, tensor_buft_overrides=merge_overrides((*request.params.tensor_buft_overrides, own)))

    def _parted(self, way: _Way) -> tuple[Unit, ...]:
        if not way.parted:
            return ()
        return tuple(unit for unit in self._units[: way.parted] if unit.index >= way.layers_on_host)


def smallest(most: int, is_enough: Callable[[int], bool], guess: int) -> int | None:
    """The smallest number from 1 to ``most`` that is enough, if larger ones are where it is; ``None`` where none is.

    What is next to ``guess`` is asked about first, then what is further and further away.
    """
    low, high, step, at = 0, most + 1, 1, guess
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if is_enough(at):
            high = at
        else:
            low = at
        is_between = low and high <= most
        at = (low + high) // 2 if is_between else low + step if low else high - step
        step *= 2
    return high if high <= most else None


def _normal(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def _parts(values: Sequence[float]) -> tuple[float, ...] | None:
    """``values`` as parts of ``PARTS``; ``None`` where they are equal."""
    parts = tuple(float(round(value * PARTS)) for value in _normal(values))
    return None if len(set(parts)) == 1 else parts
