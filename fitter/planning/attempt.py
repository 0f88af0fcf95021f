"""The fit loop on given devices: propose a placement, have llama.cpp measure it, correct the estimate, propose again.

Nothing is accepted on an estimate: every ``Trial`` is a dummy load, and the plan is the best one that kept all margins.
Bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from fitter.errors import LlamaCppCrashError, LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params
from fitter.planning import context_limit
from fitter.planning.explain import Choice
from fitter.planning.learned import LearnedCompute
from fitter.planning.memory import HOST, Unit, between, units_of
from fitter.planning.objective import Prices
from fitter.planning.packing import Times, brought, pack, pack_fastest, pack_whole
from fitter.planning.placement import Placement, caches_on, counts_for_split, merged, overrides_of, weights_on
from fitter.planning.request import SHARED_ROW, DeviceLimit, Measure, Record, Request
from fitter.planning.trial import GAIN, Trial, beats, is_better, missing_of, rank

_T = TypeVar("_T")

_MAX_CORRECTIONS = 12
_MAX_CONTEXTS = 40
_MAX_FILLS = 8
_MAX_CRASHES = 8
_TENSORS = "single feed-forward tensors on the host, as many layers with their KV cache on devices as fit"
_LAYERS = "whole layers on the host with their KV cache"
_CACHES = "weights of layers on the host, their KV cache on devices"
_CACHES_ON_HOST = "layers' KV cache on the host, their weights on devices as far as there is room"

_CONTEXTS_TO_SPILL = 8
"""Contexts that are asked about between what fits as a whole and what the devices hold in total."""

_MAX_SPILLED, _MAX_DISAPPOINTED = 5, 2
"""How many of those llama.cpp is asked about, and how many of them may be no better."""

_SMALL_SHARE = 0.004
"""A share of a context that is not worth another proposal."""

_STARTS = 8
"""How many first layers on devices are tried before the search goes on around the best of them."""

_WAYS_TO_BRING: tuple[Literal["items", "layers", "all"], ...] = ("items", "layers", "all")

_CACHE_SHARE = 0.2
"""Share of the devices' memory from which on caches are worth being asked about apart from their layers' weights."""

_ALIKE = 0.01
"""The share of what two trials lack that is not worth another place that lacks something."""

WORTH_A_LOAD = 0.005
"""Share of the time that another way to place must be expected to save before it is tried."""

_TIGHT = 0.95
"""Share of the devices' memory from which weights and caches are asked about at the smallest context first."""

_WORTH_A_CORRECTION = 0.002
"""The same for a correction of what fits already: less than an estimate tells, and the fit takes a fifth longer."""


def wanted(request: Request) -> set[DeviceLimit]:
    """Devices on which an override of the user's puts tensors: llama.cpp must know them."""
    return {request.devices[target] for target in request.pinned.values() if target != HOST}


@dataclass(frozen=True)
class Room:
    """What each device may hold of weights and caches. Bytes.

    Compute buffers are larger where attention is computed: there is less room ``with_caches`` than ``without`` any.
    """

    with_caches: tuple[int, ...]
    without: tuple[int, ...]

    def of(self, units: Sequence[Unit], placement: Placement) -> list[int]:
        """The room for ``placement``: of each device by whether it has a cache."""
        caches = caches_on(units, placement)
        return [w if cache else o for w, o, cache in zip(self.with_caches, self.without, caches, strict=True)]


class CutShort(Exception):
    """The time limit was reached, with something that fits."""

    def __init__(self, best: Trial) -> None:
        super().__init__()
        self.best = best


