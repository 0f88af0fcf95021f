"""Estimated time of placements of one model on given devices, before a measurement. Seconds.

The search compares proposals by it; only a dummy load accepts one. ``pricing`` estimates measured loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from fitter.llama.types import Breakdown, Layout
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.placement import Placement
from fitter.planning.placing.spill import Times
from fitter.planning.pricing.objective import workload_of
from fitter.planning.request.given import devices_in_use
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.speed.cost import (
    PriceBasis,
    Seconds,
    Work,
    layer_seconds,
    logits_seconds,
    seconds_at,
    setting,
    tensor_seconds,
    visit_seconds,
)
from fitter.planning.speed.work import (
    NO_HOST_ONLY,
    HostOnlyTensors,
    Pieces,
    as_measured,
    host_only_tensors,
    pieces_of,
    work_of,
)


def pinned_on(request: Request, devices: Sequence[DeviceLimit]) -> dict[str, int]:
    """Map the user's pinned tensors to indices of ``devices``, or ``HOST`` for devices that are not among them."""
    index_of = {request.devices.index(device): d for d, device in enumerate(devices)}
    return {name: index_of.get(target, HOST) for name, target in request.pinned.items()}


def in_memory(request: Request, work: Work, measured: Breakdown | None = None) -> Work:
    """Return ``work`` with the host's memory for its weights where they may exceed it: all of it, or what is left
    beside the rest if ``measured``.
    """
    target = request.host.target
    if not request.host.paging or target is None:
        return work
    rest = measured.host.used - measured.host.model if measured else 0
    return replace(work, host_room=max(0, target - rest))


class Prices:
    """Prices of placements on ``devices``, in their order, by the request's objective. Seconds.

    They hold at every context, since a token's part of the cache does.

    Args:
        units: the units as recorded at a context of ``n_ctx``.
        host_only: tensors that llama.cpp keeps on the host (``work.host_only_tensors``).
    """

    def __init__(
        self,
        request: Request,
        devices: Sequence[DeviceLimit],
        units: Sequence[Unit],
        n_ctx: int,
        host_only: HostOnlyTensors = NO_HOST_ONLY,
    ) -> None:
        assert request.host_speed is not None
        self._request = request
        self._names = [device.name for device in devices]
        self._devices = [request.speeds[name] for name in self._names]
        self._host = request.host_speed
        pinned = pinned_on(request, devices)
        self._pieces: Pieces = pieces_of(request.facts, units, n_ctx, request.params, None, pinned, host_only)
        self._flash: dict[bool | None, Pieces] = {}
        self._n_units = len(units)
        self._times: Times | None = None
        self._unit_seconds: dict[int, list[float]] = {}

    @property
    def host_only(self) -> HostOnlyTensors:
        """Tensors that llama.cpp keeps on the host although their layer is on these devices, as far as recorded."""
        return self._pieces.host_only

    def seconds(self, placement: Placement, measured: Breakdown | None = None, flash: bool | None = None) -> float:
        """Estimate the objective with ``placement``, by its graph splits and attention if measured.

        ``flash``: whether flash attention is expected to be on; ``None`` if not known.
        """
        pieces, n_splits = self._with_flash(flash), None
        if measured is not None:
            pieces, n_splits = self._with_flash(measured.flash_attn), measured.n_splits
            if pieces.host_only:
                on_devices = [measured.on(name).model for name in self._names]
                pieces = as_measured(pieces, work_of(pieces, placement), on_devices)
        work = in_memory(self._request, work_of(pieces, placement, n_splits), measured)
        seconds = self._setting.request(seconds_at(work, self._setting))
        # equal placements cost the same, in whatever order their layers are added up: the first of them is proposed
        return float(f"{seconds:.12g}")

    def _with_flash(self, flash: bool | None) -> Pieces:
        if flash not in self._flash:
            attention = tuple(each and replace(each, flash=bool(flash)) for each in self._pieces.attention)
            is_same = flash is None or attention == self._pieces.attention
            self._flash[flash] = self._pieces if is_same else replace(self._pieces, attention=attention)
        return self._flash[flash]

    def unit_seconds(self, place: int) -> list[float]:
        """Estimate the objective's part of each unit that is whole at ``place``: a device's index, or ``HOST``."""
        if place not in self._unit_seconds:
            at, (*layers, output) = self._setting, self._pieces.whole(place)
            seconds = [at.request(at.priced(layer).seconds) for layer in layers]
            # generation does not compute the layers for multi-token prediction
            seconds += [0.0] * (self._n_units - len(layers))
            seconds[-1] = at.request(at.priced(output).seconds + logits_seconds(output, at))
            self._unit_seconds[place] = seconds
        return self._unit_seconds[place]

    def times(self, units: Sequence[Unit]) -> Times | None:
        """Estimate the seconds of ``units`` on each device; ``None`` where all are alike, so that only bytes count."""
        if len(set(self._devices)) < 2:
            return None
        if self._times is None:
            largest = max(units, key=lambda unit: unit.movable)
            devices = range(len(self._devices))
            self._times = Times(
                tuple(tuple(self.unit_seconds(d)) for d in devices),
                tuple(self.saved_by_byte(largest.items, d) for d in devices),
            )
        return self._times

    @cached_property
    def hop(self) -> float:
        """Seconds to pass on from one device to the next."""
        costs = self._setting.costs
        return self._setting.request(Seconds(costs.hop + costs.split, costs.hop + costs.split))

    @cached_property
    def visits(self) -> list[float]:
        """Seconds to each device and back over its network; 0 for a local device."""
        return [self._setting.request(visit_seconds(d, self._setting)) for d in range(len(self._devices))]

    def is_remote(self, device: int) -> bool:
        """Whether a device is on another machine."""
        return self._devices[device].is_remote

    def bare_gain(self, index: int) -> float:
        """Estimate the seconds that a layer on the host saves if only its cache is on the first device."""
        if index >= len(self._pieces.facts.layers):
            return 0.0
        at, host = self._setting, self._pieces.layer(index, HOST)
        on_device = replace(self._pieces.layer(index, 0), weights=host.weights)
        split = at.request(Seconds(at.costs.split, at.costs.split))
        return (
            at.request(layer_seconds(host, at))
            - at.request(layer_seconds(on_device, at))
            - at.costs.splits.bare * split
        )

    def streaming(self, device: int) -> float:
        """Estimate the seconds of the largest host layer in prompts, streamed through ``device`` as the first."""
        at = self._setting.on((self._devices[device],))
        # tensors that the user has put on a device are not streamed
        layers = self._pieces.whole(HOST)[:-1]
        streamed = [[weights for weights in layer.weights if weights.place == HOST] for layer in layers]
        largest = max(streamed, key=lambda layer: sum(weights.bytes for weights in layer))
        return at.request(sum((tensor_seconds(weights, at) for weights in largest), Seconds()))

    def saved_by_byte(self, items: Sequence[Item], device: int = 0) -> float:
        """Estimate the seconds that a byte of a layer's ``items`` saves on ``device`` instead of the host."""
        if not items:
            return 0.0
        apart = tuple((item.names, HOST) for item in items)
        index = min(items[0].layer, len(self._pieces.facts.layers))
        home, away = (
            sum((tensor_seconds(w, self._setting) for w in self._pieces.layer(index, device, where).weights), Seconds())
            for where in ((), apart)
        )
        return (self._setting.request(away) - self._setting.request(home)) / sum(item.bytes for item in items)

    @cached_property
    def _setting(self) -> PriceBasis:
        work = work_of(self._pieces, Placement(self._n_units, (0,) * len(self._devices)))
        return setting(work, self._devices, self._host, workload_of(self._request))


