"""The search with split mode ``tensor``: all devices have a part of every tensor, and compute at once. Bytes.

A device's memory is a fixed part (compute buffers, tensors of which each device has a copy) and its share of the rest,
in llama.cpp's own steps. So shares are corrected by dummy loads until every margin is kept. The context is the largest
for which such shares exist. Where there are none, the experts of as few layers as needed go to the host; of a model
without experts feed-forward weights or whole layers, whichever is faster. Those of one layer go together: llama.cpp
cannot split the operations between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from fitter.errors import LlamaCppError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import best_of, objective_seconds, rank
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.split_price import price_split
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.constraints import check_split_devices
from fitter.planning.request.given import overrides_for, units_on_devices, usable_devices
from fitter.planning.request.request import DeviceLimit, Measure, Record, Request
from fitter.planning.search.expectations import last_true
from fitter.planning.search.levers import Candidate

PARTS = 10000
"""Shares are whole numbers that add up to about this: finer than llama.cpp's steps."""

_CORRECTIONS = 5
"""At most so many corrections of the shares are measured at one context.

With three, Qwen3 32B on cards of 8 and 6 GiB is 2.5 % slower; with 50, Llama 3.1 8B on two cards of 4 and two of 3 GiB
takes six times as many loads for the same plan."""

_CONTEXTS = 10
"""At most so many contexts are tried between the smallest and the largest one.

With six, Llama 3.1 8B on cards of 8 and 6 GiB has 52,224 tokens instead of 56,832; with 50, it has 2 % more."""

Seconds = Callable[[Params, Breakdown, Placement], float | None]
"""Estimates the objective of a measured placement (device layers: all on the first one); ``None`` without prices."""


@dataclass(frozen=True)
class _Way:
    """A way to split the model.

    Attributes:
        shares: share of each device; ``None`` for equal shares.
        parted: of so many layers, the first that have any, the experts or feed-forward weights are on the host.
        layers_on_host: so many layers, the first ones, are on the host.
    """

    devices: tuple[DeviceLimit, ...]
    shares: tuple[float, ...] | None = None
    parted: int = 0
    layers_on_host: int = 0


