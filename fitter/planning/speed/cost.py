"""What a placement costs in time: seconds per prompt token and per generated token, from bytes, FLOP and speeds.

Everything is a sum, since llama.cpp computes one layer after the other (``-sm layer``, one sequence): a layer costs a
fixed time wherever it is, a weight the time to read it where it is, a cached token the time to attend to it. So the
price of a placement is the sum of the prices of its tensors and layers, and a search may take those one by one
(``tensor_seconds``, ``layer_seconds``). How much of a datasheet's figure llama.cpp reaches is in ``cost.toml``, fitted
on the published measurements in ``tests/data/speeds``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST
from fitter.storage.data_files import read_data

MIN_OFFLOAD_BATCH = 32
"""Tokens from which a device computes with weights that are on the host (``op_offload``); llama.cpp's default."""


@dataclass(frozen=True)
class Family:
    """What llama.cpp reaches on one kind of device, as fitted.

    ``layer``: seconds that a layer costs per graph whatever its size (kernel launches, synchronisation). Shares of the
    datasheet's figures: ``bandwidth`` (reading weights), ``cache`` (reading an f16 KV cache), ``quantized_cache``
    (reading another one, which is read once for every query head), ``compute`` (matrix products of a prompt),
    ``attention`` (attention of a prompt).
    """

    layer: float
    bandwidth: float
    cache: float
    quantized_cache: float
    compute: float
    attention: float


@dataclass(frozen=True)
class HostCosts:
    """What llama.cpp reaches on the host, as fitted.

    ``sync``: seconds per thread, and per group of a layer's tensors that is computed there: threads wait for one
    another after every operation, the longer the more there are. ``bandwidth``: share of the host's bandwidth that
    reading weights reaches. Per thread, FLOP per second: ``attention`` with flash attention, ``plain_attention``
    without, ``compute`` of a prompt's matrix products. ``lookup``: weights per second of the types that it
    looks up in tables (``work.LOOKED_UP``), which takes longer than reading them. ``threads``: where it is not known
    how many there are.
    """

    sync: float
    bandwidth: float
    attention: float
    plain_attention: float
    compute: float
    lookup: float
    threads: int


@dataclass(frozen=True)
class Costs:
    """All fitted constants. ``split``, ``hop``: seconds of a graph split, and of passing on from device to device.

    ``pcie``: share of the theoretical PCIe bandwidth that streaming weights reaches. ``mapped``: bytes per second of it
    at most where the weights are mapped from their file, which a driver copies twice. ``pageable``: the same for a KV
    cache in host memory that a device attends to. ``min_bits``: unpacking a weight takes at least as long as reading
    this many bits. ``bare_splits``: graph splits of a layer that has nothing but its cache on a device.
    """

    families: Mapping[str, Family]
    host: HostCosts
    split: float
    hop: float
    pcie: float
    pageable: float
    min_bits: float
    bare_splits: int
    mapped: float = math.inf


@dataclass(frozen=True)
class Attention:
    """What attention does in one layer, per token that is computed and token that is in the cache.

    ``kv_bytes``: bytes of K and V. ``flops``: 2 × query heads × (key length + value length). ``sharing``: query heads
    to a KV head; 1 where the heads share one latent vector (MLA), which no kernel reads once for each. ``window``: how
    far back it sees, 0 for all. ``quantized``: whether K or V is anything but f16, bf16 or f32. ``flash``: whether
    flash attention is on.
    """

    kv_bytes: float
    flops: float
    sharing: float = 1.0
    window: int = 0
    quantized: bool = False
    flash: bool = True

    def seen(self, live_tokens: float) -> float:
        """Cached tokens that are attended to where ``live_tokens`` are in the cache."""
        return min(live_tokens, self.window) if self.window else live_tokens


