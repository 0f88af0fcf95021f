"""What a load with measured parameters is estimated to take in time, and what that estimate rests on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST, units_of
from fitter.planning.placing.placement import Placement
from fitter.planning.request.given import pinned_devices
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.speed.bound import lower_bound
from fitter.planning.speed.cost import Estimate, Part, Work, Workload, price
from fitter.planning.speed.explain import Bound, Reason
from fitter.planning.speed.work import (
    NOTHING_KEPT,
    Kept,
    ModelFacts,
    Pieces,
    as_measured,
    kept_on_host,
    pieces_of,
    work_of,
    work_of_params,
)
from fitter.text import human

_WORTH_SAYING = 0.05
"""The share by which a reason must raise the bound to be one."""


@dataclass(frozen=True)
class SpeedSource:
    """Where the speed of a device is from."""

    device: str
    """A device's name, or ``host``."""
    text: str
    """The source, in words."""
    is_default: bool
    """Whether nobody knows the device, so that it has the speed of another one, which ``text`` names."""
    is_remote: bool = False
    """Whether it is a device of an rpc-server; ``text`` then says what its network takes."""


@dataclass(frozen=True)
class Price:
    """The estimated time of a request, on average over it."""

    estimate: Estimate
    """Seconds per token, and of what."""
    workload: Workload
    """The request that is priced."""
    live_tokens: float
    """Tokens in the cache when generation is priced."""
    sources: tuple[SpeedSource, ...]
    """Where every speed that matters is from."""
    breakdown: Breakdown
    """What llama.cpp measured for the same parameters."""

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of prompt processing, in tokens per second."""
        return self.estimate.prompt_tokens_per_second

    @property
    def generation_tokens_per_second(self) -> float:
        """Speed of generation, in tokens per second."""
        return self.estimate.generation_tokens_per_second

    @property
    def seconds(self) -> float:
        """Seconds of the whole request."""
        return self.estimate.seconds

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the time is spent on."""
        return self.estimate.parts


@dataclass(frozen=True)
class Speeds:
    """Names, speeds and free bytes of the devices that a model is on, in its order, and the host's speed.

    ``largest_tensors``: what each takes in one tensor, ``None`` where it names no limit.
    """

    names: tuple[str, ...]
    devices: tuple[DeviceSpeed, ...]
    free: tuple[int, ...]
    host: HostSpeed
    largest_tensors: tuple[int | None, ...] = ()


def price_params(
    facts: ModelFacts,
    layout: Layout,
    params: Params,
    breakdown: Breakdown,
    speeds: Speeds,
    targets: Mapping[str, int],
    workload: Workload,
    live_tokens: int | None = None,
) -> Price:
    """The price of ``params``, for which llama.cpp measured ``breakdown``.

    ``layout`` was recorded with the same parameters; its context may be another one. ``targets`` has the place (an
    index of ``speeds``, or ``HOST``) of every tensor that an override catches. Generation is priced with
    ``live_tokens`` in the cache, by default with what the workload has there on average.
    """
    pieces = pieces_at(facts, layout, params, breakdown, targets, speeds.largest_tensors)
    work = work_of_params(pieces, params, speeds.free, targets, breakdown.n_splits)
    if pieces.kept:
        pieces = as_measured(pieces, work, [breakdown.on(name).model for name in speeds.names])
        work = work_of_params(pieces, params, speeds.free, targets, breakdown.n_splits)
    return _priced(work, speeds, workload, breakdown, live_tokens)


def price_placement(
    request: Request,
    devices: Sequence[DeviceLimit],
    placement: Placement,
    params: Params,
    breakdown: Breakdown,
    layout: Layout,
) -> Price | None:
    """The price of ``placement`` on ``devices``, as ``request`` wants it priced; ``None`` where it has no facts for it.

    ``params`` say the same placement to llama.cpp, which measured ``breakdown`` for them.
    """
    if request.facts is None or request.host_speed is None:
        return None
    names = tuple(device.name for device in devices)
    speeds = Speeds(
        names, tuple(request.speeds[name] for name in names), tuple(d.free for d in devices), request.host_speed
    )
    pieces = _measured(request, request.facts, devices, placement, params, breakdown, layout)
    return _priced(work_of(pieces, placement, breakdown.n_splits), speeds, request.workload, breakdown, None)


