"""Estimated time of loads with split mode ``tensor``. Seconds.

All devices compute at once, each with its part of every tensor, and add up their results twice in a layer: after
attention and after the feed-forward part. So the time is the slowest device's time for its part plus the time of those
sums. Their costs are in ``cost.toml``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.pricing import (
    Price,
    Speeds,
    full_context,
    pieces_at,
    price_of,
    price_params,
    sources_of,
    speeds_of,
)
from fitter.planning.request.request import Request
from fitter.planning.speed.cost import Costs, Estimate, Part, Work, Workload, default, figures, price, seconds_of
from fitter.planning.speed.model_facts import ModelFacts
from fitter.planning.speed.work import Pieces, as_measured, work_of

SUMS_OF_A_LAYER = 2
"""After attention and after the feed-forward part; one less where the host computes one of these parts."""


@dataclass(frozen=True)
class SumCosts:
    """Costs of sums over devices, as measured (``cost.toml``).

    Attributes:
        wait: seconds of a sum over two devices, whatever its size.
        wait_more: further seconds of each further step of a sum over more devices.
        link: share of the theoretical bandwidth that large sums reach: of NVLink where all devices have it (no
            measurement was fitted for that), else of PCIe.
        width: bytes of a number on the way.
        layer: the fixed time of a layer, relative to split mode ``layer``.
    """

    wait: float
    wait_more: float
    link: float
    width: float
    layer: float


def price_split(
    request: Request, params: Params, breakdown: Breakdown, layout: Layout, placement: Placement
) -> Price | None:
    """Estimate the time of ``params`` with split mode ``tensor``; ``None`` where ``request`` has no speed of the host.

    Args:
        breakdown: what llama.cpp measured for ``params``.
        layout: recorded with the same parameters, at any context.
        placement: the placement of ``params``, with all layers on devices on the first device.
    """
    if request.host_speed is None or not params.devices:
        return None
    by_name = {device.name: device for device in request.devices}
    speeds = speeds_of(request, request.host_speed, [by_name[name] for name in params.devices])
    pieces = pieces_at(request.facts, layout, params, breakdown, request.pinned)
    depths = full_context(params, breakdown, request.workload)
    return _price_split(pieces, placement, speeds, request.workload, breakdown, None, depths)


def price_any_split(
    facts: ModelFacts,
    layout: Layout,
    params: Params,
    breakdown: Breakdown,
    speeds: Speeds,
    targets: Mapping[str, int],
    workload: Workload,
    live_tokens: int | None = None,
    depths: Sequence[int] = (),
) -> Price:
    """Estimate the time of ``params`` with any split mode. Arguments as for ``price_params``."""
    if params.split_mode != "tensor":
        return price_params(facts, layout, params, breakdown, speeds, targets, workload, live_tokens, depths)
    n_units = facts.n_layer + 1
    used = params.n_gpu_layers if 0 <= params.n_gpu_layers <= n_units else n_units
    pieces = pieces_at(facts, layout, params, breakdown, dict.fromkeys(targets, HOST))
    return _price_split(pieces, Placement(n_units - used, (used,)), speeds, workload, breakdown, live_tokens, depths)


def _price_split(
    pieces: Pieces,
    placement: Placement,
    speeds: Speeds,
    workload: Workload,
    breakdown: Breakdown,
    live_tokens: int | None = None,
    depths: Sequence[int] = (),
) -> Price:
    rows = [breakdown.on(name) for name in speeds.names]
    weights, caches = sum(row.model for row in rows), sum(row.context for row in rows)
    if pieces.host_only:
        on_devices = sum(row.model for row in breakdown.rows if not row.is_host)
        pieces = as_measured(pieces, work_of(pieces, placement), [on_devices])
    work = work_of(pieces, placement, breakdown.n_splits)
    shares = [Share(row.model / weights if weights else 0.0, row.context / caches if caches else 0.0) for row in rows]
    is_on_host = any(
        place == HOST for layer in work.layers for place in (layer.home, *(w.place for w in layer.weights))
    )

    def estimate(workload: Workload) -> Estimate:
        return split_estimate(work, speeds.devices, shares, speeds.host, workload)

    sources = sources_of(speeds, is_on_host)
    return price_of(estimate, speeds, sources, workload, breakdown, live_tokens, depths=depths)


@dataclass(frozen=True)
class Share:
    """A device's part of all weights on devices, and of all caches there."""

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
    """Estimate the seconds of ``workload`` where ``work`` is split over ``devices`` by ``shares``.

    The host computes with its weights in prompts, too: llama.cpp's device of several devices has no ``offload_op``
    (``ggml-backend-meta.cpp``), whatever ``work`` says.

    Args:
        work: the work with all layers on devices on the first device.
    """
    sums, work = sums or default_sums(), replace(work, op_offload=False)
    costs = costs or default()
    # parts of experts are smaller than experts, and no sooner found
    whole = replace(costs, families={name: replace(each, experts=1.0) for name, each in costs.families.items()})
    alone, sooner = (
        [{p.name: p for p in price(work, [device], host, workload, of).parts} for device in devices]
        for of in (costs, whole)
    )
    parts: dict[str, Part] = {}
    for name in ("weights", "attention", "layers"):
        shared = []
        none = Part(name, 0.0, 0.0)
        for parts_alone, parts_sooner, share in zip(alone, sooner, shares, strict=True):
            part, least = (parts_of.get(f"device 0: {name}", none) for parts_of in (parts_alone, parts_sooner))
            factor = {"weights": share.weights, "attention": share.caches, "layers": sums.layer}[name]
            found = part.generation - least.generation
            shared.append(Part(name, part.prompt * factor, least.generation * factor + found))
        slowest = max(range(len(devices)), key=lambda d: shared[d].generation)
        parts[name] = Part(f"device {slowest}: {name}", max(p.prompt for p in shared), shared[slowest].generation)
    for name, part in alone[0].items():
        if not name.startswith("device 0"):
            parts[name] = part
    parts["sums"] = _sums(work, devices, workload, sums)
    costly = tuple(part for part in parts.values() if part.prompt or part.generation)
    prompt, generation = float_sum(part.prompt for part in costly), float_sum(part.generation for part in costly)
    seconds = seconds_of(workload, prompt, generation)
    return Estimate(prompt, generation, seconds, costly)