class PriceList:
    """Prices on ``devices``, and for a placement with idle devices on its others alone: idle devices take no part.

    Prices are made when they are first asked for, with the units of the largest context that is then recorded.

    Args:
        recorded: units by context, as far as recorded.
        layouts: the layouts of those units, to tell which weights llama.cpp keeps on the host.
    """

    def __init__(
        self,
        request: Request,
        devices: tuple[DeviceLimit, ...],
        recorded: Mapping[int, Sequence[Unit]],
        layouts: Mapping[int, Layout] | None = None,
    ) -> None:
        self._request = request
        self._devices = devices
        self._recorded = recorded
        self._layouts = {} if layouts is None else layouts
        self._in_use: dict[tuple[int, ...], Prices] = {}
        self.spilled_flash: bool | None = None
        """Whether flash attention was on with weights on the host; ``None`` before a measurement."""

    @cached_property
    def all(self) -> Prices:
        """Prices on all devices."""
        return self._on(tuple(range(len(self._devices))))

    def seconds(self, placement: Placement, measured: Breakdown | None = None) -> float:
        """Estimate the objective with ``placement``; see ``Prices.seconds``."""
        every = range(len(self._devices))
        # in most placements none is idle
        used = tuple(devices_in_use(self._request, self._devices, placement) if 0 in placement.counts else every)
        on_used = placement if len(used) == len(every) else placement.on(used)
        is_spilled = placement.first > 0 or placement.moved
        return self._on(used).seconds(on_used, measured, self.spilled_flash if is_spilled else None)

    def _on(self, indices: tuple[int, ...]) -> Prices:
        if indices in self._in_use:
            return self._in_use[indices]
        n_ctx = max(self._recorded)
        layout = self._layouts.get(n_ctx)
        devices = [self._devices[d] for d in indices]
        host_only = NO_HOST_ONLY
        if layout:
            host_only = host_only_tensors(self._request.facts, layout, [device.largest_tensor for device in devices])
        prices = Prices(self._request, devices, self._recorded[n_ctx], n_ctx, host_only)
        return self._in_use.setdefault(indices, prices)
