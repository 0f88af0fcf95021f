"""What a load with split mode ``tensor`` is estimated to take in time.

All devices compute at once, each with its part of every tensor, and add up what they have twice in a layer: after
attention and after the feed-forward part. So the time is that of the slowest device with its part, and what those sums
take. Their figures are in ``cost.toml``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.pricing import Price, Speeds, joined, named, pieces_at, price_params, sources_of
from fitter.planning.request.request import Request
from fitter.planning.speed.cost import Costs, Estimate, Part, Work, Workload, figures, price
from fitter.planning.speed.work import ModelFacts, Pieces, as_measured, work_of

SUMS_OF_A_LAYER = 2
"""After attention, and after the feed-forward part; only one of both where the host has computed the other part."""


@dataclass(frozen=True)
class SumCosts:
    """What adding up over devices takes.

    ``wait``: seconds of a sum over two devices, whatever its size; ``wait_more`` the same of each further step of one
    over more. ``link``: share that large sums reach of the theoretical bandwidth of NVLink where all devices have it,
    for which no measurement was fitted, and else of PCIe. ``width``: bytes of a number on the way. ``layer``: how many
    times as long as with split mode ``layer`` the fixed time of a layer is.
    """

    wait: float
    wait_more: float
    link: float
    width: float
    layer: float


def price_split(
    request: Request, params: Params, breakdown: Breakdown, layout: Layout, placement: Placement
) -> Price | None:
    """The price of ``params`` on the devices that they name; ``None`` where ``request`` has no facts for it.

    llama.cpp measured ``breakdown`` for them, and ``layout`` with the same parameters at any context. ``placement`` is
    what they say, with all layers on devices on the first one.
    """
    if request.facts is None or request.host_speed is None or not params.devices:
        return None
    free = {device.name: device.free for device in request.devices}
    speeds = Speeds(
        params.devices,
        tuple(request.speeds[name] for name in params.devices),
        tuple(free[name] for name in params.devices),
        request.host_speed,
    )
    pieces = pieces_at(request.facts, layout, params, breakdown, request.pinned)
    return _priced(_work(pieces, placement, breakdown), speeds, request.workload, breakdown)


def priced_as_placed(
    facts: ModelFacts,
    layout: Layout,
    params: Params,
    breakdown: Breakdown,
    speeds: Speeds,
    targets: Mapping[str, int],
    workload: Workload,
    live_tokens: int | None = None,
) -> Price:
    """``price_params``, whichever way ``params`` split the model over devices."""
    if params.split_mode != "tensor":
        return price_params(facts, layout, params, breakdown, speeds, targets, workload, live_tokens)
    n_units = facts.n_layer + 1
    used = params.n_gpu_layers if 0 <= params.n_gpu_layers <= n_units else n_units
    pieces = pieces_at(facts, layout, params, breakdown, dict.fromkeys(targets, HOST))
    work = _work(pieces, Placement(n_units - used, (used,)), breakdown)
    whole = _priced(work, speeds, workload, breakdown)
    if live_tokens is None:
        return whole
    at_depth = _priced(work, speeds, Workload(0, 0, live_tokens), breakdown)
    return replace(whole, live_tokens=live_tokens, estimate=joined(whole.estimate, at_depth.estimate, workload))


def _work(pieces: Pieces, placement: Placement, breakdown: Breakdown) -> Work:
    """The work of ``placement``, for which llama.cpp measured ``breakdown``."""
    if pieces.kept:
        on_devices = sum(row.model for row in breakdown.rows if not row.is_host)
        pieces = as_measured(pieces, work_of(pieces, placement), [on_devices])
    return work_of(pieces, placement, breakdown.n_splits)


def _priced(work: Work, speeds: Speeds, workload: Workload, breakdown: Breakdown) -> Price:
    rows = [breakdown.on(name) for name in speeds.names]
    shares = tuple(
        Share(_part(row.model, rows_model), _part(row.context, rows_context))
        for rows_model, rows_context in [(sum(r.model for r in rows), sum(r.context for r in rows))]
        for row in rows
    )
    estimate = split_estimate(work, speeds.devices, shares, speeds.host, workload)
    is_on_host = any(
        place == HOST for layer in work.layers for place in (layer.home, *(w.place for w in layer.weights))
    )
    live = workload.cached + workload.prompt + workload.generate / 2
    return Price(named(estimate, speeds.names), workload, live, sources_of(speeds, is_on_host), breakdown)


@dataclass(frozen=True)
class Share:
    """The part of a device: of all weights on devices, and of all caches there."""

    weights: float
    caches: float


def split_estimate(
    work: Work,
    devices: Sequence[DeviceSpeed],
    shares: Sequence[Share],
    host: HostSpeed,
    workload: Workload,
    sums: SumCosts | None = None,
    costs: Costs | None = None,
) -> Estimate:
    """Seconds of ``workload`` where ``work``, all of whose layers on devices are said to be on the first one, is split
    over ``devices`` by ``shares``.

    The host computes with its weights in prompts, too: what llama.cpp makes of several devices has no ``offload_op``
    (``ggml-backend-meta.cpp``), whatever ``work`` says.
    """
    sums, work = sums or default_sums(), replace(work, op_offload=False)
    alone = [_parts(price(work, [device], host, workload, costs)) for device in devices]
    parts: dict[str, Part] = {}
    for name in ("weights", "attention", "layers"):
        shared = []
        for own, share in zip(alone, shares, strict=True):
            part = own.get(f"device 0: {name}", Part(name, 0.0, 0.0))
            factor = {"weights": share.weights, "attention": share.caches, "layers": sums.layer}[name]
            shared.append(Part(name, part.prompt * factor, part.generation * factor))
        slowest = max(range(len(devices)), key=lambda d: shared[d].generation)
        parts[name] = Part(f"device {slowest}: {name}", max(p.prompt for p in shared), shared[slowest].generation)
    for name, part in alone[0].items():
        if not name.startswith("device 0"):
            parts[name] = part
    parts["sums"] = _sums(work, devices, workload, sums)
    kept = tuple(part for part in parts.values() if part.prompt or part.generation)
    prompt, generation = sum(part.prompt for part in kept), sum(part.generation for part in kept)
    seconds = workload.prompt * prompt + workload.generate * generation
    return Estimate(prompt, generation, seconds, kept)


def _parts(estimate: Estimate) -> dict[str, Part]:
    return {part.name: part for part in estimate.parts}


def _sums(work: Work, devices: Sequence[DeviceSpeed], workload: Workload, costs: SumCosts) -> Part:
    """What the sums over all devices take of a token."""
    count = sum(
        SUMS_OF_A_LAYER - any(weights.place == HOST for weights in layer.weights)
        for layer in work.layers[:-1]
        if layer.home != HOST
    )
    steps = max(1, math.ceil(math.log2(len(devices))))
    batch = max(1, min(work.n_ubatch, workload.prompt or work.n_ubatch))
    wait = costs.wait + (steps - 1) * costs.wait_more
    remote = max(device.round_trip for device in devices)
    link = min(_link(device, costs, all(device.nvlink for device in devices)) for device in devices)
    sent = steps * costs.width * work.n_embd / link
    return Part("sums over devices", count * ((wait + remote) / batch + sent), count * (wait + remote + sent))


def _link(device: DeviceSpeed, costs: SumCosts, has_nvlink: bool) -> float:
    """Bytes per second that sums with other devices reach."""
    return device.pcie if device.is_remote else costs.link * (device.nvlink if has_nvlink else device.pcie)


def _part(size: int, total: int) -> float:
    return size / total if total else 0.0


@functools.cache
def default_sums() -> SumCosts:
    """The constants of ``cost.toml``."""
    return SumCosts(**figures()["sums"])


def pipelined(estimate: Estimate, n_devices: int, workload: Workload, n_ubatch: int) -> Estimate:
    """An estimate with split mode ``layer`` where devices work on several micro batches of a prompt at once.

    llama.cpp has them do so where all layers are on devices.
    """
    batches = max(1, -(-workload.prompt // max(1, n_ubatch)))
    factor = (batches + n_devices - 1) / (batches * n_devices)
    prompt = estimate.prompt_seconds * factor
    seconds = workload.prompt * prompt + workload.generate * estimate.generation_seconds
    parts = tuple(replace(part, prompt=part.prompt * factor) for part in estimate.parts)
    return Estimate(prompt, estimate.generation_seconds, seconds, parts)