def _sums(work: Work, devices: Sequence[DeviceSpeed], workload: Workload, costs: SumCosts) -> Part:
    """Estimate the sums over all devices, in seconds per token."""
    count = sum(
        SUMS_OF_A_LAYER - any(weights.place == HOST for weights in layer.weights)
        for layer in work.layers[:-1]
        if layer.home != HOST
    )
    steps = max(1, math.ceil(math.log2(len(devices))))
    batch = max(1, min(work.n_ubatch, workload.prompt or work.n_ubatch))
    wait = costs.wait + (steps - 1) * costs.wait_more
    remote = max(device.round_trip for device in devices)
    has_nvlink = all(device.nvlink for device in devices)
    link = min(
        device.pcie if device.is_remote else costs.link * (device.nvlink if has_nvlink else device.pcie)
        for device in devices
    )
    sent = steps * costs.width * work.n_embd / link
    generation = count * (wait + remote + sent * workload.tokens_of_step)
    return Part("sums over devices", count * ((wait + remote) / batch + sent), generation)


@functools.cache
def default_sums() -> SumCosts:
    """Read the constants of ``cost.toml``."""
    return SumCosts(**figures()["sums"])


def pipelined(estimate: Estimate, n_devices: int, workload: Workload, n_ubatch: int) -> Estimate:
    """Change an estimate with split mode ``layer`` for devices that work on several micro batches of a prompt at once.

    They do so in llama.cpp where all layers are on devices.
    """
    batches = max(1, -(-workload.prompt // max(1, n_ubatch)))
    factor = (batches + n_devices - 1) / (batches * n_devices)
    prompt = estimate.prompt_seconds * factor
    seconds = seconds_of(workload, prompt, estimate.generation_seconds)
    parts = tuple(replace(part, prompt=part.prompt * factor) for part in estimate.parts)
    return Estimate(prompt, estimate.generation_seconds, seconds, parts)
