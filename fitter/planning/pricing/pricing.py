"""Estimated time of loads that llama.cpp measured, with its sources, and the lower bound of all placements. Seconds.

A plan shows this price. Proposals are compared by ``prices`` before anything is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.host import default_disk_bandwidth
from fitter.machine.measured import TUNED
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST, units_of
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import GAIN, workload_of
from fitter.planning.pricing.prices import in_memory, pinned_on
from fitter.planning.request.constraints import context_of_a_sequence
from fitter.planning.request.given import ends_pipeline, micro_batches, pinned_devices
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.speed.bound import lower_bound
from fitter.planning.speed.cost import Estimate, Part, Work, Workload, from_disk, price, seconds_of, setting
from fitter.planning.speed.explain import Bound, Reason
from fitter.planning.speed.model_facts import ModelFacts
from fitter.planning.speed.work import (
    NO_HOST_ONLY,
    HostOnlyTensors,
    Pieces,
    as_measured,
    host_only_tensors,
    pieces_of,
    work_of,
    work_of_params,
)
from fitter.text import human


@dataclass(frozen=True)
class SpeedSource:
    """Source of a device's speed."""

    device: str
    """A device's name, ``host``, or the ``disk`` that weights are paged from."""
    text: str
    """The source, in words."""
    is_default: bool
    """Whether the device is unknown, so it has another one's speed. ``text`` names that device."""
    is_remote: bool = False
    """Whether it is a device of an rpc-server. ``text`` then says the costs of its network."""

    @property
    def is_tuned(self) -> bool:
        """Whether ``fitter tune`` corrected it by what it measured on this machine."""
        return self.text.endswith(TUNED)


@dataclass(frozen=True)
class SpeedAt:
    """Speed of generation at one depth of the cache."""

    live_tokens: int
    """Tokens of each user in the cache."""
    generation_seconds: float
    """Seconds per generated token of each user."""

    @property
    def generation_tokens_per_second(self) -> float:
        """Speed of generation, in tokens per second; infinite if it takes no time."""
        return 1 / self.generation_seconds if self.generation_seconds else math.inf