def search_split(request: Request, measure: Measure, record: Record, seconds: Seconds) -> Trial:
    """Find the best trial with split mode ``tensor`` that fits, or where none does the one that lacks least.

    ``record`` is called only where weights have to leave the devices.

    Raises:
        UsageError: fewer than two devices have room.
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
    is_by_user = bool(request.fixed & {"devices", "tensor_split"} or request.pinned)
    by_room = sorted(devices, key=lambda device: device.target, reverse=True)
    for count in range(len(devices) - 1, 1, -1):
        if is_by_user:
            break
        try:
            fewer = search.best_on(tuple(device for device in devices if device in by_room[:count]))
        except LlamaCppError:
            continue
        except TimeLimitError:
            break
        if best_of((best, fewer), request) is best:
            break
        best = fewer
    return best


def split_candidate(request: Request, measure: Measure, record: Record) -> Candidate:
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

    trial = search_split(request, measure, recorded, seconds)
    return Candidate(request, trial, prices.get(trial.params))


class _Search:
    """One search, with its trials. ``best``: the best trial on the current devices, with which a time limit ends."""

    def __init__(self, request: Request, measure: Measure, record: Record, seconds: Seconds) -> None:
        self._request = request
        self._measure = measure
        self._record = record
        self._seconds = seconds
        self._trials: dict[Params, Trial] = {}
        self.best: Trial | None = None

    def best_on(self, devices: tuple[DeviceLimit, ...]) -> Trial:
        """Find the best trial on exactly these devices."""
        request = self._request
        is_set = "n_ctx" in request.fixed
        least = request.params.n_ctx if is_set else request.n_ctx_min
        way = _Way(devices, self._first_shares(devices))
        try:
            way, trial = self._balanced(way, least)
        except LlamaCppError:
            if way.shares is None or "tensor_split" in request.fixed:
                raise
            # llama.cpp splits this model into equal parts only
            way, trial = self._balanced(_Way(devices), least)
        self.best = trial if trial.fits else None
        try:
            enough = trial if trial.fits else self._spill_least(way, trial, least)
            is_open = not is_set and request.n_ctx_max > least
            if is_open and enough.fits and (trial.fits or request.is_for_most_context):
                return self._with_more_context(way, enough)
            return enough
        except TimeLimitError:
            if self.best is None:
                raise
            return self.best

    def _first_shares(self, devices: tuple[DeviceLimit, ...]) -> tuple[float, ...] | None:
        """Share by speed, so that all devices end at the same time; ``None`` for about equal speeds."""
        speeds = self._request.speeds
        bandwidths = [speeds[device.name].bandwidth if device.name in speeds else 0.0 for device in devices]
        if not all(bandwidths) or max(bandwidths) <= 1.02 * min(bandwidths):
            return None
        return _parts(bandwidths)

    def _balanced(self, way: _Way, n_ctx: int) -> tuple[_Way, Trial]:
        """Correct the shares until every margin is kept, or no correction helps. Returns the best way and its trial."""
        trial = self._trial(way, n_ctx)
        best = way, trial
        if "tensor_split" in self._request.fixed:
            return best
        for attempt in range(_CORRECTIONS):
            # later corrections leave more slack on each device, since llama.cpp's steps are coarse
            spare = min(1.0, attempt / 2)
            corrected = None if trial.fits else self._corrected(way, trial, spare)
            if corrected is None or corrected == way.shares:
                break
            way = replace(way, shares=corrected)
            try:
                trial = self._trial(way, n_ctx)
            except LlamaCppError:
                # llama.cpp cannot compute with such shares
                break
            if rank(trial) > rank(best[1]):
                best = way, trial
        return best

    def _corrected(self, way: _Way, trial: Trial, spare: float) -> tuple[float, ...] | None:
        """Move shares from devices that lack memory to those with room; ``None`` where there is too little room.

        ``spare``: this part of the room that is left in the end is spread over all devices by their size.
        """
        slacks = [device.target - trial.breakdown.on(device.name).used for device in way.devices]
        rows = [trial.breakdown.on(device.name) for device in way.devices]
        shared, target = sum(row.model + row.context for row in rows), sum(device.target for device in way.devices)
        if sum(slacks) < 0 or not shared or target <= 0:
            return None
        wanted = [spare * sum(slacks) * max(0, device.target) / target for device in way.devices]
        over = [slack - want for slack, want in zip(slacks, wanted, strict=True)]
        room, lack = sum(size for size in over if size > 0), -sum(size for size in over if size < 0)
        shares = _normal(way.shares or (1.0,) * len(way.devices))
        moved = [
            share + (size if size < 0 else size * lack / room if room else 0) / shared
            for share, size in zip(shares, over, strict=True)
        ]
        return _parts([max(0.0, share) for share in moved])

    def _with_more_context(self, way: _Way, trial: Trial) -> Trial:
        """Find the trial with the largest context that fits."""
        request = self._request
        step = request.alignment
        low, high, best = trial.params.n_ctx, request.n_ctx_max, trial
        room_low, room_high = self._room(way, best), -math.inf
        # with weights on the host, the room says nothing of the context
        most_guesses = 0 if request.is_for_most_context else _CONTEXTS // 2
        if tops := self._allowed(way, high):
            top_way, top = tops
            if top.fits:
                return top
            room_high = self._room(top_way, top)
        for count in range(_CONTEXTS):
            if high - low <= step:
                break
            is_guess = count < most_guesses and room_low > room_high > -math.inf
            part = max(0.0, room_low) / (room_low - room_high) if is_guess else 0.5
            guess = int(low + (high - low) * min(1.0, part)) // step * step
            guess = min(max(guess, (low // step + 1) * step), (high - 1) // step * step)
            result = self._allowed(way, guess)
            if result and result[1].fits:
                way, best = result
                low, room_low = guess, self._room(way, best)
                self.best = best
            else:
                high, room_high = guess, self._room(*result) if result else -math.inf
        return best

    def _allowed(self, way: _Way, n_ctx: int) -> tuple[_Way, Trial] | None:
        """Call ``_balanced``; ``None`` where llama.cpp refuses the context, which is not the user's.

        For the most context, have as much on the host as it needs.
        """
        try:
            way, trial = self._balanced(way, n_ctx)
        except LlamaCppError:
            return None
        if self._request.is_for_most_context and not trial.fits:
            trial = self._spill_least(way, trial, n_ctx)
        return way, trial

    def _room(self, way: _Way, trial: Trial) -> float:
        """Add up the bytes left on all devices. With the user's shares the fullest device counts for all."""
        slacks = [float(device.target - trial.breakdown.on(device.name).used) for device in way.devices]
        return min(slacks) * len(slacks) if "tensor_split" in self._request.fixed else sum(slacks)

    def _spill_least(self, way: _Way, trial: Trial, n_ctx: int) -> Trial:
        """Find the trial with the least on the host that fits, or where none does the one that lacks least."""
        count = len(self._units)
        is_free = "n_gpu_layers" not in self._request.fixed

        best, is_enough = self._least_on_host(
            trial, n_ctx, lambda n: replace(way, parted=n), [unit.movable for unit in self._units]
        )
        layers = [unit.weights + unit.cache for unit in self._all_units[:-1]]
        if is_free and not self._request.is_expert_model:
            # weights are read as fast in whole layers: a layer's caches and its hops decide
            whole, _ = self._least_on_host(trial, n_ctx, lambda n: replace(way, layers_on_host=n), layers)
            best = best_of((best, whole), self._request)
        elif is_free and not is_enough:
            needs = [unit.need for unit in self._all_units[:-1]]
            both, _ = self._least_on_host(best, n_ctx, lambda n: replace(way, parted=count, layers_on_host=n), needs)
            best = best_of((best, both), self._request)
        return best

    @cached_property
    def _all_units(self) -> tuple[Unit, ...]:
        request = self._request
        layout = self._record(replace(request.params, n_ctx=request.n_ctx_min))
        return units_of(layout, request.n_layer, request.is_movable, request.pinned)

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        """The layers on devices that have movable weights."""
        first = self._request.n_layer + 1 - units_on_devices(self._request)
        return tuple(unit for unit in self._all_units if unit.items and unit.index >= first)

    def _least_on_host(
        self, start: Trial, n_ctx: int, on_host: Callable[[int], _Way], sizes: Sequence[int]
    ) -> tuple[Trial, bool]:
        """Find the smallest number for ``on_host`` with which all devices keep their margins.

        Returns its trial and ``True``; or the trial that lacks least, ``start`` among them, and ``False``. Memory that
        the host lacks is ignored: it lacks it with every larger number too.

        Args:
            sizes: bytes that each step frees, from which the first number is estimated.
        """
        best, enough = start, start

        def is_enough(number: int) -> bool:
            nonlocal best, enough
            try:
                trial = self._balanced(on_host(number), n_ctx)[1]
            except LlamaCppError:
                # not the user's own parameters
                return False
            if trial.fits and (self.best is None or best_of((self.best, trial), self._request) is trial):
                self.best = trial
            best = trial if rank(trial) > rank(best) else best
            if lacks_of(trial):
                return False
            enough = trial
            return True

        def lacks_of(trial: Trial) -> int:
            names = {device.name for device in trial.devices}
            lacks = [lack for name, lack in trial.missing if name in names]
            return max(lacks) * len(names) if lacks and "tensor_split" in self._request.fixed else sum(lacks)

        lacking = lacks_of(start)
        guess = next((i for i, size in enumerate(accumulate(sizes), 1) if size >= lacking), len(sizes))
        is_found = last_true(0, len(sizes) + 1, lambda number: not is_enough(number), guess) < len(sizes)
        return (enough, True) if is_found else (best, False)

    def _trial(self, way: _Way, n_ctx: int) -> Trial:
        params = self._params(way, n_ctx)
        if params not in self._trials:
            breakdown = self._measure(params)
            missing = missing_of(self._request, breakdown, way.devices)
            n_units, used = self._request.n_layer + 1, units_on_devices(self._request) - way.layers_on_host
            moved = tuple((item, HOST) for unit in self._split_units(way) for item in unit.items)
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
        parted = self._split_units(way)
        if not parted:
            return params
        to_host = tuple((item, HOST) for unit in parted for item in unit.items)
        overrides = overrides_for(request, Placement(way.layers_on_host, (), to_host), ())
        return replace(params, tensor_buft_overrides=overrides)

    def _split_units(self, way: _Way) -> tuple[Unit, ...]:
        if not way.parted:
            return ()
        return tuple(unit for unit in self._units[: way.parted] if unit.index >= way.layers_on_host)


def _normal(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def _parts(values: Sequence[float]) -> tuple[float, ...] | None:
    """Round ``values`` to shares that add up to about ``PARTS``; ``None`` where all are equal."""
    parts = tuple(float(round(value * PARTS)) for value in _normal(values))
    return None if len(set(parts)) == 1 else parts