@dataclass(frozen=True)
class Weights:
    """Weights of one layer that are in one place: a device's index, or ``HOST``.

    ``bytes`` as stored, ``n_params`` in number, of which ``n_looked_up`` have a type that a processor looks up in
    tables; ``experts``: routed experts, of which a token reads only those used. ``is_host_only``: the host computes
    with them in prompts, too, since no device can.
    """

    place: int
    bytes: float
    n_params: float
    experts: bool = False
    n_looked_up: float = 0
    is_host_only: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer, or the output.

    ``home``: the place that has it. ``cache``: that of its KV cache where it is another, as with ``-nkvo``.
    ``attends``: the device that computes attention to a cache on the host, since it has projections of a layer there.
    ``n_host_only``: tensors that llama.cpp keeps on the host wherever the layer is, since no device computes with them.
    """

    home: int
    weights: tuple[Weights, ...]
    attention: Attention | None = None
    cache: int | None = None
    attends: int | None = None
    n_host_only: int = 0

    @property
    def is_host_only(self) -> bool:
        """Whether the host computes with weights of it in prompts, too."""
        return self.n_host_only > 0


@dataclass(frozen=True)
class Work:
    """A placed model. ``layers`` in graph order, the output last, without the token embedding, which is only looked up.

    Layers that are alike should be one object: it is priced once. ``n_splits``: graph splits of prompt processing and
    of generation as llama.cpp counted them (``Breakdown.n_splits``); ``None``: predicted (``predicted_splits``).
    ``is_mapped``: host weights are mapped from their file.
    """

    layers: tuple[Layer, ...]
    n_embd: int
    n_expert: int = 0
    n_expert_used: int = 0
    n_ubatch: int = 512
    op_offload: bool = True
    n_splits: tuple[int, int] | None = None
    is_mapped: bool = False


@dataclass(frozen=True)
class Workload:
    """A request."""

    prompt: int = 2048
    """Tokens to process."""
    generate: int = 512
    """Tokens to make after them."""
    cached: int = 0
    """Tokens that are in the cache before."""


@dataclass(frozen=True)
class Part:
    """A named share of an estimate."""

    name: str
    """What takes the time."""
    prompt: float
    """Seconds per prompt token."""
    generation: float
    """Seconds per generated token."""


@dataclass(frozen=True)
class Estimate:
    """Estimated time, on average over a request."""

    prompt_seconds: float
    """Seconds per prompt token."""
    generation_seconds: float
    """Seconds per generated token."""
    seconds: float
    """Seconds of the whole request."""
    parts: tuple[Part, ...] = field(default=())
    """What the time is spent on; they add up to the seconds per token."""

    @property
    def prompt_tokens_per_second(self) -> float:
        """Infinite where nothing is to be computed."""
        return 1 / self.prompt_seconds if self.prompt_seconds else float("inf")

    @property
    def generation_tokens_per_second(self) -> float:
        """Infinite where nothing is to be computed."""
        return 1 / self.generation_seconds if self.generation_seconds else float("inf")


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro batch of a prompt (``prompt``) and of one generated token (``generation``)."""

    prompt: float = 0.0
    generation: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.prompt + other.prompt, self.generation + other.generation)

    def __mul__(self, count: float) -> Seconds:
        return Seconds(self.prompt * count, self.generation * count)


@dataclass(frozen=True)
class Setting:
    """What prices depend on beside the placement.

    ``batch``: tokens of a micro batch. ``prompt_live``, ``generation_live``: tokens in the cache, on average over the
    prompt and over generation. ``streams``: whether host weights are computed with on the first device in a prompt
    (``streamer``; a remote one never does that).
    """

    devices: tuple[DeviceSpeed, ...]
    host: HostSpeed
    costs: Costs
    n_embd: int
    batch: int
    prompt_live: float
    generation_live: float
    streams: bool
    expert_share: float
    experts_touched: float
    workload: Workload
    is_mapped: bool = False

    def request(self, seconds: Seconds) -> float:
        """Seconds of the whole request that have ``seconds`` in every micro batch and every generated token."""
        return self.workload.prompt / self.batch * seconds.prompt + self.workload.generate * seconds.generation

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """The family of every device."""
        return tuple(self.costs.families[family_name(device)] for device in self.devices)

    @functools.cached_property
    def streamer(self) -> int:
        """The device that computes with host weights in a prompt, where one does."""
        return next(d for d, device in enumerate(self.devices) if not device.is_remote)

    def on(self, devices: tuple[DeviceSpeed, ...]) -> Setting:
        """The same on other devices."""
        return replace(self, devices=devices, streams=self.streams and _has_local(devices))

    def link(self, device: int) -> float:
        """Bytes per second that get to a device."""
        speed = self.devices[device]
        return speed.pcie if speed.is_remote else self.costs.pcie * speed.pcie

    @property
    def stream(self) -> float:
        """Bytes of host weights per second that get to the device which computes with them in a prompt."""
        link = self.link(self.streamer)
        return min(link, self.costs.mapped) if self.is_mapped else link

    @property
    def threads(self) -> int:
        """Threads that compute on the host."""
        return self.host.threads or self.costs.host.threads


