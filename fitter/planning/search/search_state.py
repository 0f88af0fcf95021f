"""What is known in a search on given devices: sizes recorded, trials made, compute buffers learned, prices. Bytes.

The only state of a search. Everything else proposes from it, asks it for a trial, and reads it again. Nothing is
accepted on an estimate: every ``Trial`` is a dummy load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from fitter.errors import TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params
from fitter.planning.placing.layer_sizes import HOST, Unit, between, units_of
from fitter.planning.placing.placement import Placement, caches_on
from fitter.planning.pricing.objective import is_better, lacks_less, rank
from fitter.planning.pricing.prices import PriceList, Prices
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request import context_limit, given, shared_margin
from fitter.planning.request.request import DeviceLimit, Measure, Record, Request
from fitter.planning.search import proposals
from fitter.planning.search.compute_buffers import Buffers
from fitter.planning.search.proposals import Situation
from fitter.planning.search.room import Room, off_by, room_left_by
from fitter.planning.speed.explain import Choice

_T = TypeVar("_T")


@dataclass(frozen=True)
class Callbacks:
    """Whom a search asks and tells: llama.cpp for dummy loads, the caller of candidates and of what was chosen."""

    measure: Measure
    record: Record
    on_candidate: Callable[[Params], None] = lambda params: None
    on_choice: Callable[[Choice], None] = lambda choice: None


class CutShort(Exception):
    """The time limit was reached, with something that fits."""

    def __init__(self, best: Trial) -> None:
        super().__init__()
        self.best = best


class _Answer:
    """The best plan of a whole search, on whichever devices it was found: what a time limit ends with."""

    def __init__(self) -> None:
        self.best: Trial | None = None

    def note(self, request: Request, trial: Trial) -> None:
        """Remember ``trial`` if it fits and is the better one. What has no price is only compared with its like."""
        best = self.best
        if trial.fits and (best is None or best.seconds is None or trial.seconds is not None):
            has_like = best is not None and (best.seconds is None) == (trial.seconds is None)
            if best is None or not has_like or is_better(request, trial, best):
                self.best = trial


class SearchState:
    """What a search on ``devices`` knows.

    ``original_request`` is the request as it came, ``request`` the same with no more context than these devices take.
    With ``before`` it begins with what another search knows that does not depend on its devices. ``is_plain``: layers
    are to have their cache and their weights in one place.
    """

    def __init__(
        self,
        original_request: Request,
        devices: tuple[DeviceLimit, ...],
        callbacks: Callbacks,
        before: SearchState | None = None,
    ) -> None:
        self.original_request = original_request
        self.request = context_limit.within(original_request, devices)
        self.devices = devices
        self.callbacks = callbacks
        self.is_priced = given.is_priced(original_request)
        self.is_plain: bool = before.is_plain if before else False
        self.buffers: Buffers = Buffers(before.buffers.shared if before else None)
        self.has_lost_flash = False
        """Whether ``auto`` turned flash attention off in something that did not fit."""
        self.least: Trial | None = None
        """The trial that lacks least."""
        self._least_is_guess = False
        self._best: Trial | None = before._best if before else None
        self._answer: _Answer = before._answer if before else _Answer()
        self._last: Trial | None = None
        self._trials: dict[Params, Trial] = {}
        self._units: dict[int, tuple[Unit, ...]] = before._units if before else {}
        self._layouts: dict[int, Layout] = before._layouts if before else {}
        self._estimated: dict[int, tuple[Unit, ...]] = {}
        self._prices = PriceList(self.request, devices, self._units, self._layouts)
        self._partial: dict[tuple[int, Room, bool, bool], Placement | None] = {}

    def on(self, devices: tuple[DeviceLimit, ...], request: Request | None = None) -> SearchState:
        """What is known of the same search on other devices, or for another request."""
        return SearchState(request or self.original_request, devices, self.callbacks, self)

    def with_buffers_of(self, other: SearchState) -> SearchState:
        """This, for which compute buffers are taken to be those that ``other`` has learned."""
        renamed = {}
        if self.devices and other.devices and self.devices[0] != other.devices[0]:
            # what the host has goes through the first one
            renamed = {self.devices[0].name: other.devices[0].name, other.devices[0].name: self.devices[0].name}
        self.buffers.take_over(other.buffers, renamed)
        return self

    def be_plain(self) -> None:
        """Have whole layers and tensors of them placed from now on; what others needed says nothing of those."""
        if not self.is_plain:
            self.is_plain = True
            self.buffers.forget_partial()

    # sizes

    def units(self, n_ctx: int) -> tuple[Unit, ...]:
        """Layers with their caches at ``n_ctx``; between two recorded contexts an estimate."""
        request = self.request
        low, high = request.n_ctx_min, request.n_ctx_max
        if "n_ctx" in request.fixed or n_ctx in (low, high):
            return self._recorded(n_ctx)
        if n_ctx not in self._estimated:
            self._estimated[n_ctx] = between(self._recorded(low), low, self._recorded(high), high, n_ctx)
        return self._estimated[n_ctx]

    def _recorded(self, n_ctx: int) -> tuple[Unit, ...]:
        if n_ctx not in self._units:
            request = self.request
            layout = self._ask(self.callbacks.record, replace(request.params, n_ctx=n_ctx, tensor_buft_overrides=()))
            self._layouts[n_ctx] = layout
            elsewhere = dict.fromkeys(request.too_large, HOST) | request.pinned
            self._units[n_ctx] = units_of(layout, request.n_layer, request.is_movable, elsewhere)
        return self._units[n_ctx]

    @property
    def smallest_layout(self) -> Layout | None:
        """What was recorded at the smallest context, ``None`` where nothing was."""
        return self._layouts[min(self._layouts)] if self._layouts else None

    @property
    def smallest_context(self) -> int:
        """The smallest context that a plan may have."""
        return given.smallest_context(self.request)

    @property
    def default(self) -> Placement:
        """What llama.cpp would do by itself, or as the user says."""
        return given.default_placement(self.request, self.devices)

    # prices

    @property
    def can_price(self) -> bool:
        """Whether there is anything to price by: where nothing was recorded there is nothing to choose between."""
        return self.is_priced and bool(self._units)

    @property
    def chooses_devices(self) -> bool:
        """Whether it is for the search to say which devices have the model."""
        return given.chooses_devices(self.request, self.devices)

    @property
    def keeps_on_host(self) -> bool:
        """Whether llama.cpp keeps weights on the host whose layer is on a device; asked where things are priced."""
        return self.is_priced and bool(self.prices().kept)

    def prices(self) -> Prices:
        """Prices on all devices; where nothing was recorded, the smallest context is."""
        if not self._units:
            self._recorded(self.smallest_context)
        return self._prices.all

    def seconds(self, placement: Placement, measured: Breakdown | None = None) -> float:
        """The objective with ``placement``; see ``Prices.seconds``."""
        return self._prices.seconds(placement, measured)

    # proposals

    def room(self, n_ctx: int, is_whole: bool, optimistic: bool = False) -> Room:
        """What each device may hold of weights and caches, by what was measured last."""
        return self.buffers.room(self._with_pools(n_ctx, is_whole), n_ctx, is_whole, self._off_by(), optimistic)

    def _with_pools(self, n_ctx: int, is_whole: bool) -> tuple[DeviceLimit, ...]:
        """The devices with what the host is expected to leave of memory that they share with it.

        Where weights are on the host, moving more of them there leaves no more, unless they may be paged.
        """
        request = self.request
        pools = [pool for pool in request.pools if is_whole or (request.host.paging and shared_margin.pages(pool))]
        return shared_margin.beside_host(
            self.devices, [(pool, self.buffers.beside(pool.name, n_ctx, is_whole)) for pool in pools]
        )

    def room_left_by(self, trial: Trial, is_whole: bool) -> Room:
        """The same, but of the devices that ``trial`` uses what its own compute buffers leave."""
        self._last = trial
        n_ctx = trial.params.n_ctx
        devices = self._with_pools(n_ctx, is_whole)
        return room_left_by(trial, self.units(n_ctx), self.room(n_ctx, is_whole), self._off_by(), devices)

    def _off_by(self) -> list[int]:
        if self._last is None:
            return [0] * len(self.devices)
        return off_by(self._last, self.units(self._last.params.n_ctx))

    def situation(self, n_ctx: int, room: Room) -> Situation:
        """What there is to place at ``n_ctx``."""
        prices = self._prices if self.is_priced else None
        return Situation(self.request, self.devices, n_ctx, self.units(n_ctx), room, prices, self.is_plain)

    def partial(self, at: Situation, spread: bool, *, is_plain: bool = False) -> Placement | None:
        """``proposals.partial``, kept for the next who asks about the same room."""
        key = at.n_ctx, at.room, spread, self.is_plain or is_plain
        if key not in self._partial:
            self._partial[key] = proposals.partial(at, spread, is_plain=self.is_plain or is_plain)
        return self._partial[key]

    # trials

    def params_of(self, placement: Placement, n_ctx: int) -> Params:
        """The parameters that say ``placement`` to llama.cpp."""
        return given.params_of(self.request, self.devices, placement, n_ctx)

    def trial(self, placement: Placement, n_ctx: int) -> Trial:
        """Measure a placement, or remember that it was."""
        params = self.params_of(placement, n_ctx)
        if params not in self._trials:
            trial = self._trials[params] = self._measured(placement, params)
            self._learn(trial)
            if trial.fits and (self._best is None or rank(trial) > rank(self._best)):
                self._best = trial
                self.callbacks.on_candidate(params)
            self._answer.note(self.original_request, trial)
        self._last = self._trials[params]
        return self._last

    def _measured(self, placement: Placement, params: Params) -> Trial:
        breakdown = self._ask(self.callbacks.measure, params)
        missing = missing_of(self.request, breakdown, self.devices)
        expected = self.seconds(placement) if self.can_price else None
        seconds = self.seconds(placement, breakdown) if self.can_price else None
        return Trial(placement, self.devices, params, breakdown, missing, seconds, expected)

    def _learn(self, trial: Trial) -> None:
        placement, n_ctx = trial.placement, trial.params.n_ctx
        is_off = trial.params.flash_attn == "auto" and trial.breakdown.flash_attn is False
        self.has_lost_flash |= is_off and not trial.fits
        is_whole = given.is_whole(self.request, self.devices, placement)
        # a placement proposed before any compute buffer was known says little of what is missing
        is_guess = not is_whole and not self.buffers.knows_any
        caches = caches_on(self.units(n_ctx), placement) if self.can_price else [1] * len(self.devices)
        # what a device needs without a layer says nothing of what it needs with one
        used = {d.name: bool(caches[i]) for i, d in enumerate(self.devices) if i not in placement.idle}
        self.buffers.learn(trial.breakdown, n_ctx, is_whole, used, shared_margin.parts(self.request, trial.breakdown))
        if self.least is None or self._least_is_guess or lacks_less(trial, self.least):
            self.least, self._least_is_guess = trial, is_guess

    def _ask(self, llama: Callable[[Params], _T], params: Params) -> _T:
        try:
            return llama(params)
        except TimeLimitError as error:
            if self._answer.best is None:
                raise
            raise CutShort(self._answer.best) from error
