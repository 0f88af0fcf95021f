"""State of a search on some devices: recorded sizes, trials, learned compute buffers, prices. Bytes.

The only state of a search. All other modules propose from it, ask it for a trial, and read it again. No estimate is
accepted: every ``Trial`` is a dummy load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fitter.errors import TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement, on_host
from fitter.planning.pricing.objective import best_of, lacks_less
from fitter.planning.pricing.prices import PriceList, Prices
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request import context_limit, given, pool_margin
from fitter.planning.request.request import DeviceLimit, Measure, Record, Request
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.search import proposals
from fitter.planning.search.proposals import Situation
from fitter.planning.search.room import Buffers, Cached, Room, Use, cached_on, off_by, room_left_by
from fitter.planning.speed.explain import Choice
from fitter.planning.speed.work import resized_layout

_T = TypeVar("_T")


@dataclass(frozen=True)
class Callbacks:
    """Functions that a search calls: dummy loads of llama.cpp, and reports of choices to the caller.

    ``has_room``: whether a real load is not known to need more memory than there is.
    """

    measure: Measure
    record: Record
    on_choice: Callable[[Choice], None] = lambda choice: None
    has_room: Callable[[Params], bool] = lambda params: True


class CutShort(Exception):
    """The time limit was reached after a trial that fits."""

    def __init__(self, best: Trial) -> None:
        super().__init__()
        self.best = best


class FittingTrials:
    """The trials of a whole search that fit, on any of its devices. A time limit ends with the best of them."""

    def __init__(self) -> None:
        self._trials: list[Trial] = []

    @property
    def trials(self) -> Sequence[Trial]:
        """The noted trials."""
        return self._trials

    def note(self, trial: Trial) -> None:
        """Remember ``trial`` if it fits."""
        if trial.fits:
            self._trials.append(trial)

    def has_pipeline(self, request: Request, n_ctx: int) -> bool:
        """Whether devices work on several micro batches at once in a trial with a context of ``n_ctx`` or more."""
        return any(
            trial.params.n_ctx >= n_ctx and given.is_pipelined(request, trial.devices, trial.placement)
            for trial in self._trials
        )

    def best(self, request: Request, like: Trial | None = None) -> Trial | None:
        """Return the best trial. Any trial with a price is better than one without.

        ``like``: a trial; without integrated GPUs that llama.cpp does not use by default if it has none.
        """
        trials = [trial for trial in self._trials if like is None or like.uses_integrated or not trial.uses_integrated]
        return best_of(trials, request) if trials else None


class SearchState:
    """State of a search on ``devices``.

    ``original_request`` is the request as it came; ``request`` has no more context than these devices take.
    ``is_plain``: layers have their cache and their weights in one place. ``closed``: names of the user's devices that
    get nothing.

    Args:
        previous: another state, whose facts that do not depend on devices are taken over.
    """

    def __init__(
        self,
        original_request: Request,
        devices: tuple[DeviceLimit, ...],
        callbacks: Callbacks,
        previous: SearchState | None = None,
        closed: frozenset[str] = frozenset(),
    ) -> None:
        self.original_request = original_request
        self.request = context_limit.within(original_request, devices)
        self.devices = devices
        self.closed = closed
        self.callbacks = callbacks
        self.is_priced = given.is_priced(original_request)
        self.is_plain: bool = previous.is_plain if previous else False
        self.buffers: Buffers = Buffers(previous.buffers.shared if previous else None)
        self.has_lost_flash = False
        """Whether ``auto`` turned flash attention off in a trial that did not fit."""
        self.least: Trial | None = None
        """The trial that lacks the fewest bytes."""
        self._least_is_guess = False
        self.answer: FittingTrials = previous.answer if previous else FittingTrials()
        self._last: Trial | None = None
        self._trials: dict[Params, Trial] = {}
        self._records: list[tuple[Layout, Params]] = previous._records if previous else []
        # a sliding window's cache has cells for a micro batch, too
        params, has_window = self.request.params, self.request.facts.window and not self.request.params.swa_full
        self._sizes: dict[int, tuple[dict[int, tuple[Unit, ...]], dict[int, Layout]]]
        self._sizes = previous._sizes if previous else {}
        self._units, self._layouts = self._sizes.setdefault(params.n_ubatch if has_window else 0, ({}, {}))
        self._without_caches: dict[int, tuple[Unit, ...]] = {}
        self._situations: dict[tuple[object, ...], Situation] = {}
        self._partial: dict[tuple[object, ...], Placement | None] = {}
        self._fastest_first: dict[int, int] = previous._fastest_first if previous else {}
        self._price_lists: dict[tuple[object, ...], PriceList] = previous._price_lists if previous else {}
        # prices hold at every context
        key = devices, replace(params, n_ctx=0)
        if key not in self._price_lists:
            self._price_lists[key] = PriceList(self.request, devices, self._units, self._layouts)
        self._prices = self._price_lists[key]

    def on(self, devices: tuple[DeviceLimit, ...], request: Request | None = None) -> SearchState:
        """Make the state of the same search on other devices, or for another request.

        The user's devices stay: those that are not among ``devices`` get nothing.
        """
        request = request or self.original_request
        named = request.devices if "devices" in request.fixed and devices else devices
        closed = frozenset(device.name for device in named if device not in devices)
        return SearchState(request, named, self.callbacks, self, closed)

    def at(self, n_ctx: int) -> SearchState:
        """Make the state of the same search at one context, on the devices that accept it."""
        params = replace(self.original_request.params, n_ctx=n_ctx)
        request = replace(self.original_request, params=params, fixed=self.original_request.fixed | {"n_ctx"})
        state = self.on(context_limit.usable(request, self.open), request)
        if state.open == self.open:
            state.buffers.share_whole(self.buffers)
            state._situations, state._partial = self._situations, self._partial
        return state

    def with_micro_batch(self, n_ubatch: int) -> SearchState:
        """Make the state of the same search with another micro batch; its compute buffers are not known yet."""
        return self.on(self.open, given.with_micro_batch(self.original_request, n_ubatch))

    def with_buffers_of(self, other: SearchState) -> SearchState:
        """Take over the compute buffers that ``other`` has learned."""
        renamed = {}
        if self.devices and other.devices and self.devices[0] != other.devices[0]:
            # the first device also computes with the host's weights
            renamed = {self.devices[0].name: other.devices[0].name, other.devices[0].name: self.devices[0].name}
        self.buffers.take_over(other.buffers, renamed)
        return self

    def be_plain(self) -> None:
        """Keep caches with their layers from now on, and forget compute buffers of other placements."""
        if not self.is_plain:
            self.is_plain = True
            self.buffers.forget_partial()

    # sizes

    def units(self, n_ctx: int, is_whole: bool = True) -> tuple[Unit, ...]:
        """Sizes of layers and their caches on devices at ``n_ctx``; estimated from a recorded context.

        Unless the model ``is_whole`` on devices, a layer has its part of a cache of experts: llama.cpp splits it as
        the layers, and makes none without experts on the host.
        """
        if n_ctx not in self._units:
            pinned = dict.fromkeys(self.request.too_large, HOST) | self.request.pinned
            self._units[n_ctx] = units_of(self._layout(n_ctx), self.request.n_layer, self.request.is_movable, pinned)
        units = self._units[n_ctx]
        if not self.request.params.offload_kqv:
            if n_ctx not in self._without_caches:
                self._without_caches[n_ctx] = tuple(replace(unit, cache=0, state=0) for unit in units)
            units = self._without_caches[n_ctx]
        each = 0 if is_whole else self.request.params.moe_cache_size // len(units)
        return tuple(replace(unit, fixed=unit.fixed + each) for unit in units) if each else units

    def _layout(self, n_ctx: int) -> Layout:
        """Return the sizes of all tensors at ``n_ctx``: recorded the first time, else estimated from that record."""
        if n_ctx not in self._layouts:
            params = replace(self.request.params, n_ctx=n_ctx, tensor_buft_overrides=())
            if not self._records:
                self._records.append((self._ask(self.callbacks.record, params), params))
            recorded, before = self._records[0]
            is_same = before == params
            self._layouts[n_ctx] = recorded if is_same else resized_layout(self.request.facts, recorded, before, params)
        return self._layouts[n_ctx]

    @property
    def smallest_layout(self) -> Layout | None:
        """The layout at the smallest context of a plan; ``None`` before any was recorded."""
        return self._layout(self.smallest_context) if self._records else None

    @property
    def smallest_context(self) -> int:
        """The smallest context that a plan may have."""
        return given.smallest_context(self.request)

    @property
    def default(self) -> Placement:
        """llama.cpp's own placement, or the user's."""
        return given.default_placement(self.request, self.devices)

    # prices

    @property
    def open(self) -> tuple[DeviceLimit, ...]:
        """The devices that may get something."""
        return tuple(device for device in self.devices if device.name not in self.closed)

    @property
    def can_price(self) -> bool:
        """Whether placements have prices: not before sizes were recorded."""
        return self.is_priced and bool(self._records)

    @property
    def chooses_devices(self) -> bool:
        """Whether the search chooses the devices, not the user."""
        return given.chooses_devices(self.request, self.devices)

    @property
    def chooses_split(self) -> bool:
        """Whether the search chooses how many layers each device has, not the user."""
        return given.chooses_split(self.request, self.devices)

    @property
    def keeps_on_host(self) -> bool:
        """Whether llama.cpp keeps some weights of layers on devices on the host. Without prices: ``False``."""
        return self.is_priced and bool(self.prices().host_only)

    def prices(self) -> Prices:
        """Return prices on all devices. Records sizes at the smallest context if none were recorded."""
        if not self._units:
            self.units(self.smallest_context)
        return self._prices.all

    def seconds(self, placement: Placement, measured: Breakdown | None = None) -> float:
        """Estimate the objective with ``placement``; see ``Prices.seconds``."""
        self.prices()
        return self._prices.seconds(placement, measured)

    # proposals

    def room(self, n_ctx: int, is_whole: bool, optimistic: bool = False) -> Room:
        """Bytes of weights and caches that each device may hold, by the latest measurements."""
        return self.buffers.room(self._limits(n_ctx, is_whole), n_ctx, is_whole, self._off_by(), optimistic)

    def has_room_idle(self, n_ctx: int) -> bool:
        """Whether the first device has room to compute prompts with the host's weights, and has none itself."""
        compute = self.buffers.idle(self.devices[0].name, n_ctx)
        if compute is None:
            return self.room(n_ctx, is_whole=False).without[0] >= 0
        return compute <= self.devices[0].target

    def _limits(self, n_ctx: int, is_whole: bool) -> tuple[DeviceLimit, ...]:
        """Limit closed devices to nothing, and those that share the host's memory to what it is expected to leave.

        Where weights are on the host, moving more of them there frees no memory of a pool, unless they may be paged.
        """
        request, closed = self.request, self.closed
        devices = tuple(replace(each, margin=each.free) if each.name in closed else each for each in self.devices)
        pools = [pool for pool in request.pools if is_whole or (request.host.paging and pool_margin.pages(pool))]
        used = [(pool, self.buffers.beside_devices(pool.name, n_ctx, is_whole)) for pool in pools]
        return pool_margin.beside_host(devices, used)

    def room_left_by(self, trial: Trial, is_whole: bool) -> Room:
        """``room`` with the compute buffers of ``trial`` for the devices that it uses."""
        self._last = trial
        n_ctx = trial.params.n_ctx
        limits = self._limits(n_ctx, is_whole)
        return room_left_by(trial, self.units(n_ctx), self.room(n_ctx, is_whole), self._off_by(), limits)

    def _off_by(self) -> list[int]:
        if self._last is None:
            return [0] * len(self.devices)
        is_whole = given.is_whole(self.request, self._last.devices, self._last.placement)
        off = off_by(self._last, self.units(self._last.params.n_ctx, is_whole))
        # a device without experts on the host leaves its part of a cache to others, until it has some
        return [max(0, each) for each in off] if self.request.params.moe_cache_size else off

    def situation(self, n_ctx: int, is_whole: bool, optimistic: bool = False, room: Room | None = None) -> Situation:
        """Describe the placement problem at ``n_ctx``, with the expected ``room`` if none is given."""
        prices = self._prices if self.is_priced else None
        units, room = self.units(n_ctx, is_whole), room or self.room(n_ctx, is_whole, optimistic)
        return Situation(
            self.request,
            self.devices,
            n_ctx,
            units,
            room,
            prices,
            self.is_plain,
            near=self._fastest_first,
        )

    def place_partial(self, at: Situation) -> Placement | None:
        """Call ``proposals.place_partial``, once for each room."""
        key = at.n_ctx, at.units, at.room, at.is_plain, self._prices.spilled_flash
        at = self._situations.setdefault(key, at)
        if key not in self._partial:
            self._partial[key] = proposals.place_partial(at)
        return self._partial[key]

    # trials

    def loses_pipeline(self, placement: Placement, n_ctx: int) -> bool:
        """Whether devices could work on several micro batches at once, and with ``placement`` they do not."""
        if given.ends_pipeline(self.request, self.devices, placement):
            return self.answer.has_pipeline(self.request, n_ctx)
        return given.loses_pipeline(self.request, self.devices, placement)

    def params_of(self, placement: Placement, n_ctx: int) -> Params:
        """Write ``placement`` as parameters of llama.cpp."""
        return given.params_of(self.request, self.devices, placement, n_ctx)

    def trial(self, placement: Placement, n_ctx: int) -> Trial:
        """Measure a placement with a dummy load, once."""
        params = self.params_of(placement, n_ctx)
        if params not in self._trials:
            trial = self._trials[params] = self._measure_trial(placement, params)
            self.learn(trial)
            if not self.loses_pipeline(placement, n_ctx):
                self.answer.note(trial)
        self._last = self._trials[params]
        return self._last

    def _measure_trial(self, placement: Placement, params: Params) -> Trial:
        breakdown = self._ask(self.callbacks.measure, params)
        missing = missing_of(self.request, breakdown, self.devices)
        if not missing and not self.callbacks.has_room(params):
            # a byte is enough: the trial does not fit, and lacks less than any other
            missing = ((next((device.name for device in self.devices), HOST_NAME), 1),)
        if not given.is_whole(self.request, self.devices, placement):
            # estimates of such placements before and after have the same attention
            self._prices.spilled_flash = breakdown.flash_attn
        expected = self.seconds(placement) if self.can_price else None
        seconds = self.seconds(placement, breakdown) if self.can_price else None
        return Trial(placement, self.devices, params, breakdown, missing, seconds, expected)

    def learn(self, trial: Trial, *, is_partial: bool = False) -> None:
        """Learn the compute buffers of a trial, and remember it where it lacks the fewest bytes.

        ``is_partial``: it was proposed for a part of the weights, though it has all of them on devices.
        """
        placement, n_ctx = trial.placement, trial.params.n_ctx
        self.has_lost_flash |= trial.lost_flash and not trial.fits
        is_whole = not is_partial and given.is_whole(self.request, self.devices, placement)
        # the lack of a placement proposed before any compute buffer was known means little
        is_guess = not is_whole and not self.buffers.knows_any
        cached: list[Cached] = ["attention" if placement.first else "layers"] * len(self.devices)
        if self.can_price:
            cached = cached_on(self.units(n_ctx), placement)
        # an idle device's compute buffer says nothing of its buffer with a layer
        used: dict[str, Use] = {d.name: cached[i] for i, d in enumerate(self.devices) if i not in placement.idle}
        if 0 in placement.idle and not is_whole:
            used[self.devices[0].name] = "idle"
        layers: int | None = 0
        if not is_whole:
            layers = on_host(self.units(n_ctx), placement) if self._records else None
        pools = pool_margin.parts(self.request, trial.breakdown)
        self.buffers.learn(trial.breakdown, n_ctx, is_whole, used, layers, pools)
        if self.least is None or self._least_is_guess or lacks_less(trial, self.least):
            self.least, self._least_is_guess = trial, is_guess

    def _ask(self, llama: Callable[[Params], _T], params: Params) -> _T:
        try:
            return llama(params)
        except TimeLimitError as error:
            best = self.answer.best(self.original_request)
            if best is None:
                raise
            raise CutShort(best) from error