def setting(
    work: Work, devices: Sequence[DeviceSpeed], host: HostSpeed, workload: Workload, costs: Costs | None = None
) -> Setting:
    """What prices depend on beside where ``work`` has its layers. Raises ``ValueError`` on speeds that are none."""
    if host.bandwidth <= 0 or any(min(d.bandwidth, d.compute, d.pcie) <= 0 for d in devices):
        raise ValueError("bandwidths and compute must be greater than 0")
    batch = max(1, min(work.n_ubatch, workload.prompt or work.n_ubatch))
    share = work.n_expert_used / work.n_expert if work.n_expert else 1.0
    return Setting(
        tuple(devices),
        host,
        costs or default(),
        work.n_embd,
        batch,
        workload.cached + workload.prompt / 2,
        workload.cached + workload.prompt + workload.generate / 2,
        _has_local(devices) and work.op_offload and batch >= MIN_OFFLOAD_BATCH,
        share,
        1 - (1 - share) ** batch,
        workload,
        work.is_mapped,
    )


def _has_local(devices: Iterable[DeviceSpeed]) -> bool:
    return not all(device.is_remote for device in devices)


def tensor_seconds(weights: Weights, at: Setting) -> Seconds:
    """What reading and computing with ``weights`` costs where they are."""
    costs = at.costs
    read = max(weights.bytes, weights.n_params * costs.min_bits / 8)
    generation_bytes = read * (at.expert_share if weights.experts else 1)
    prompt_bytes = weights.bytes * (at.experts_touched if weights.experts else 1)
    flops = 2 * weights.n_params * (at.expert_share if weights.experts else 1) * at.batch
    if weights.place != HOST:
        device, family = at.devices[weights.place], at.families[weights.place]
        bandwidth = family.bandwidth * device.bandwidth
        return Seconds(
            flops / (family.compute * device.compute) + prompt_bytes / bandwidth, generation_bytes / bandwidth
        )
    bandwidth = costs.host.bandwidth * at.host.bandwidth
    if at.streams and not weights.is_host_only:
        # the first device takes over what the host has, and reads it over PCIe for every micro batch
        device, family = at.devices[at.streamer], at.families[at.streamer]
        prompt = prompt_bytes / at.stream + flops / (family.compute * device.compute)
    else:
        prompt = prompt_bytes / bandwidth + flops / (costs.host.compute * at.threads)
    looked_up = weights.n_looked_up * (at.expert_share if weights.experts else 1) / (costs.host.lookup * at.threads)
    return Seconds(prompt, max(generation_bytes / bandwidth, looked_up))


def layer_seconds(layer: Layer, at: Setting) -> Seconds:
    """What a layer costs beside its weights: its fixed time, and attention. Splits and hops are ``price``'s."""
    return _fixed(layer, at) + attention_seconds(layer, at)


def _fixed(layer: Layer, at: Setting) -> Seconds:
    sync = at.costs.host.sync * at.threads
    if layer.home == HOST:
        # attention and feed-forward
        streamer = at.families[at.streamer].layer if at.streams else 0.0
        return Seconds(streamer + (2 * sync if layer.is_host_only or not at.streams else 0.0), 2 * sync)
    home = at.families[layer.home].layer
    away = sync if any(weights.place == HOST for weights in layer.weights) else 0.0
    return Seconds(home + (away if layer.is_host_only or not at.streams else 0.0), home + away)


def attention_seconds(layer: Layer, at: Setting) -> Seconds:
    """What the attention of ``layer`` takes."""
    attention = layer.attention
    if attention is None:
        return Seconds()
    costs = at.costs
    prompt_seen, seen = attention.seen(at.prompt_live), attention.seen(at.generation_live)
    flops = attention.flops * prompt_seen * at.batch
    on_host = (costs.host.attention if attention.flash else costs.host.plain_attention) * at.threads
    cache = layer.home if layer.cache is None else layer.cache
    if cache == HOST and ((not attention.flash and layer.attends is None) or _computes_on_host(layer)):
        generation = attention.flops * seen / on_host
    elif cache == HOST:
        # the device computes, and has all of the cache copied for every token
        device = at.devices[layer.home if layer.attends is None else layer.attends]
        generation = attention.kv_bytes * seen / (device.pcie * (1 if device.is_remote else costs.pageable))
    else:
        device, family = at.devices[cache], at.families[cache]
        # kernels for one token of a cache that is not f16 read it for each query head, not for each KV head
        read = attention.kv_bytes * (attention.sharing if attention.quantized else 1)
        reached = family.quantized_cache if attention.quantized else family.cache
        generation = read * seen / (reached * device.bandwidth)
    if cache != HOST or (at.streams and not _are_projections_kept(layer)):
        place = cache if cache != HOST else at.streamer
        device, family = at.devices[place], at.families[place]
        prompt = flops / (family.attention * device.compute)
        if cache == HOST:
            prompt += attention.kv_bytes * prompt_seen / at.link(place)
    else:
        prompt = flops / on_host
    return Seconds(prompt, generation)