def kept_by_all(
    request: Request, devices: Sequence[DeviceLimit], placement: Placement, breakdown: Breakdown, layout: Layout
) -> Kept:
    """What llama.cpp keeps on the host on all devices of ``request``, as far as ``placement`` and ``layout`` tell.

    ``breakdown`` is what it measured for ``placement`` on ``devices``. Remote devices are taken to compute with all.
    """
    if request.facts is None:
        return NOTHING_KEPT
    pieces = _measured(request, request.facts, devices, placement, request.params, breakdown, layout)
    found = kept_on_host(request.facts, layout, [device.largest_tensor for device in request.devices])
    is_of_all = not pieces.kept.takes and not any(speed.is_remote for speed in request.speeds.values())
    return found if is_of_all else replace(found, without_kernels=frozenset())


def kept_notes(
    request: Request, devices: Sequence[DeviceLimit], placement: Placement, breakdown: Breakdown, layout: Layout
) -> tuple[str, ...]:
    """What is to be said of tensors that llama.cpp keeps on the host, of layers that are on devices."""
    if request.facts is None:
        return ()
    pieces = _measured(request, request.facts, devices, placement, request.params, breakdown, layout)
    tensors = (*(layer.tensors for layer in request.facts.layers), request.facts.output)
    count, size, homes, reasons = 0, 0, set[int](), set[str]()
    for layer, weights in zip(work_of(pieces, placement).layers, tensors, strict=True):
        for tensor in weights if layer.home != HOST and layer.n_kept else ():
            if pieces.kept.has(tensor.name, layer.home) and tensor.name not in pieces.pinned:
                is_too_large = pieces.kept.is_too_large(tensor.name, layer.home)
                count, size = count + 1, size + tensor.bytes
                homes.add(layer.home)
                reasons.add("are larger than a tensor may be" if is_too_large else "have no kernels in llama.cpp")
    if not count:
        return ()
    names = ", ".join(devices[d].name for d in sorted(homes))
    return (
        f"{count} tensors ({human(size)}) of layers on {names} stay in host memory, and the host computes with them: "
        f"they {' or '.join(sorted(reasons))} there",
    )


def _measured(
    request: Request,
    facts: ModelFacts,
    devices: Sequence[DeviceLimit],
    placement: Placement,
    params: Params,
    breakdown: Breakdown,
    layout: Layout,
) -> Pieces:
    """The model with ``params`` on ``devices``, by what llama.cpp measured for ``placement`` there."""
    index_of = {request.devices.index(device): d for d, device in enumerate(devices)}
    pinned = {name: index_of.get(target, HOST) for name, target in request.pinned.items()}
    largest_tensors = [device.largest_tensor for device in devices]
    pieces = pieces_at(facts, layout, params, breakdown, pinned, largest_tensors)
    if not pieces.kept:
        return pieces
    return as_measured(pieces, work_of(pieces, placement), [breakdown.on(device.name).model for device in devices])


def bound_of(
    request: Request,
    layout: Layout,
    trial_seconds: float,
    compute: Mapping[str, int] | None = None,
    kept: Kept = NOTHING_KEPT,
) -> Bound | None:
    """What no placement on the devices of ``request`` is faster than, by its objective; ``None`` without prices.

    ``layout`` was recorded at the context of the plan or a smaller one, which only lowers it. ``compute``: bytes that
    compute buffers take of devices by name; none of those that are not there, which only lowers it as well.
    ``trial_seconds``: the objective of the plan. ``kept``: tensors that are known to be on the host in every placement.
    """
    if request.facts is None or request.host_speed is None or not request.devices:
        return None
    workload = request.workload
    if request.objective == "generation":
        workload = Workload(0, workload.generate, workload.cached + workload.prompt)
    elif request.objective == "prompt":
        workload = replace(workload, generate=0)
    units = units_of(layout, request.n_layer)
    # whatever is computed on a device takes some of it; what the user has put on one is there all the same
    taken = compute or {}
    named = pinned_devices(request)
    devices = [device for device in request.devices if device in named or device.target > taken.get(device.name, 0)]
    index_of = {request.devices.index(device): d for d, device in enumerate(devices)}
    pinned = {name: index_of.get(target, HOST) for name, target in request.pinned.items()}
    pieces = pieces_of(request.facts, units, layout.n_ctx, request.params, None, pinned, kept)
    seconds = lower_bound(
        pieces,
        units,
        [device.target - taken.get(device.name, 0) for device in devices],
        None if request.host.paging else request.host.target,
        [request.speeds[device.name] for device in devices],
        request.host_speed,
        workload,
    )
    return Bound(seconds, reached=trial_seconds) if math.isfinite(seconds) else None