class Attempt:
    """A search on a given choice of devices, with what it has measured."""

    def __init__(
        self,
        request: Request,
        devices: tuple[DeviceLimit, ...],
        measure: Measure,
        record: Record,
        on_candidate: Callable[[Params], None],
        on_choice: Callable[[Choice], None],
        before: Attempt | None = None,
    ) -> None:
        self._asked = request
        self.request = context_limit.within(request, devices)
        self.devices = devices
        self._measure = measure
        self._record = record
        self._on_candidate = on_candidate
        self._on_choice = on_choice
        self._best: Trial | None = before._best if before else None
        self._compute: dict[bool, LearnedCompute] = {True: LearnedCompute(), False: LearnedCompute()}
        self._without_cache = LearnedCompute()
        # what is not the model's own, which is there whatever of the model is
        self._shared: LearnedCompute = before._shared if before else LearnedCompute()
        self._trials: dict[Params, Trial] = {}
        self._last: Trial | None = None
        self._least: Trial | None = None
        self._least_is_guess = False
        self._units: dict[int, tuple[Unit, ...]] = before._units if before else {}
        self._layouts: dict[int, Layout] = before._layouts if before else {}
        self._is_plain: bool = before._is_plain if before else False
        self.floor: int | None = None
        """The context below which a plan is of no interest; ``None`` where that is for this search to find."""
        self._is_priced = request.strategy == "fastest" and request.facts is not None and request.host_speed is not None
        self._proposals: dict[tuple[int, Room, bool, bool], Placement | None] = {}
        self._prices: Prices | None = None
        self._prices_on: dict[tuple[int, ...], Prices] = {}

    def on(self, devices: tuple[DeviceLimit, ...], request: Request | None = None) -> Attempt:
        """The same search on other devices, with what does not depend on them."""
        asked = request or self._asked
        return Attempt(asked, devices, self._measure, self._record, self._on_candidate, self._on_choice, self)

    # what is known

    def units(self, n_ctx: int) -> tuple[Unit, ...]:
        """Layers with their caches at ``n_ctx``."""
        request = self.request
        low, high = request.n_ctx_min, request.n_ctx_max
        if "n_ctx" in request.fixed or n_ctx in (low, high):
            return self._recorded(n_ctx)
        return between(self._recorded(low), low, self._recorded(high), high, n_ctx)

    def _recorded(self, n_ctx: int) -> tuple[Unit, ...]:
        if n_ctx not in self._units:
            request = self.request
            layout = self._asked_of(self._record, replace(request.params, n_ctx=n_ctx, tensor_buft_overrides=()))
            self._layouts[n_ctx] = layout
            self._units[n_ctx] = units_of(layout, request.n_layer, request.is_movable, request.pinned)
        return self._units[n_ctx]

    @property
    def smallest_layout(self) -> Layout | None:
        """What was recorded at the smallest context, ``None`` where nothing was."""
        return self._layouts[min(self._layouts)] if self._layouts else None

    def _asked_of(self, llama: Callable[[Params], _T], params: Params) -> _T:
        try:
            return llama(params)
        except TimeLimitError as error:
            if self._best is None:
                raise
            raise CutShort(self._best) from error

    def prices(self) -> Prices:
        """Prices on these devices; what a token takes in the cache is the same at every context."""
        if self._prices is None:
            if not self._units:
                self._recorded(self._smallest_context())
            n_ctx = max(self._units)
            self._prices = Prices(self.request, self.devices, self._units[n_ctx], n_ctx)
        return self._prices

    def seconds(self, placement: Placement, measured: Breakdown | None = None) -> float:
        """The objective with ``placement``; see ``Prices.seconds``."""
        prices, on = self._prices_of(placement)
        return prices.seconds(on, measured)

    def busy(self, placement: Placement) -> float:
        """The objective where every sequence has a request at once; see ``Prices.busy``."""
        prices, on = self._prices_of(placement)
        return prices.busy(on)

    def _prices_of(self, placement: Placement) -> tuple[Prices, Placement]:
        """Prices on the devices that ``placement`` has a use for, and the placement on those."""
        named = tuple(self._named(placement))
        if named not in self._prices_on:
            if len(named) == len(self.devices):
                self._prices_on[named] = self.prices()
            else:
                self._prices_on[named] = self.on(tuple(self.devices[d] for d in named)).prices()
        return self._prices_on[named], placement.on(named)

    def _smallest_context(self) -> int:
        request = self.request
        return request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min

    def room(self, n_ctx: int, whole: bool, optimistic: bool = False) -> Room:
        """What each device may hold of weights and caches, by what was measured last."""
        off = self._off_by()
        with_caches, without = [], []
        for d, device in enumerate(self.devices):
            known = self._compute[whole].at(device.name, n_ctx)
            if known is None:
                known = None if optimistic else self._compute[not whole].at(device.name, n_ctx)
            if known is None:
                known = self._shared.at(device.name, n_ctx)
            without_cache = self._without_cache.at(device.name, n_ctx)
            without_cache = known if without_cache is None else without_cache
            with_caches.append(device.target - (known or 0) - off[d])
            without.append(device.target - (without_cache or 0) - off[d])
        return Room(tuple(with_caches), tuple(without))

    def _room_left_by(self, trial: Trial, room: Room) -> Room:
        """``room``, but of the devices that ``trial`` uses what its own compute buffers leave."""
        off = self._off_by()
        with_caches, without = list(room.with_caches), list(room.without)
        caches = caches_on(self.units(trial.params.n_ctx), trial.placement)
        for d, device in enumerate(self.devices):
            if d not in trial.placement.idle:
                left = device.target - trial.breakdown.on(device.name).compute - off[d]
                without[d] = max(left, without[d])
                with_caches[d] = left if caches[d] else min(with_caches[d], left)
        return Room(tuple(with_caches), tuple(without))

    def _off_by(self) -> list[int]:
        """By how much weights and caches of the last trial were more than the estimate said."""
        if self._last is None:
            return [0] * len(self.devices)
        placement, units = self._last.placement, self.units(self._last.params.n_ctx)
        off = []
        for device, weights, cache in zip(
            self.devices, weights_on(units, placement), caches_on(units, placement), strict=True
        ):
            row = self._last.breakdown.on(device.name)
            off.append(row.model + row.context - weights - cache)
        return off

    def knowing(self, other: Attempt) -> Attempt:
        """This search, for which compute buffers are taken to be those that ``other`` has learned."""
        changed = {}
        if self.devices and other.devices and self.devices[0] != other.devices[0]:
            # what the host has goes through the first one
            changed = {self.devices[0].name: other.devices[0].name, other.devices[0].name: self.devices[0].name}
        self._compute = {whole: learned.copy(changed) for whole, learned in other._compute.items()}
        self._without_cache = other._without_cache.copy(changed)
        return self

    def expected(self, best: Trial) -> tuple[int, float] | None:
        """Context and seconds of the plan that these devices are likely to have, without asking llama.cpp.

        ``best`` is a trial on others: the same kind of plan is expected here. ``None`` where nothing is priced.
        """
        if not self._is_priced or not self._units:
            return None
        whole = self.expected_whole(best)
        n_ctx = max(self._smallest_context(), best.params.n_ctx)
        if whole is not None and whole[0] >= n_ctx:
            return whole
        placement = self._propose_partial(n_ctx, self.room(n_ctx, False), self._styles(n_ctx)[0])
        partial = None if placement is None else (n_ctx, self.seconds(placement))
        if whole is None or partial is None:
            return whole or partial
        return whole if beats(self.request, whole, partial) else partial

    def expected_whole(self, best: Trial) -> tuple[int, float] | None:
        """The same with all of the model on devices, ``None`` where that is not likely to fit."""
        if not self._is_priced or not self._units or not self._compute[True].knows_any:
            return None
        n_ctx, low, step = best.params.n_ctx, self._smallest_context(), self.request.alignment
        if "n_ctx" not in self.request.fixed:
            top = -(-self.request.n_ctx_max // step)
            n_ctx = step * _last_true(low // step, top + 1, lambda n: self._promises_whole(n * step))
            n_ctx = max(low, min(n_ctx, self.request.n_ctx_max))
        room = self.room(n_ctx, True)
        placement = self._fastest(n_ctx)(room) if self._chooses_devices() else self._whole(n_ctx)(room)
        return None if placement is None else (n_ctx, self.seconds(placement))

    # trying

    def trial(self, placement: Placement, n_ctx: int) -> Trial:
        """Measure a placement, or remember that it was."""
        params = self._params(placement, n_ctx)
        if params not in self._trials:
            breakdown = self._asked_of(self._measure, params)
            missing = missing_of(self.request, breakdown, self.devices)
            # where nothing was recorded there is nothing to choose between
            is_priced = self._is_priced and bool(self._units)
            expected = self.seconds(placement) if is_priced else None
            seconds = self.seconds(placement, breakdown) if is_priced else None
            trial = Trial(placement, self.devices, params, breakdown, missing, seconds, expected)
            self._trials[params] = trial
            whole = self._is_whole(placement)
            # a placement proposed before any compute buffer was known says little of what is missing
            is_guess = not whole and not any(learned.knows_any for learned in self._compute.values())
            caching = list(range(len(self.devices)))
            if is_priced:
                caching = [d for d, cache in enumerate(caches_on(self.units(n_ctx), placement)) if cache]
            for d, device in enumerate(self.devices):
                # what a device needs without a layer says nothing of what it needs with one
                if d not in placement.idle:
                    learned = self._compute[whole] if whole or d in caching else self._without_cache
                    learned.learn(device.name, n_ctx, breakdown.on(device.name).compute)
            self._compute[whole].learn("host", n_ctx, breakdown.host.used)
            for row in breakdown.rows:
                if row.buffer_type == SHARED_ROW and row.device is not None:
                    self._shared.learn(row.device, n_ctx, row.used)
            if self._least is None or self._least_is_guess or _lacks_less(trial, self._least):
                self._least, self._least_is_guess = trial, is_guess
            if trial.fits and (self._best is None or rank(trial) > rank(self._best)):
                self._best = trial
                self._on_candidate(params)
        self._last = self._trials[params]
        return self._last

    def _is_whole(self, placement: Placement) -> bool:
        return not placement.moved and placement.n_gpu_layers == self._default().n_gpu_layers

    def _params(self, placement: Placement, n_ctx: int) -> Params:
        request = self.request
        used = self._named(placement)
        names = tuple(self.devices[d].name for d in used)
        params = replace(request.params, n_ctx=n_ctx, devices=names)
        if "n_gpu_layers" not in request.fixed:
            params = replace(params, n_gpu_layers=placement.n_gpu_layers)
        if "tensor_split" not in request.fixed:
            several = len(names) > 1 and placement.n_gpu_layers > 0
            params = replace(params, tensor_split=tuple(float(placement.counts[d]) for d in used) if several else None)
        overrides = overrides_of(placement, [device.buffer_type for device in self.devices])
        return replace(params, tensor_buft_overrides=merged((*request.params.tensor_buft_overrides, *overrides)))

    def _named(self, placement: Placement) -> list[int]:
        """Indices of the devices to name: one that has nothing would still cost a context and a part in every graph."""
        every = list(range(len(self.devices)))
        idle = placement.idle
        if not self._is_priced or self.request.fixed & {"devices", "tensor_split"} or len(idle) == len(every):
            return every
        named_by_user = wanted(self.request)
        return [d for d in every if d not in idle or self.devices[d] in named_by_user]

    def settle(self, n_ctx: int, whole: bool, propose: Callable[[Room], Placement | None]) -> Trial | None:
        """Propose, measure and correct at one context until the measurement agrees; the best that fits."""
        best: Trial | None = None
        seen: set[Placement] = set()
        optimistic = False
        while len(seen) < _MAX_CORRECTIONS:
            placement = propose(self.room(n_ctx, whole, optimistic))
            if placement is None and not seen and not optimistic:
                # compute buffers of the other kind of placement may be the larger ones: ask llama.cpp before giving up
                optimistic = True
                continue
            if placement is None or placement in seen or not self._gains(placement, best):
                break
            seen.add(placement)
            if not whole and self._compute[whole].knows_any:
                # mostly it stays at the placement that the first correction gives
                self._on_candidate(self._params(placement, n_ctx))
            try:
                trial = self.trial(placement, n_ctx)
            except LlamaCppError as error:
                if self._is_plain and not isinstance(error, LlamaCppCrashError):
                    raise
                # not every architecture can have a layer's cache and its weights in two places
                self._be_plain()
                continue
            if any(name == "host" for name, _ in trial.missing):
                # caches that are kept apart from their layers may be what it has no room for
                self._be_plain()
            if trial.fits and (best is None or rank(trial) > rank(best)):
                best = trial
        while best is not None and self._is_priced and self._units and len(seen) < _MAX_CORRECTIONS:
            # what was learned of compute buffers is of all that was tried, and too much for this one
            self._last = best
            placement = propose(self._room_left_by(best, self.room(n_ctx, whole)))
            if placement is None or placement in seen or not self._gains(placement, best):
                break
            seen.add(placement)
            trial = self.trial(placement, n_ctx)
            if not trial.fits or rank(trial) <= rank(best):
                break
            best = trial
        return best

    def _be_plain(self) -> None:
        """Propose whole layers and tensors of them from now on; what other placements needed says nothing of those."""
        if not self._is_plain:
            self._is_plain = True
            self._compute[False] = LearnedCompute()

    def _gains(self, placement: Placement, best: Trial | None) -> bool:
        """Whether a correction promises enough to be measured once there is something that fits."""
        if best is None or best.expected is None or not self._units:
            return True
        return self.seconds(placement) < best.expected * (1 - _WORTH_A_CORRECTION)

    # the parts of the search

    def run(self) -> Trial:
        """The best trial on these devices, or the one that misses least."""
        request = self.request
        if "n_ctx" in request.fixed:
            found = self._at_fixed_context(request.params.n_ctx)
        elif self.devices:
            found = self._with_context()
        else:
            found = self._on_host()
        n_ctx = request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min
        return found or self._least or self.trial(self._default(), n_ctx)

    def _at_fixed_context(self, n_ctx: int) -> Trial | None:
        if self._is_too_large(n_ctx):
            return self._partial(n_ctx)
        if self._chooses_devices() and (fastest := self.settle(n_ctx, True, self._fastest(n_ctx))):
            self._explain_devices(fastest)
            return fastest
        trial = self.trial(self._default(), n_ctx)
        if trial.fits or not self.devices:
            return trial
        return self.settle(n_ctx, True, self._whole(n_ctx)) or self._partial(n_ctx)

    def _most_context(self) -> Trial | None:
        """The largest context that any placement leaves room for."""
        low, high = self.request.n_ctx_min, self.request.n_ctx_max

        def attempt(n_ctx: int) -> Trial | None:
            try:
                trial = self._at_fixed_context(n_ctx)
            except LlamaCppCrashError:
                return None
            return trial if trial and trial.fits else None

        best = attempt(high)
        if best is not None or low == high:
            return best
        best = attempt(low)
        return best and self._largest_context(best, high, attempt, self._promises_host)

    def _with_context(self) -> Trial | None:
        if self.request.objective == "context" and self._is_priced:
            return self._most_context()
        low = self.request.n_ctx_min
        spilled = max(low, self.floor or 0)
        if self._is_too_large(low):
            return self._partial(spilled)
        n_ctx = self.request.n_ctx_max
        if low < n_ctx and self._is_tight(low):
            bottom = self.trial(self._default(), low)
            if self._used(bottom, self.devices) >= self._target():
                # no larger context leaves room for more of the model
                return self.settle(low, True, self._whole(low)) or self._partial(spilled)
        if self._chooses_devices() and (fastest := self.settle(n_ctx, True, self._fastest(n_ctx))):
            self._explain_devices(fastest)
            return fastest
        top = self._top()
        high = top.params.n_ctx
        if top.fits:
            return top
        if trial := self.settle(high, True, self._whole(high)):
            return trial
        if low == high:
            return self._partial(high)
        bottom = self.trial(self._default(), low)
        floor = self.floor or self._context_in_total(top, bottom)
        best = bottom if bottom.fits else self.settle(low, True, self._whole(low))
        if best is not None:
            best = self._largest_context(
                best, high, lambda n_ctx: self.settle(n_ctx, True, self._whole(n_ctx)), self._promises_whole
            )
            if best.params.n_ctx >= floor:
                return best
        if best is not None:
            return self._spilled_beyond(best, floor)
        partial = self._partial(floor)
        return partial or (self._partial(low) if floor > low else None)

    def _spilled_beyond(self, whole: Trial, most: int) -> Trial:
        """``whole``, or a better plan with weights on the host for a context of up to ``most``."""
        best, asked, low, failed = whole, set[int](), whole.params.n_ctx, 0
        while len(asked) < _MAX_SPILLED and failed < _MAX_DISAPPOINTED and most > low:
            n_ctx = self._worth_spilling(low, most)
            if n_ctx in asked:
                # what was learned of compute buffers does not change it any more
                break
            asked.add(n_ctx)
            trial = self._partial(n_ctx)
            if trial is not None and is_better(self.request, trial, best):
                best = trial
            else:
                failed += 1
                most = (low + n_ctx) // 2 // self.request.alignment * self.request.alignment
        return best

    def _worth_spilling(self, whole: int, most: int) -> int:
        """The context of up to ``most`` that promises the best plan where all that fits without spilling is ``whole``.

        Little more context can cost much of the time, where no tensor is small enough for the room that is left.
        """
        if not self._is_priced or not self._units or self.floor is not None:
            return most
        alignment, spread = self.request.alignment, self._styles(most)[0]
        seconds: dict[int, float] = {}

        def expect(n_ctx: int) -> None:
            n_ctx = n_ctx // alignment * alignment if n_ctx < most else most
            if whole < n_ctx and n_ctx not in seconds:
                seconds[n_ctx] = self._expected(n_ctx, spread, is_plain=True)

        def best() -> int:
            found = most
            for n_ctx in seconds:
                is_first = math.isinf(seconds[found])
                if is_first or beats(self.request, (n_ctx, seconds[n_ctx]), (found, seconds[found])):
                    found = n_ctx
            return found

        stride = max(alignment, (most - whole) // _CONTEXTS_TO_SPILL)
        for n in range(_CONTEXTS_TO_SPILL):
            expect(most - n * stride)
        while stride > max(alignment, _SMALL_SHARE * most):
            stride //= 2
            around = best()
            expect(around - stride)
            expect(around + stride)
        return best()

    def _chooses_devices(self) -> bool:
        """Whether it is for the search to say which devices have the model."""
        return self._is_priced and len(self.devices) > 1 and not self.request.fixed & {"devices", "tensor_split"}

    def better_order(self) -> tuple[DeviceLimit, ...] | None:
        """The devices with another one first, where that is estimated faster.

        llama.cpp has the first one compute with weights of the host in a prompt, over its own link (``op_offload``).
        """
        n_ctx, spread = self._smallest_context(), self.request.is_expert_model
        if not self._chooses_devices() or not self._is_too_large(n_ctx):
            return None
        prices = self.prices()
        # a remote device never computes with them, so that it does not matter where those stand
        local = [d for d in range(len(self.devices)) if not prices.is_remote(d)]
        seconds = {d: prices.streaming(d) for d in local}
        if not local or min(seconds.values()) >= seconds[local[0]] * (1 - WORTH_A_LOAD):
            return None
        first = min(local, key=lambda d: seconds[d])
        others = [d for d in local if d != first]
        remote = [d for d in range(len(self.devices)) if d not in local]
        order = tuple(self.devices[d] for d in (*remote, first, *others))
        other = self.on(order)
        before, after = self._expected(n_ctx, spread), other._expected(n_ctx, spread)
        if not after < before * (1 - WORTH_A_LOAD):
            return None
        said = f"{self.devices[first].name}, which host weights reach fastest in a prompt"
        self._on_choice(
            Choice("which device is the first", said, after, f"{self.devices[local[0]].name}, as given", before)
        )
        return order

    def doubtful_remotes(self, placement: Placement) -> list[tuple[DeviceLimit, ...]]:
        """Remote devices that a plan may be better without: all that are slower than the host, then one by one.

        Those alone whose layers in ``placement`` are estimated to take less time elsewhere, the most doubtful first.
        """
        if not self._is_priced or self.request.fixed & {"devices", "tensor_split", "n_gpu_layers"}:
            return []
        remote = [d for d, device in enumerate(self.devices) if self.request.speeds[device.name].is_remote]
        if not remote:
            return []
        prices = self.prices()
        seconds = [prices.unit_seconds(d) for d in (*range(len(self.devices)), HOST)]
        slower = tuple(self.devices[d] for d in remote if self.are_slower_than_host((self.devices[d],)))
        gained: dict[int, float] = {}
        for d, (start, stop) in enumerate(placement.ranges()):
            if d in remote and start < stop:
                there = sum(seconds[d][start:stop]) + prices.visits[d]
                gained[d] = there - min(sum(own[start:stop]) for other, own in enumerate(seconds) if other != d)
        one_by_one: list[tuple[DeviceLimit, ...]] = [
            (self.devices[d],) for d in sorted(gained, key=lambda d: -gained[d]) if gained[d] > 0
        ]
        is_used = any(self.devices[d] in slower for d in gained)
        return [slower, *(group for group in one_by_one if group != slower)] if is_used else one_by_one

    def are_slower_than_host(self, devices: Sequence[DeviceLimit]) -> bool:
        """Whether each of ``devices``, remote ones, would take longer for the whole model than the host would."""
        prices = self.prices()
        here = sum(prices.unit_seconds(HOST))
        places = [self.devices.index(device) for device in devices]
        return all(sum(prices.unit_seconds(d)) + prices.visits[d] > here for d in places)

    def explain_remote(self, devices: Sequence[DeviceLimit], chosen: Trial, other: Trial) -> None:
        """Say what a plan takes with remote devices and without them, where both fit."""
        if chosen.seconds is None or not other.fits:
            return
        names = " and ".join(device.name for device in devices)
        said = [f"{'with' if devices[0] in trial.devices else 'without'} {names}" for trial in (chosen, other)]
        if chosen.params.n_ctx != other.params.n_ctx:
            said = [f"{text}, context {trial.params.n_ctx}" for text, trial in zip(said, (chosen, other), strict=True)]
        self._on_choice(
            Choice("whether remote devices are worth their network", said[0], chosen.seconds, said[1], other.seconds)
        )

    def explain_devices(self, chosen: Trial, other: Trial) -> None:
        """Say what a plan takes on the devices that it has been given, and on others, where both fit."""
        if chosen.seconds is None or not other.fits:
            return
        said = [
            f"{', '.join(trial.params.devices or ()) or 'none'}, context {trial.params.n_ctx}"
            for trial in (chosen, other)
        ]
        self._on_choice(Choice("which devices take part", said[0], chosen.seconds, said[1], other.seconds))

    def _explain_devices(self, trial: Trial) -> None:
        default = self._default()
        if trial.seconds is None or trial.placement == default:
            return
        names = ", ".join(
            f"{count} on {self.devices[d].name}" for d, count in enumerate(trial.placement.counts) if count
        )
        self._on_choice(
            Choice(
                "which devices have the layers",
                names,
                trial.seconds,
                "all devices, by their memory as llama.cpp splits",
                self.seconds(default),
            )
        )

    def _fastest(self, n_ctx: int) -> Callable[[Room], Placement | None]:
        """Proposes to have all layers where they take the least time: a slow device gets nothing where others do."""

        def propose(room: Room) -> Placement | None:
            prices = self.prices()
            seconds = [prices.unit_seconds(d) for d in range(len(self.devices))]
            return pack_fastest(
                self.units(n_ctx), room.with_caches, seconds, prices.hop, self._default().first, prices.visits
            )

        return propose

    def _is_too_large(self, n_ctx: int) -> bool:
        """Whether all layers with their caches are more than all devices hold, compute buffers left out."""
        # a model that looks as if it fitted is better asked about at once
        if not self.devices or self.request.model_bytes <= self._target():
            return False
        return self._weights_and_caches(n_ctx) > self._target()

    def _is_tight(self, n_ctx: int) -> bool:
        """Whether all layers with their caches leave next to nothing for compute buffers."""
        if not self.devices or self.request.model_bytes <= _TIGHT * self._target():
            return False
        return self._weights_and_caches(n_ctx) > _TIGHT * self._target()

    def _weights_and_caches(self, n_ctx: int) -> int:
        return sum(unit.weights + unit.cache for unit in self.units(n_ctx)[self._default().first :])

    def _target(self) -> int:
        return sum(max(0, device.target) for device in self.devices)

    def _used(self, trial: Trial, computing: Sequence[DeviceLimit]) -> int:
        """Bytes of weights and caches on all devices, and of compute buffers on those that are ``computing``."""
        rows = [trial.breakdown.on(device.name) for device in self.devices]
        compute = sum(trial.breakdown.on(device.name).compute for device in computing)
        return sum(row.model + row.context for row in rows) + compute

    def _top(self) -> Trial:
        """The default at the largest context that llama.cpp survives.

        It aborts, for one, where the cache of a layer is larger than a tensor may be on the device.
        """
        low, high = self.request.n_ctx_min, self.request.n_ctx_max
        try:
            return self.trial(self._default(), high)
        except LlamaCppCrashError:
            if low == high:
                raise
        best, too_large, step = self.trial(self._default(), low), high, self.request.alignment
        for _ in range(_MAX_CRASHES):
            n_ctx = (best.params.n_ctx + too_large) // 2 // step * step
            if n_ctx <= best.params.n_ctx:
                break
            try:
                best = self.trial(self._default(), n_ctx)
            except LlamaCppCrashError:
                too_large = n_ctx
        return best

    def _on_host(self) -> Trial | None:
        if self.floor is not None:
            return self._try_default(self.floor)
        low = self.request.n_ctx_min
        top = self._top()
        high = top.params.n_ctx
        if top.fits or low == high:
            return top
        bottom = self.trial(self._default(), low)
        if not bottom.fits:
            return None
        return self._largest_context(bottom, high, self._try_default, self._promises_host)

    def _try_default(self, n_ctx: int) -> Trial | None:
        trial = self.trial(self._default(), n_ctx)
        return trial if trial.fits else None

    def _default(self) -> Placement:
        """What llama.cpp would do: all layers, split by free memory, or as the user says."""
        n_units = self.request.n_layer + 1
        n_gpu_layers = self._n_gpu_layers() if self.devices else 0
        return Placement(n_units - n_gpu_layers, self._counts(n_gpu_layers))

    def _n_gpu_layers(self) -> int:
        n_units, params = self.request.n_layer + 1, self.request.params
        if "n_gpu_layers" not in self.request.fixed or params.n_gpu_layers < 0:
            return n_units
        return min(params.n_gpu_layers, n_units)

    def _counts(self, n_gpu_layers: int) -> tuple[int, ...]:
        split = self.request.params.tensor_split if "tensor_split" in self.request.fixed else None
        if split is None or not any(split):
            split = tuple(float(device.free) for device in self.devices)
        padded = (*split, *([0.0] * len(self.devices)))[: len(self.devices)]
        return counts_for_split(n_gpu_layers, padded)

    def _whole(self, n_ctx: int) -> Callable[[Room], Placement | None]:
        """Proposes to have all layers (or as many as the user says) on devices, nothing of them elsewhere."""

        def propose(room: Room) -> Placement | None:
            units, budgets = self.units(n_ctx), room.with_caches
            default = self._default()
            if "tensor_split" not in self.request.fixed:
                return pack_whole(units, budgets, default.first)
            used = map(sum, zip(weights_on(units, default), caches_on(units, default), strict=True))
            return default if all(u <= b for u, b in zip(used, budgets, strict=True)) else None

        return propose

    def _partial(self, n_ctx: int) -> Trial | None:
        """The best placement where the weights cannot all be on devices."""
        best: Trial | None = None
        styles = self._styles(n_ctx)
        chosen = styles[0]
        for spread in styles:
            if best is not None and not self._promises_better(n_ctx, spread, best):
                continue
            trial = self.settle(n_ctx, False, self._spilled(n_ctx, spread))
            trial = trial and self._fill(trial)
            if trial is not None and (best is None or rank(trial) > rank(best)):
                best, chosen = trial, spread
        if best is not None and best.fits and best.seconds is not None and len(styles) > 1:
            said = self._said(best.placement)
            other = self._propose_partial(n_ctx, self.room(n_ctx, False), not chosen)
            runner_up = None if other is None else self._said(other)
            if other is None or runner_up == said:
                self._on_choice(Choice("where the weights go", said, best.seconds))
            else:
                self._on_choice(Choice("where the weights go", said, best.seconds, runner_up, self.seconds(other)))
        return best

    def _said(self, placement: Placement) -> str:
        """Where ``placement`` has weights and caches, in words."""
        spilled = [item for item, target in placement.moved if target == HOST]
        if len(spilled) < len(placement.moved) and any(item.layer < placement.first for item, _ in placement.moved):
            return _CACHES_ON_HOST
        if any(not self.request.is_movable(f"{item.stem}.{item.suffixes[0]}") for item in spilled):
            return _CACHES
        return _TENSORS if len({item.layer for item in spilled}) > 1 else _LAYERS

    def _spilled(self, n_ctx: int, spread: bool) -> Callable[[Room], Placement | None]:
        return lambda room: self._propose_partial(n_ctx, room, spread)

    def _styles(self, n_ctx: int) -> list[bool]:
        """Ways to spill, the more promising first: single tensors of any layer (``True``), or whole layers."""
        request = self.request
        # experts apart from a layer of a remote device take another trip there
        is_far = self._is_priced and any(map(self.prices().is_remote, range(len(self.devices))))
        is_settled = request.is_expert_model and not is_far
        if not self._is_priced or is_settled or request.fixed & {"n_gpu_layers", "tensor_split"}:
            return [request.is_expert_model]
        seconds = {spread: self._expected(n_ctx, spread) for spread in (False, True)}
        return sorted(seconds, key=lambda spread: seconds[spread])

    def _expected(self, n_ctx: int, spread: bool, *, is_plain: bool = False) -> float:
        """The objective with what a way to spill proposes by what is known now, of whole layers if ``is_plain``."""
        placement = self._propose_partial(n_ctx, self.room(n_ctx, False), spread, is_plain=is_plain)
        return self.seconds(placement) if placement else math.inf

    def _promises_better(self, n_ctx: int, spread: bool, best: Trial) -> bool:
        return best.expected is not None and self._expected(n_ctx, spread) < best.expected * (1 - WORTH_A_LOAD)

    def _fill(self, trial: Trial) -> Trial:
        """Bring items back from the host one by one while the measurement says that there is room.

        A compute buffer depends on which items are where, so the estimate can end with room that it could not use.
        """
        for _ in range(_MAX_FILLS):
            placement = trial.placement
            room = [device.target - trial.breakdown.on(device.name).used for device in self.devices]
            spilled = [item for item, target in placement.moved if target == HOST]
            # from the last layer back: the first ones are what the estimate has tried
            choices = [
                (item, d)
                for d, (start, stop) in enumerate(placement.ranges())
                for item in reversed(spilled)
                if start <= item.layer < stop and item.bytes <= room[d]
            ]
            if not choices:
                break
            item, _ = max(choices, key=lambda choice: choice[0].bytes)
            moved = tuple(pair for pair in placement.moved if pair[0] != item)
            filled = self.trial(replace(placement, moved=moved), trial.params.n_ctx)
            if not filled.fits:
                break
            trial = filled
        return trial

    def _propose_partial(self, n_ctx: int, room: Room, spread: bool, *, is_plain: bool = False) -> Placement | None:
        """The placement of a part of the weights, kept for the next who asks about the same room."""
        key = n_ctx, room, spread, self._is_plain or is_plain
        if key not in self._proposals:
            self._proposals[key] = self._propose(*key)
        return self._proposals[key]

    def _propose(self, n_ctx: int, room: Room, spread: bool, is_plain: bool) -> Placement | None:
        request, units, budgets = self.request, self.units(n_ctx), room.with_caches
        apart = self._apart() if self._is_priced else 0
        first = len(units) - self._n_gpu_layers() if "n_gpu_layers" in request.fixed else None
        if "tensor_split" not in request.fixed:
            found = pack(units, budgets, spread=spread, first=first, apart=apart, times=self._times())
            found = (found and self._nearer(found, units, budgets, first)) or _nothing(units, budgets, first)
            if found is None or first is not None or not self._is_priced or is_plain:
                return found
            return self._with_caches(self._without_caches(found, units, room), units, budgets)
        choices = range(len(units), 0, -1) if first is None else (len(units) - first,)
        for n_gpu_layers in choices:
            counts = self._counts(n_gpu_layers)
            placement = pack(units, budgets, spread=True, counts=counts, apart=apart)
            if placement and (request.is_expert_model or first is not None or not placement.moved):
                return placement
        return _nothing(units, budgets, first)

    def _nearer(self, found: Placement, units: Sequence[Unit], budgets: Sequence[int], first: int | None) -> Placement:
        """``found``, or the same with tensors on the host that are apart from their layer on a remote device.

        Each of those takes a trip there; whether they are worth it, or the host has no room for them, is asked here.
        """
        if not self._is_priced:
            return found
        far = {target for _, target in found.moved if target != HOST and self.prices().is_remote(target)}
        if not far:
            return found
        nearer = pack(units, budgets, spread=True, counts=found.counts, apart=self._apart(), far=far)
        target = self.request.host.target
        if nearer is None or (target is not None and not self.request.host.paging and _on_host(units, nearer) > target):
            return found
        return min(found, nearer, key=self.seconds)

    def _without_caches(self, found: Placement, units: Sequence[Unit], room: Room) -> Placement:
        """``found``, or a faster one with more layers on the host, whose caches give way to tensors of any layer.

        Where caches are large, as with many slots, the weights of a layer do more on a device than all of it would.
        But a cache costs as much more as there are requests at once: what one request gains is not to be less, by its
        share, than what all of them at once lose.
        """
        if self._keeps_caches(found, units, room.with_caches):
            return found
        n_units, seconds = len(units), self.seconds
        far = [d for d in range(len(self.devices)) if self.prices().is_remote(d)]
        best, least = found, seconds(found)
        most = least * self.busy(found)
        tried: dict[int, float] = {}

        def attempt(first: int) -> None:
            nonlocal best, least
            if first in tried or not 0 <= first < n_units:
                return
            tried[first] = math.inf
            has_caches = any(unit.cache for unit in units[first:])
            base = pack(
                units,
                room.with_caches if has_caches else room.without,
                spread=True,
                first=first,
                apart=self._apart(),
                times=self._times(),
            )
            if base is None:
                return
            for bring in _WAYS_TO_BRING:
                placement = brought(units, room.of(units, base), base, bring, far)
                taken = seconds(placement)
                if taken < tried[first] and taken * self.busy(placement) <= most:
                    tried[first] = taken
                    if taken < least:
                        best, least = placement, taken

        stride = max(1, n_units // _STARTS)
        for first in range(0, n_units, stride):
            attempt(first)
        while stride > 1:
            stride = (stride + 1) // 2
            around = min(tried, key=lambda first: tried[first])
            attempt(around - stride)
            attempt(around + stride)
        return best

    def _with_caches(self, found: Placement, units: Sequence[Unit], budgets: Sequence[int]) -> Placement:
        """``found``, or a faster one where devices have the caches of layers whose weights are on the host.

        Attention is computed where the cache is: for long prompts, or a latent cache, that is most of a layer's time.
        """
        if not found.first or not self.devices:
            return found
        prices, gain = self.prices(), 0.0
        best, best_seconds = found, self.seconds(found)
        for unit in units[: found.first]:
            gain += prices.bare_gain(unit.index) if unit.can_be_bare else 0.0
        if gain < GAIN * best_seconds:
            return found
        for first in dict.fromkeys((0, found.first // 4, found.first // 2, 3 * found.first // 4)):
            more = 0
            while (bare := found.first - first + more) <= len(units) - 1 - first:
                placement = pack(
                    units, budgets, spread=True, first=first, apart=self._apart(), bare=bare, times=self._times()
                )
                if placement is not None:
                    if (seconds := self.seconds(placement)) < best_seconds:
                        best, best_seconds = placement, seconds
                    break
                more = 2 * more or 1
        return best

    def _keeps_caches(self, found: Placement, units: Sequence[Unit], budgets: Sequence[int]) -> bool:
        """Whether caches take so little of the devices that giving their room to weights is not worth asking."""
        is_on_host = found.first > 0 or any(target == HOST for _, target in found.moved)
        room = sum(max(0, budget) for budget in budgets)
        return not is_on_host or sum(unit.cache for unit in units) < _CACHE_SHARE * room

    def _apart(self) -> int:
        """How many bytes on devices are worth as much as a layer less that has tensors on the host."""
        prices = self.prices()
        unit = max(self._units[max(self._units)], key=lambda unit: unit.movable)
        saved = prices.saved_by_byte(unit)
        return round(prices.apart / saved) if saved > 0 else 0

    def _times(self) -> Times | None:
        # where the host has lacked room every byte on a device counts
        if not self._is_priced or self._is_plain:
            return None
        return self.prices().times(self._units[max(self._units)])

    def _promises_whole(self, n_ctx: int) -> bool:
        return self._promises_host(n_ctx) and self._whole(n_ctx)(self.room(n_ctx, True)) is not None

    def _promises_host(self, n_ctx: int) -> bool:
        target, used = self.request.host.target, self._compute[True].at("host", n_ctx)
        if any((self._shared.at(device.name, n_ctx) or 0) > device.target for device in self.request.beside):
            return False
        return target is None or used is None or self.request.host.paging or used <= target

    def _largest_context(
        self, best: Trial, too_large: int, attempt: Callable[[int], Trial | None], promises: Callable[[int], bool]
    ) -> Trial:
        """The largest context at which ``attempt`` succeeds, between that of ``best`` and ``too_large``.

        Ends when the next larger context was measured and does not fit.
        """
        step = self.request.alignment
        for tries in range(_MAX_CONTEXTS):
            low, high = best.params.n_ctx // step, -(-too_large // step)
            if high - low <= 1:
                break
            guess = (low + high) // 2
            if tries < _MAX_CONTEXTS // 2:
                guess = _last_true(low, high, lambda n: promises(n * step))
                guess = min(max(guess, low + 1), high - 1)
            trial = attempt(guess * step)
            if trial is None:
                too_large = guess * step
            else:
                best = trial
        return best

    def _context_in_total(self, top: Trial, bottom: Trial) -> int:
        """The context that the devices' memory holds in total, packing aside; on one device packing is all there is.

        Upstream's fit (``common_params_fit_impl``) settles on that context before it places a layer, and leaves half a
        layer per device (a sixth of one with experts) for what packing wastes. Weights leave the devices for no more.
        """
        # a device adds nothing that has less than packing wastes and its own compute buffer take
        by_size = sorted(self.devices, key=lambda device: -device.target)
        return max(self._in_total(top, bottom, by_size[:n]) for n in range(1, len(by_size) + 1))

    def _in_total(self, top: Trial, bottom: Trial, devices: Sequence[DeviceLimit]) -> int:
        request = self.request
        low, high = request.n_ctx_min, request.n_ctx_max
        if len(devices) < 2:
            return low
        target = sum(device.target for device in devices)
        used_top, used_bottom = (self._used(trial, devices) for trial in (top, bottom))
        if used_top <= target:
            return high
        waste = top.weights // max(1, request.n_layer) // (6 if request.is_expert_model else 2)
        target -= (len(devices) + 1) * waste
        if target <= used_bottom or used_top <= used_bottom:
            return low
        n_ctx = low + (high - low) * (target - used_bottom) // (used_top - used_bottom)
        return max(low, n_ctx - n_ctx % request.alignment)


def _lacks_less(trial: Trial, than: Trial) -> bool:
    """Whether ``trial`` lacks fewer bytes; of those that lack about the same the one that does in fewer places."""
    is_alike = abs(trial.deficit - than.deficit) <= _ALIKE * than.deficit
    if is_alike and len(trial.missing) != len(than.missing):
        return len(trial.missing) < len(than.missing)
    return trial.deficit < than.deficit


def _on_host(units: Sequence[Unit], placement: Placement) -> int:
    """Bytes of layers and tensors that are left to the host."""
    layers = sum(unit.weights + unit.cache for unit in units[: placement.first])
    return layers + sum(item.bytes for item, target in placement.moved if target == HOST)


def _nothing(units: Sequence[Unit], budgets: Sequence[int], first: int | None) -> Placement | None:
    """All layers on the host: the last resort, unless the user wants some elsewhere."""
    return Placement(len(units), (0,) * len(budgets)) if first is None or first == len(units) else None


def _last_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number in [low, high) for which ``holds``, taken to be true up to a point; ``low`` is not asked."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