def _computes_on_host(layer: Layer) -> bool:
    """Whether attention next to a cache on the host runs there too: its projections are on the host.

    llama.cpp's scheduler gives an operation without weights to the device that has its neighbours
    (``ggml_backend_sched_split_graph``).
    """
    if layer.home == HOST:
        return layer.attends is None
    projections = _projections(layer)
    return projections is not None and projections.place == HOST


def _are_projections_kept(layer: Layer) -> bool:
    """Whether the host projects for attention in prompts, too, and so computes attention next to a cache there."""
    projections = _projections(layer)
    return projections is not None and projections.is_host_only


def _projections(layer: Layer) -> Weights | None:
    """The weights that attention begins with: the first that are not experts."""
    return next((weights for weights in layer.weights if not weights.experts), None)


def predicted_splits(work: Work, bare_splits: int) -> int:
    """Graph splits of generation that llama.cpp will make: one for every change of place in graph order, and one.

    Tensors of a layer that are apart from it are one change there and one back, and so is a cache on the host; the
    token embedding is on the host. ``bare_splits`` are those of a layer that has nothing but its cache on a device.
    Tensors that llama.cpp keeps on the host are between others of their layer: ``_splits_of_kept``.
    """
    splits = 1
    place = HOST
    for layer in work.layers:
        splits += layer.home != place
        place = layer.home
        if layer.attention and place != HOST and all(weights.place == HOST for weights in layer.weights):
            # norms, queries, keys, attention, the output: there and back for each
            splits += bare_splits
        else:
            splits += 2 * len({weights.place for weights in layer.weights if not weights.is_host_only} - {place})
            splits += _splits_of_kept(layer)
        if layer.attention and layer.cache not in (None, place):
            splits += 2
    return splits


def predicted_prompt_splits(work: Work) -> int:
    """Graph splits of a prompt whose host weights are streamed: every streamed tensor is one.

    Of a layer that is on the host llama.cpp makes about a dozen, of the feed-forward part alone three.
    """
    splits = 2 + hops(work)
    for layer in work.layers:
        if layer.home == HOST:
            splits += 12
        elif any(weights.place == HOST and not weights.is_host_only for weights in layer.weights):
            splits += 3
        splits += _splits_of_kept(layer)
    return splits


def _splits_of_kept(layer: Layer) -> int:
    """Graph splits of a layer on a device, of whose tensors llama.cpp keeps some on the host.

    One more than there are: within two of what llama.cpp itself counts in dummy loads of eleven models in ``TQ2_0`` on
    CUDA, with one to nine such tensors in each layer, and of three with one (``ssm_a``) on Vulkan.
    """
    return layer.n_host_only + 1 if layer.n_host_only and layer.home != HOST else 0


def hops(work: Work, remote: Collection[int] = ()) -> int:
    """How often the graph passes on from one device to another that is none of ``remote``."""
    homes = [layer.home for layer in work.layers if layer.home != HOST]
    return sum(a != b and b not in remote for a, b in itertools.pairwise(homes))


def visits(work: Work, remote: Collection[int]) -> dict[int, int]:
    """How often the graph goes to each device of ``remote`` and back, whatever it comes from."""
    found = dict.fromkeys(remote, 0)
    place = HOST
    for layer in work.layers:
        others = {weights.place for weights in layer.weights} | {layer.cache} - {None}
        others.discard(layer.home)
        if layer.home in found:
            found[layer.home] += (layer.home != place) + len(others)
        for other in others:
            if other in found:
                found[other] += 1
        place = layer.home
    return found


def visit_seconds(device: int, at: Setting) -> Seconds:
    """What going to a remote device and back with the activations costs; nothing of a local one."""
    if not at.devices[device].is_remote:
        return Seconds()
    round_trip, activations = at.devices[device].round_trip, 2 * 4 * at.n_embd / at.link(device)
    return Seconds(round_trip + activations * at.batch, round_trip + activations)