def reasons_of(
    request: Request, bound: Bound, layout: Layout, compute: Mapping[str, int], kept: Kept = NOTHING_KEPT
) -> tuple[Reason, ...]:
    """What keeps a plan from ``bound``, step by step, where it is far from it; nothing where it is not.

    ``layout`` was recorded at the context of the plan. ``compute``: bytes of compute buffers by device, those of the
    plan, and of a device that it leaves out what llama.cpp asked for there when it was tried. ``kept`` as in
    ``bound_of``.
    """
    reached = bound.reached or 0.0
    if not bound.is_far:
        return ()
    found: list[Reason] = []
    least = bound.seconds

    def step(reason: Reason) -> None:
        nonlocal least
        if reason.seconds > least * (1 + _WORTH_SAYING):
            found.append(reason)
            least = reason.seconds

    at_context = bound_of(request, layout, reached, None, kept)
    if at_context is not None:
        cache = sum(entry.bytes for entry in layout.entries if entry.kind == "context")
        step(Reason("context", min(at_context.seconds, reached), cache))
    with_compute = bound_of(request, layout, reached, compute, kept)
    without_room = tuple(d.name for d in request.devices if 0 < d.target <= compute.get(d.name, 0))
    if with_compute is not None:
        step(Reason("compute", min(with_compute.seconds, reached), sum(compute.values()), without_room))
    step(Reason("whole", reached))
    return tuple(found)


def pieces_at(
    facts: ModelFacts,
    layout: Layout,
    params: Params,
    breakdown: Breakdown,
    pinned: Mapping[str, int] | None = None,
    largest_tensors: Sequence[int | None] = (),
) -> Pieces:
    """The model at the context of ``layout``, with ``params`` that llama.cpp measured ``breakdown`` for.

    ``largest_tensors``: what each device takes in one tensor, ``None`` where it names no limit.
    """
    units = units_of(layout, facts.n_layer)
    kept = kept_on_host(facts, layout, largest_tensors)
    return pieces_of(facts, units, layout.n_ctx, params, breakdown.flash_attn, pinned, kept)


def _priced(work: Work, speeds: Speeds, workload: Workload, breakdown: Breakdown, live_tokens: int | None) -> Price:
    estimate = price(work, speeds.devices, speeds.host, workload)
    live = workload.cached + workload.prompt + workload.generate / 2
    if live_tokens is not None:
        live = live_tokens
        at_depth = price(work, speeds.devices, speeds.host, replace(workload, prompt=0, generate=0, cached=live_tokens))
        estimate = joined(estimate, at_depth, workload)
    used = {place for layer in work.layers for place in (layer.home, layer.cache, *(w.place for w in layer.weights))}
    kept = [d for d in range(len(speeds.devices)) if d in used]
    of_devices = replace(
        speeds, names=tuple(speeds.names[d] for d in kept), devices=tuple(speeds.devices[d] for d in kept)
    )
    sources = sources_of(of_devices, HOST in used)
    return Price(named(estimate, speeds.names), workload, live, sources, breakdown)


def sources_of(speeds: Speeds, is_on_host: bool) -> tuple[SpeedSource, ...]:
    """Where the speeds of all devices are from, and the host's where something is there."""
    sources = [
        SpeedSource(name, speed.source, not speed.known, speed.is_remote)
        for name, speed in zip(speeds.names, speeds.devices, strict=True)
    ]
    if is_on_host:
        sources.append(SpeedSource("host", speeds.host.source, not speeds.host.known))
    return tuple(sources)


def named(estimate: Estimate, names: Sequence[str]) -> Estimate:
    """``estimate`` whose parts have the ``names`` of devices in place of their numbers (``device 0: weights``)."""

    def name(part: str) -> str:
        match = re.match(r"device (\d+)(?=:)", part)
        return names[int(match[1])] + part[match.end() :] if match else part

    return replace(estimate, parts=tuple(replace(part, name=name(part.name)) for part in estimate.parts))


def joined(prompt: Estimate, generation: Estimate, workload: Workload) -> Estimate:
    """What ``prompt`` says of the prompt, and ``generation`` of generation."""
    parts = {part.name: replace(part, generation=0.0) for part in prompt.parts}
    for part in generation.parts:
        parts[part.name] = Part(part.name, parts[part.name].prompt if part.name in parts else 0.0, part.generation)
    seconds = workload.prompt * prompt.prompt_seconds + workload.generate * generation.generation_seconds
    kept = tuple(part for part in parts.values() if part.prompt or part.generation)
    return Estimate(prompt.prompt_seconds, generation.generation_seconds, seconds, kept)