@dataclass(frozen=True)
class Price:
    """Estimated time of a request, on average over it."""

    estimate: Estimate
    """Seconds per token, and their parts."""
    workload: Workload
    """The priced request."""
    live_tokens: float
    """Tokens in the cache at which generation is priced."""
    sources: tuple[SpeedSource, ...]
    """Source of every speed that matters."""
    breakdown: Breakdown
    """Bytes that llama.cpp measured for the same parameters."""
    steps: tuple[tuple[int, float], ...] = ()
    """For one user, and more up to all of ``workload``: seconds of a step that makes a token for each of them."""
    checks: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """For the same numbers of users: seconds of a step that checks no drafted token for each of them, one, two, and so
    on; empty without drafting."""
    depths: tuple[SpeedAt, ...] = ()
    """Speed of generation at other depths: of a plan, with a full context; of ``estimate``, as asked for."""

    @property
    def full_context(self) -> SpeedAt | None:
        """The first of ``depths``: of a plan, the speed with a full context; ``None`` if it generates nothing."""
        return self.depths[0] if self.depths else None

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of prompt processing, in tokens per second."""
        return self.estimate.prompt_tokens_per_second

    @property
    def generation_tokens_per_second(self) -> float:
        """Speed of generation, in tokens per second."""
        return self.estimate.generation_tokens_per_second

    @property
    def input_tokens(self) -> int | None:
        """Tokens of each input of a model that embeds or ranks texts; ``None`` for one that answers."""
        return None if self.workload.generate else self.workload.prompt

    @property
    def inputs_per_second(self) -> float | None:
        """Inputs of ``input_tokens`` per second; ``None`` for a model that answers."""
        tokens = self.input_tokens
        return None if tokens is None else self.prompt_tokens_per_second / max(1, tokens)

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation; of a model that embeds or ranks texts the speed of its inputs."""
        return self.generation_tokens_per_second if self.input_tokens is None else self.prompt_tokens_per_second

    @property
    def seconds(self) -> float:
        """Seconds of the whole request."""
        return self.estimate.seconds

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the time."""
        return self.estimate.parts

    def __repr__(self) -> str:
        prompt, generation = self.prompt_tokens_per_second, self.generation_tokens_per_second
        more = f", {generation:.4g} generation" if self.input_tokens is None else ""
        return f"<Price: {prompt:.4g} tokens a second of prompt{more}>"


@dataclass(frozen=True)
class Speeds:
    """Names, speeds and free bytes of a model's devices, in its order, and the host's speed.

    ``largest_tensors``: bytes that each device takes in one tensor, ``None`` where it has no limit.
    """

    names: tuple[str, ...]
    devices: tuple[DeviceSpeed, ...]
    free: tuple[int, ...]
    host: HostSpeed
    largest_tensors: tuple[int | None, ...] = ()


def speeds_of(request: Request, host_speed: HostSpeed, devices: Sequence[DeviceLimit]) -> Speeds:
    """Look up the speeds of ``devices``."""
    names = tuple(device.name for device in devices)
    speeds = tuple(request.speeds[name] for name in names)
    return Speeds(names, speeds, tuple(device.free for device in devices), host_speed)


def price_params(
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
    """Estimate the time of ``params``.

    Args:
        layout: recorded with the same parameters, at any context.
        breakdown: what llama.cpp measured for ``params``.
        targets: the place of every tensor that an override matches: an index of ``speeds``, or ``HOST``.
        live_tokens: tokens in the cache at which generation is priced; ``None`` for the workload's average.
        depths: further numbers of tokens in the cache, for ``Price.depths``.
    """
    pieces = pieces_at(facts, layout, params, breakdown, targets, speeds.largest_tensors)
    work = work_of_params(pieces, params, speeds.free, targets, breakdown.n_splits)
    if pieces.host_only:
        pieces = as_measured(pieces, work, [breakdown.on(name).model for name in speeds.names])
        work = work_of_params(pieces, params, speeds.free, targets, breakdown.n_splits)
    return _price_work(work, speeds, workload, breakdown, live_tokens, depths=depths)


@dataclass(frozen=True)
class MeasuredPlacement:
    """A placement of a request on ``devices`` that llama.cpp measured.

    Attributes:
        params: the parameters of the placement.
        breakdown: what llama.cpp measured for them.
        layout: recorded with the same parameters, at any context.
    """

    request: Request
    devices: Sequence[DeviceLimit]
    placement: Placement
    params: Params
    breakdown: Breakdown
    layout: Layout

    @cached_property
    def _pieces(self) -> Pieces:
        largest, pinned = [each.largest_tensor for each in self.devices], pinned_on(self.request, self.devices)
        pieces = pieces_at(self.request.facts, self.layout, self.params, self.breakdown, pinned, largest)
        if not pieces.host_only:
            return pieces
        on_devices = [self.breakdown.on(device.name).model for device in self.devices]
        return as_measured(pieces, work_of(pieces, self.placement), on_devices)

    @cached_property
    def _work(self) -> Work:
        return work_of(self._pieces, self.placement, self.breakdown.n_splits)

    def price(self) -> Price | None:
        """Estimate its time; ``None`` where the request has no speed of the host."""
        request, breakdown = self.request, self.breakdown
        if request.host_speed is None:
            return None
        speeds = speeds_of(request, request.host_speed, self.devices)
        depths = full_context(self.params, breakdown, request.workload)
        work = in_memory(request, self._work, breakdown)
        return _price_work(work, speeds, request.workload, breakdown, None, request.most_drafted, depths)

    @cached_property
    def host_only_everywhere(self) -> HostOnlyTensors:
        """The tensors that llama.cpp keeps on the host with any of the request's devices.

        Remote devices are taken to compute with all tensors.
        """
        request = self.request
        largest = [device.largest_tensor for device in request.devices]
        host_only = host_only_tensors(request.facts, self.layout, largest)
        is_for_all = not any(speed.is_remote for speed in request.speeds.values())
        if is_for_all and not self._pieces.host_only.takes:
            return host_only
        return replace(host_only, without_kernels=frozenset())

    def notes(self) -> tuple[str, ...]:
        """List notes for the plan."""
        return (*self._host_only_notes(), *self._expert_cache_notes(), *self._pipeline_notes())

    def _host_only_notes(self) -> Iterator[str]:
        """Note the tensors that llama.cpp keeps on the host although their layers are on devices."""
        facts, host_only = self.request.facts, self._pieces.host_only
        tensors = (*(layer.tensors for layer in facts.layers), facts.output)
        count, size, homes, reasons = 0, 0, set[int](), set[str]()
        for layer, weights in zip(self._work.layers, tensors, strict=True):
            for tensor in weights if layer.home != HOST and layer.n_host_only else ():
                if host_only.has(tensor.name, layer.home) and tensor.name not in self._pieces.pinned:
                    is_too_large = host_only.is_too_large(tensor.name, layer.home)
                    count, size = count + 1, size + tensor.bytes
                    homes.add(layer.home)
                    reasons.add("are larger than a tensor may be" if is_too_large else "have no kernels in llama.cpp")
        if count:
            names = ", ".join(self.devices[d].name for d in sorted(homes))
            yield (
                f"{count} tensors ({human(size)}) of layers on {names} stay in host memory, and the host computes with "
                f"them: they {' or '.join(sorted(reasons))} there"
            )

    def _expert_cache_notes(self) -> Iterator[str]:
        """Note how often tokens find their experts in a cache, or that llama.cpp does not make it."""
        caches = [weights.cache for layer in self._work.layers for weights in layer.weights if weights.cache]
        if caches:
            rate = sum(cache.hit_rate for cache in caches) / len(caches)
            yield f"estimated hit rate of the cache of experts: {rate:.0%} (routing decides it)"
        elif self.params.moe_cache_size:
            yield "the cache of experts is not made: no layer on a device has all of its experts in host memory"

    def _pipeline_notes(self) -> Iterator[str]:
        """Note an override that moves nothing, and only keeps devices from working on several micro batches at once."""
        homes = self.placement.homes
        is_still = all(homes[item.layer] == target for item, target in self.placement.moved)
        if is_still and ends_pipeline(self.request, self.devices, self.placement):
            yield (
                f"-ot {self.params.tensor_buft_overrides[-1].pattern} moves nothing: any -ot ends llama.cpp's pipeline "
                "over devices, whose compute buffers have no room"
            )


def full_context(params: Params, breakdown: Breakdown, workload: Workload) -> tuple[int, ...]:
    """Return the tokens of each user in a full context; none for a model that generates none."""
    if params.embeddings:
        return ()
    n_ctx = params.n_ctx or breakdown.n_ctx
    each = context_of_a_sequence(replace(params, n_ctx=n_ctx), n_ctx)
    return (each // workload.users if params.kv_unified else each,)


def bound_of(
    request: Request,
    layout: Layout,
    trial_seconds: float,
    compute: Mapping[str, int] | None = None,
    host_only: HostOnlyTensors = NO_HOST_ONLY,
    *,
    is_without_flash: bool = False,
) -> Bound | None:
    """Compute the time below which no placement on the request's devices comes; ``None`` without prices.

    Args:
        layout: recorded at the plan's context or a smaller one, which only lowers the bound.
        trial_seconds: the plan's objective.
        compute: bytes of compute buffers by device. A missing one counts 0, which only lowers the bound.
        host_only: tensors that are on the host in every placement.
        is_without_flash: whether placements may do without flash attention, as the plan does: the host then computes
            attention faster.
    """
    if request.host_speed is None or not request.devices:
        return None
    units = units_of(layout, request.n_layer)
    # a device without room for its compute buffer computes nothing, unless the user has put tensors there
    compute = compute or {}
    by_user = pinned_devices(request)
    devices = [device for device in request.devices if device in by_user or device.target > compute.get(device.name, 0)]
    pieces = pieces_of(request.facts, units, layout.n_ctx, request.params, None, pinned_on(request, devices), host_only)
    # without compute buffers the largest micro batch is the quickest
    pieces = replace(pieces, n_ubatch=max(micro_batches(request)))
    attentions = [pieces.attention]
    if is_without_flash:
        attentions.append(tuple(each and replace(each, flash=False) for each in pieces.attention))
    budgets = [device.target - compute.get(device.name, 0) for device in devices]
    seconds = min(
        lower_bound(
            replace(pieces, attention=attention),
            units,
            budgets,
            None if request.host.paging else request.host.target,
            [request.speeds[device.name] for device in devices],
            request.host_speed,
            workload_of(request),
        )
        for attention in attentions
    )
    seconds += _least_paged(request, pieces, budgets, workload_of(request))
    return Bound(seconds, reached=trial_seconds) if math.isfinite(seconds) else None


def _least_paged(request: Request, pieces: Pieces, budgets: Sequence[int], workload: Workload) -> float:
    """Compute the least seconds to read weights from the disk that no memory has room for, as ``paged_seconds``."""
    target = request.host.target
    if not request.host.paging or target is None or request.host_speed is None or pieces.moe_cache_size:
        return 0.0
    facts = pieces.facts
    room = target + sum(max(0, budget) for budget in budgets)
    beyond = max(0, sum(tensor.bytes for tensor in facts.tensors) - room)
    work = Work((), facts.n_embd, facts.n_expert, facts.n_expert_used, pieces.n_ubatch, pieces.op_offload)
    at = setting(work, [request.speeds[device.name] for device in request.devices], request.host_speed, workload)
    # a byte of experts is read least often
    return at.request(from_disk(beyond * at.experts_touched, beyond * at.experts_of_step, at))


def reasons_of(
    request: Request,
    bound: Bound,
    layout: Layout,
    compute: Mapping[str, int],
    host_only: HostOnlyTensors = NO_HOST_ONLY,
    *,
    is_without_flash: bool = False,
) -> tuple[Reason, ...]:
    """Explain step by step why a plan is far from its bound. Empty where it is not far.

    Args:
        layout: recorded at the plan's context.
        compute: bytes of compute buffers by device: the plan's, and of devices without a part in it the size that
            llama.cpp asked for in another trial.
        host_only, is_without_flash: as in ``bound_of``.
    """
    if not bound.is_far:
        return ()
    reached = bound.reached or 0.0
    of_plan = partial(bound_of, host_only=host_only, is_without_flash=is_without_flash)
    cache = sum(entry.bytes for entry in layout.entries if entry.kind == "context")
    without_room = tuple(d.name for d in request.devices if 0 < d.target <= compute.get(d.name, 0))
    steps = (
        (of_plan(request, layout, reached), Reason("context", 0.0, cache)),
        (of_plan(request, layout, reached, compute), Reason("compute", 0.0, sum(compute.values()), without_room)),
        (Bound(reached), Reason("whole", 0.0)),
    )
    reasons, least = list[Reason](), bound.seconds
    for found, reason in steps:
        seconds = min(found.seconds, reached) if found else 0.0
        if seconds > least * (1 + GAIN):
            reasons.append(replace(reason, seconds=seconds))
            least = seconds
    return tuple(reasons)


def pieces_at(
    facts: ModelFacts,
    layout: Layout,
    params: Params,
    breakdown: Breakdown,
    pinned: Mapping[str, int] | None = None,
    largest_tensors: Sequence[int | None] = (),
) -> Pieces:
    """Describe the model at the layout's context, with ``params`` and llama.cpp's ``breakdown`` of them.

    ``largest_tensors``: bytes that each device takes in one tensor, ``None`` where it has no limit.
    """
    units = units_of(layout, facts.n_layer)
    host_only = host_only_tensors(facts, layout, largest_tensors)
    return pieces_of(facts, units, layout.n_ctx, params, breakdown.flash_attn, pinned, host_only)


def _price_work(
    work: Work,
    speeds: Speeds,
    workload: Workload,
    breakdown: Breakdown,
    live_tokens: int | None,
    most_drafted: int = 0,
    depths: Sequence[int] = (),
) -> Price:
    places = {place for layer in work.layers for place in (layer.home, layer.cache, *(w.place for w in layer.weights))}
    sources = sources_of(speeds, HOST in places, places)
    if work.host_room < math.inf and work.paged:
        rate, words = default_disk_bandwidth()
        sources += (SpeedSource("disk", f"{rate / 1e9:g} GB/s, assumed ({words})", True),)

    def estimate(workload: Workload) -> Estimate:
        return price(work, speeds.devices, speeds.host, workload)

    return price_of(estimate, speeds, sources, workload, breakdown, live_tokens, most_drafted, depths)


def price_of(
    estimate: Callable[[Workload], Estimate],
    speeds: Speeds,
    sources: tuple[SpeedSource, ...],
    workload: Workload,
    breakdown: Breakdown,
    live_tokens: int | None,
    most_drafted: int = 0,
    depths: Sequence[int] = (),
) -> Price:
    """Make a price of ``estimate``, with generation at ``live_tokens`` in the cache (``None``: as in ``workload``).

    Args:
        most_drafted: tokens that may be drafted at a time; 0 without drafting.
        depths: further numbers of tokens in the cache, for ``Price.depths``.
    """
    average = estimate(workload)
    live = workload.cached + workload.prompt + workload.generate / 2
    if live_tokens is not None:
        live = live_tokens
        average = _join_estimates(average, estimate(Workload(0, 0, live_tokens, workload.users)), workload)

    def name(part: str) -> str:
        match = re.match(r"device (\d+)(?=:)", part)
        return speeds.names[int(match[1])] + part[match.end() :] if match else part

    parts = tuple(replace(part, name=name(part.name)) for part in average.parts)
    numbers = _numbers_of_users(workload)

    def step(users: int, drafted: int = 0) -> float:
        return estimate(replace(workload, users=users, drafted=drafted)).generation_seconds

    steps = tuple((n, step(n)) for n in numbers if workload.users > 1)
    drafted = range(most_drafted + 1)
    checks = tuple((n, tuple(step(n, depth) for depth in drafted)) for n in numbers if most_drafted)
    at_depths = (
        SpeedAt(depth, estimate(replace(workload, prompt=0, generate=0, cached=depth)).generation_seconds)
        for depth in depths
    )
    return Price(replace(average, parts=parts), workload, live, sources, breakdown, steps, checks, tuple(at_depths))


def _numbers_of_users(workload: Workload) -> tuple[int, ...]:
    """List powers of two below the users of ``workload``, and their number."""
    return (*(1 << power for power in range((workload.users - 1).bit_length())), workload.users)


def sources_of(
    speeds: Speeds, is_on_host: bool, devices: Collection[int | None] | None = None
) -> tuple[SpeedSource, ...]:
    """List the sources of the speeds of ``devices`` (indices; ``None`` for all), and of the host's where it is used."""
    sources = [
        SpeedSource(name, speed.source, not speed.known, speed.is_remote)
        for d, (name, speed) in enumerate(zip(speeds.names, speeds.devices, strict=True))
        if devices is None or d in devices
    ]
    if is_on_host:
        sources.append(SpeedSource("host", speeds.host.source, not speeds.host.known))
    return tuple(sources)


def _join_estimates(prompt: Estimate, generation: Estimate, workload: Workload) -> Estimate:
    """Join the prompt's part of one estimate and the generation's part of another."""
    parts = {part.name: replace(part, generation=0.0) for part in prompt.parts}
    for part in generation.parts:
        parts[part.name] = Part(part.name, parts[part.name].prompt if part.name in parts else 0.0, part.generation)
    seconds = seconds_of(workload, prompt.prompt_seconds, generation.generation_seconds)
    costly = tuple(part for part in parts.values() if part.prompt or part.generation)
    return Estimate(prompt.prompt_seconds, generation.generation_seconds, seconds, costly)