def logits_seconds(output: Layer, at: Setting) -> Seconds:
    """What getting the logits of each generated token from a remote device costs, where the output is on one."""
    if output.home == HOST or not at.devices[output.home].is_remote:
        return Seconds()
    n_vocab = sum(weights.n_params for weights in output.weights) / at.n_embd
    return Seconds(0, 4 * n_vocab / at.link(output.home))


def price(
    work: Work, devices: Sequence[DeviceSpeed], host: HostSpeed, workload: Workload, costs: Costs | None = None
) -> Estimate:
    """Seconds of ``workload`` with ``work`` on ``devices`` and ``host``, with ``costs`` (``cost.toml``'s by default).

    Raises ``ValueError`` on speeds of 0 or less.
    """
    at = setting(work, devices, host, workload, costs)
    names = [f"device {d}" for d in range(len(at.devices))] + ["host"]
    parts: dict[str, Seconds] = {}

    def add(name: str, seconds: Seconds) -> None:
        parts[name] = parts.get(name, Seconds()) + seconds

    for layer, count in _repeated(work.layers):
        for weights in layer.weights:
            add(f"{names[weights.place]}: weights", tensor_seconds(weights, at) * count)
        cache = layer.home if layer.cache is None else layer.cache
        add(f"{names[layer.home]}: layers", _fixed(layer, at) * count)
        add(f"{names[cache]}: attention", attention_seconds(layer, at) * count)
    remote = [d for d, device in enumerate(at.devices) if device.is_remote]
    for d, count in visits(work, remote).items():
        add(f"{names[d]}: network", visit_seconds(d, at) * count)
    if work.layers and work.layers[-1].home in remote:
        add(f"{names[work.layers[-1].home]}: network", logits_seconds(work.layers[-1], at))
    passed_on = hops(work, remote)
    splits = work.n_splits[1] if work.n_splits else predicted_splits(work, at.costs.bare_splits)
    prompt_splits = work.n_splits[0] if work.n_splits else predicted_prompt_splits(work) if at.streams else splits
    local = (at.link(d) for d in range(len(at.devices)) if d not in remote)
    activations = 4 * work.n_embd * at.batch / min(local, default=float("inf"))
    # the first split is every model's, and is in the fixed cost of its layers
    add("graph splits", Seconds(max(0, prompt_splits - 1), max(0, splits - 1)) * at.costs.split)
    add("device hops", Seconds(at.costs.hop + activations, at.costs.hop) * passed_on)
    shares = tuple(Part(name, seconds.prompt / at.batch, seconds.generation) for name, seconds in parts.items())
    prompt, generation = sum(part.prompt for part in shares), sum(part.generation for part in shares)
    seconds = workload.prompt * prompt + workload.generate * generation
    return Estimate(prompt, generation, seconds, tuple(part for part in shares if part.prompt or part.generation))


def _repeated(layers: Sequence[Layer]) -> Iterable[tuple[Layer, int]]:
    """Layers with how often each is there, told by identity: hashing them would cost what it saves."""
    found: dict[int, tuple[Layer, int]] = {}
    for layer in layers:
        found[id(layer)] = (layer, found.get(id(layer), (layer, 0))[1] + 1)
    return found.values()


@functools.cache
def family_name(device: DeviceSpeed) -> str:
    """The key of ``Costs.families`` that a device belongs to: the first rule of ``cost.toml`` that it meets."""
    for rule in figures()["rule"]:
        if (
            rule["kind"] in (device.kind, "*")
            and device.compute_capability.startswith(tuple(rule.get("capabilities", [""])))
            and rule.get("named", "") in device.source
        ):
            name: str = rule["family"]
            return name
    raise ValueError(f"no rule for a device of kind {device.kind}")


@functools.cache
def default() -> Costs:
    """The constants of ``cost.toml``."""
    return costs_of(figures())


def costs_of(data: Mapping[str, Any]) -> Costs:
    """``Costs`` from the tables of ``cost.toml``; a family has what ``family.cuda`` has where it says nothing else."""
    base = Family(**data["family"]["cuda"])
    families = {name: replace(base, **figures) for name, figures in data["family"].items()}
    return Costs(families, HostCosts(**data["host"]), **data["graph"])


@functools.cache
def figures() -> dict[str, Any]:
    """The tables of ``cost.toml``."""
    return read_data(__file__)
