"""The cost model: seconds per prompt token and per generated token, from bytes, FLOP and speeds.

llama.cpp computes one layer after the other (``-sm layer``, one sequence), so all costs add up: a layer costs a fixed
time, a weight the time to read it at its place, a cached token the time to attend to it. A search may price tensors and
layers one by one (``tensor_seconds``, ``layer_seconds``). ``cost.toml`` has the share of a datasheet's figure that
llama.cpp reaches, fitted to the published measurements in ``tests/data/speeds``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fitter.machine.host import default_disk_bandwidth
from fitter.machine.speed import AS_ESTIMATED, DeviceSpeed, Factor, HostSpeed
from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.speed.model_facts import WeightFacts
from fitter.storage import read_data

MIN_OFFLOAD_BATCH = 32
"""Least tokens of a batch for which a device computes with host weights (``op_offload``; llama.cpp's default)."""


@dataclass(frozen=True)
class Family:
    """Fitted constants of one kind of device.

    Attributes:
        layer: Seconds of a layer per graph, whatever its size (kernel launches, synchronisation).
        bandwidth: Share of the datasheet's bandwidth that reading weights reaches.
        cache: The same for an f16 KV cache.
        quantized_cache: The same for other KV caches, which are read once for each query head.
        compute: Share of the datasheet's compute that matrix products of a prompt reach.
        attention: The same for attention of a prompt.
        few: Share of ``compute`` that is left for further tokens of one step of generation.
        few_experts: The same in experts, of which each gets few of these tokens.
        experts: Share of ``bandwidth`` that is left for reading the experts of generation, which are small.
        drafts: How much longer drafts take than reading their weights and checking as many tokens of other users.
        misses: Share of the link's speed at which the device gets experts that its cache lacks.
        wait: Seconds that a layer with such a cache waits for them, beside its splits.
    """

    layer: float
    bandwidth: float
    cache: float
    quantized_cache: float
    compute: float
    attention: float
    few: float = 1.0
    few_experts: float = 1.0
    experts: float = 1.0
    drafts: float = 1.0
    misses: float = 1.0
    wait: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Fitted constants of the host.

    Attributes:
        sync: Seconds per thread for each group of a layer's tensors on the host: threads wait for each other after
            every operation.
        bandwidth: Share of the host's bandwidth that reading weights reaches.
        attention: FLOP per second and thread of flash attention in generation.
        plain_attention: The same without flash attention.
        prompt_attention: FLOP per second and thread of flash attention in a prompt.
        quantized_prompt_attention: The same with a cache that is not of floats.
        plain_prompt_attention: The same without flash attention.
        compute: The same for matrix products of a prompt.
        lookup: Weights per second and thread of types with tables (``work.LOOKED_UP``), slower than reading them.
        threads: Number of threads where it is unknown.
        sampling: Seconds to choose a token of an answer, for each token of the vocabulary.
        saved: Bytes per second of a conversation that llama-server copies to its prompt cache.
        restored: The same for one that it copies back.
        paged: Share of the disk's bandwidth that reading mapped weights reaches.
    """

    sync: float
    bandwidth: float
    attention: float
    plain_attention: float
    prompt_attention: float
    quantized_prompt_attention: float
    plain_prompt_attention: float
    compute: float
    lookup: float
    threads: int
    sampling: float = 0.0
    saved: float = math.inf
    restored: float = math.inf
    paged: float = 1.0


@dataclass(frozen=True)
class SplitCounts:
    """Graph splits that llama.cpp makes of one layer.

    Attributes:
        bare: Of a layer with only its cache on a device, in generation.
        apart: For each further place of a layer's weights, in generation.
        cache: For a cache in another place than the layer.
        lent: Further ones of a layer on the host whose attention has weights on a device, in generation.
        lent_prompt: All of such a layer in a prompt with streamed host weights.
        lent_prompt_apart: Further ones of it in that prompt if other weights are on the host.
        host_prompt: Of a layer on the host in such a prompt.
        apart_prompt: Of weights on the host whose layer is on a device, in such a prompt.
    """

    bare: int
    apart: int
    cache: int
    lent: int
    lent_prompt: int
    lent_prompt_apart: int
    host_prompt: int
    apart_prompt: int


@dataclass(frozen=True)
class Costs:
    """All fitted constants.

    Attributes:
        families: Constants of each kind of device.
        host: Constants of the host.
        split: Seconds of a graph split.
        hop: Seconds to pass activations to another device.
        pcie: Share of the theoretical PCIe bandwidth that streaming weights reaches.
        pageable: The same for a KV cache in host memory that a device attends to.
        min_bits: Unpacking a weight takes at least as long as reading this many bits.
        splits: Graph splits of a layer.
        mapped: Limit in bytes per second for weights that are mapped from their file; the driver copies them twice.
        unlike: Tokens of a step use as many experts as so many unlike ones: their number to this power.
        unlike_of_text: The same for tokens of a text's micro batch (``Workload.is_text``), which are more alike.
    """

    families: Mapping[str, Family]
    host: HostCosts
    split: float
    hop: float
    pcie: float
    pageable: float
    min_bits: float
    splits: SplitCounts
    mapped: float = math.inf
    unlike: float = 1.0
    unlike_of_text: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, for each computed token and each cached token.

    Attributes:
        kv_bytes: Bytes of K and V.
        flops: 2 × query heads × (key length + value length).
        sharing: Query heads for each KV head; 1 if the heads share one latent vector (MLA), which is read once.
        window: Tokens of the sliding window; 0 for all.
        quantized: Whether K or V is anything but f16, bf16 or f32.
        flash: Whether flash attention is on.
    """

    kv_bytes: float
    flops: float
    sharing: float = 1.0
    window: int = 0
    quantized: bool = False
    flash: bool = True

    def seen(self, live_tokens: float) -> float:
        """Return the cached tokens that a token attends to, with ``live_tokens`` in the cache."""
        return min(live_tokens, self.window) if self.window else live_tokens


@dataclass(frozen=True)
class ExpertCache:
    """A cache of experts whose weights are on the host.

    Attributes:
        device: Index of its device.
        hit_rate: How often a token finds an expert there.
        spared: Part of the time to copy experts from the host that a large batch is spared.
    """

    device: int
    hit_rate: float
    spared: float = 0.0


@dataclass(frozen=True)
class Weights:
    """Weights of one layer in one place.

    Attributes:
        place: A device's index, or ``HOST``.
        bytes: Bytes as stored.
        n_params: Number of weights.
        experts: Whether they are routed experts, of which a token reads only the used ones.
        n_looked_up: Number of weights in types with tables.
        is_host_only: Whether the host computes with them in prompts too, because no device can.
        cache: The cache of these experts, if any: its device then computes with them.
    """

    place: int
    bytes: float
    n_params: float
    experts: bool = False
    n_looked_up: float = 0
    is_host_only: bool = False
    cache: ExpertCache | None = None


@dataclass(frozen=True)
class Layer:
    """A layer, or the output.

    Attributes:
        home: The layer's place.
        weights: Its weights, by place.
        attention: Its attention, if any.
        cache: The place of its KV cache if it is not ``home``, as with ``-nkvo``.
        attends: The device that computes attention to a cache on the host, because it has a projection of the layer.
        state: Bytes of a user's recurrent state that each token reads and writes; in ``weights`` for one user.
        n_host_only: Number of tensors that llama.cpp keeps on the host because no device computes with them.
    """

    home: int
    weights: tuple[Weights, ...]
    attention: Attention | None = None
    cache: int | None = None
    attends: int | None = None
    n_host_only: int = 0
    state: float = 0.0

    @property
    def is_host_only(self) -> bool:
        """Whether the host computes with some of its weights in prompts too."""
        return self.n_host_only > 0

    @property
    def is_bare(self) -> bool:
        """Whether a device has only its cache."""
        return bool(self.attention) and self.home != HOST and all(weights.place == HOST for weights in self.weights)


@dataclass(frozen=True)
class Work:
    """A placed model.

    Attributes:
        layers: Layers in graph order, the output last, without the token embedding. Equal layers should be one object,
            which is priced once.
        n_embd: Length of an activation vector.
        n_expert: Number of experts.
        n_expert_used: Number of experts that a token uses.
        n_ubatch: Tokens of a micro batch.
        op_offload: Whether devices compute with host weights in prompts.
        n_splits: Graph splits of prompts and of generation, as counted by llama.cpp (``Breakdown.n_splits``); ``None``
            to predict them (``splits_of``).
        is_mapped: Whether host weights are mapped from their file.
        host_room: Bytes of memory for them; whoever needs what is beyond has it read from the disk.
    """

    layers: tuple[Layer, ...]
    n_embd: int
    n_expert: int = 0
    n_expert_used: int = 0
    n_ubatch: int = 512
    op_offload: bool = True
    n_splits: tuple[int, int] | None = None
    is_mapped: bool = False
    host_room: float = math.inf

    @functools.cached_property
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """Equal layers, by identity, and their numbers: hashing them would cost as much as it saves."""
        counts: dict[int, list[Any]] = {}
        for layer in self.layers:
            counts.setdefault(id(layer), [layer, 0])[1] += 1
        return tuple([(layer, count) for layer, count in counts.values()])

    @functools.cached_property
    def paged(self) -> float:
        """Share of the weights on the host that its memory has no room for."""
        on_host = sum(w.bytes * count for layer, count in self.counted for w in layer.weights if w.place == HOST)
        return max(0.0, 1 - self.host_room / on_host) if on_host else 0.0

    @functools.cached_property
    def homes(self) -> tuple[int, ...]:
        """The places that the graph goes through, in order."""
        return tuple([home for home, _ in itertools.groupby([layer.home for layer in self.layers])])


@dataclass(frozen=True)
class Workload:
    """A request."""

    prompt: int = 2048
    """Tokens of the prompt."""
    generate: int = 512
    """Tokens to generate."""
    cached: int = 0
    """Tokens in the cache before the request."""
    users: int = 1
    """Users that send such a request at once: each step of generation makes a token for each of them."""
    drafted: int = 0
    """Tokens that are drafted for each user, and checked in the same step."""
    is_unified: bool = False
    """Whether one KV cache holds the tokens of all users: then a device computes attention to all of them for each."""
    is_text: bool = False
    """Whether the prompt is a text that a model was trained for; else its tokens use experts as if by chance."""

    @property
    def tokens_of_step(self) -> int:
        """Tokens that a step of generation computes."""
        return self.users * (1 + self.drafted)


@dataclass(frozen=True)
class Part:
    """A named part of an estimate."""

    name: str
    """The step, such as ``device 0: weights``."""
    prompt: float
    """Seconds per prompt token."""
    generation: float
    """Seconds per generated token."""


@dataclass(frozen=True)
class Estimate:
    """Estimated time, averaged over a request."""

    prompt_seconds: float
    """Seconds per prompt token."""
    generation_seconds: float
    """Seconds per generated token of each user."""
    seconds: float
    """Seconds until all users have their answers."""
    parts: tuple[Part, ...] = field(default=())
    """All steps; their seconds add up to the seconds per token."""

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of the prompt; infinite if it takes no time."""
        return 1 / self.prompt_seconds if self.prompt_seconds else float("inf")

    @property
    def generation_tokens_per_second(self) -> float:
        """Speed of generation; infinite if it takes no time."""
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


class Rates(NamedTuple):
    """Seconds of weights of one kind at one place, by their bytes and their number.

    A plan prices the weights of a layer by them, and the bound single tensors.

    Attributes:
        prompt_byte: Of a byte in a micro batch of a prompt: reading or copying it.
        prompt_param: Of a weight there: its products with all tokens.
        read: Of a byte in a step of generation. The slowest step counts: reading, unpacking or looking up.
        unpacked: Of a weight in that step.
        looked_up: Of a weight of a type with tables in that step.
        copied: Of a byte in that step, besides: experts that their cache does not have.
        further: Of a weight in that step, besides: its products with all tokens but the first.
    """

    prompt_byte: float
    prompt_param: float
    read: float
    unpacked: float
    looked_up: float
    copied: float
    further: float

    def steps(self, weights: Weights | WeightFacts) -> tuple[float, float, float]:
        """Return the seconds to read, unpack and look up ``weights`` in generation."""
        return self.read * weights.bytes, self.unpacked * weights.n_params, self.looked_up * weights.n_looked_up

    def seconds(self, weights: Weights | WeightFacts, slowest: int | None = None) -> Seconds:
        """Compute the seconds of ``weights``.

        ``slowest``: the index of the step that counts; by default the slowest.
        """
        steps = self.steps(weights)
        generation = max(steps) if slowest is None else steps[slowest]
        return Seconds(
            self.prompt_byte * weights.bytes + self.prompt_param * weights.n_params,
            generation + self.copied * weights.bytes + self.further * weights.n_params,
        )


class Priced(NamedTuple):
    """A layer with the parts of an estimate that it adds to, their sum, and the seconds of its graph splits."""

    layer: Layer
    parts: tuple[tuple[str, Seconds], ...]
    seconds: Seconds
    splits: Seconds


_MOST_PRICED = 4096


@dataclass(frozen=True)
class PriceBasis:
    """Everything but the placement that decides prices.

    Attributes:
        devices: Speeds of the devices.
        host: Speed of the host.
        costs: Constants of the cost model.
        n_embd: Length of an activation vector.
        batch: Tokens of a micro batch.
        prompt_live: Average number of cached tokens during the prompt.
        generation_live: The same during generation.
        streams: Whether a local device computes with host weights in prompts (``streamer``).
        expert_share: Share of the experts that one token uses.
        experts_touched: Share of the experts that a micro batch uses.
        experts_of_step: Share of the experts that the tokens of a step of generation use.
        workload: The request.
        is_mapped: Whether host weights are mapped from their file.
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
    experts_of_step: float
    workload: Workload
    is_mapped: bool = False
    _priced: dict[int, Priced] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rates: dict[tuple[object, ...], Rates] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of devices and host in the parts of an estimate; ``HOST`` is the index of the host's."""
        return (*(f"device {d}" for d in range(len(self.devices))), "host")

    def priced(self, layer: Layer) -> Priced:
        """Return the price of a layer, made once: hashing a layer would cost as much as this saves."""
        if id(layer) not in self._priced:
            if len(self._priced) >= _MOST_PRICED:
                # with a cache of experts, nearly every placement has other layers
                self._priced.clear()
            cache = layer.home if layer.cache is None else layer.cache
            parts = (
                *((f"{self.names[each.place]}: weights", tensor_seconds(each, self)) for each in layer.weights),
                (f"{self.names[layer.home]}: layers", _fixed(layer, self)),
                (f"{self.names[cache]}: attention", attention_seconds(layer, self)),
            )
            seconds = sum((seconds for _, seconds in parts), Seconds())
            of_prompt, of_step = splits_of(layer, self.costs.splits)
            splits = Seconds(of_prompt if self.streams else of_step, of_step) * self.costs.split
            self._priced[id(layer)] = Priced(layer, parts, seconds, splits)
        return self._priced[id(layer)]

    def rates(self, weights: Weights) -> Rates:
        """Return the rates of all weights that differ from ``weights`` only in size."""
        key = weights.place, weights.experts, weights.is_host_only, weights.cache
        if key not in self._rates:
            self._rates[key] = _rates_of(weights, self)
        return self._rates[key]

    def request(self, seconds: Seconds) -> float:
        """Return the seconds of the whole request for the seconds of each micro batch and each generated token."""
        workload = self.workload
        prompts = workload.users * (workload.prompt / self.batch * seconds.prompt)
        return prompts + workload.generate * seconds.generation

    @property
    def streams_answers(self) -> bool:
        """Whether a local device computes with host weights in generation, too, since a step has enough tokens."""
        return self.streams and self.workload.tokens_of_step >= MIN_OFFLOAD_BATCH

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """Constants of each device."""
        return tuple(self.costs.families[family_name(device)] for device in self.devices)

    def bandwidth(self, place: int) -> float:
        """Return the bytes of weights that a place reads per second."""
        if place == HOST:
            return self.costs.host.bandwidth * self.host.bandwidth
        return self.families[place].bandwidth * self.devices[place].bandwidth

    def compute(self, place: int) -> float:
        """Return the FLOP per second of a place in matrix products of a prompt."""
        if place == HOST:
            return self.costs.host.compute * self.threads
        return self.families[place].compute * self.devices[place].compute

    @functools.cached_property
    def streamer(self) -> int:
        """Index of the device that computes with host weights in prompts."""
        return next(d for d, device in enumerate(self.devices) if not device.is_remote)

    @functools.cached_property
    def remote(self) -> tuple[int, ...]:
        """Indices of the devices on other machines."""
        return tuple(d for d, device in enumerate(self.devices) if device.is_remote)

    @functools.cached_property
    def hop(self) -> Seconds:
        """Seconds to pass activations to another device of this machine."""
        link = min((self.link(d) for d in range(len(self.devices)) if d not in self.remote), default=math.inf)
        return Seconds(self.costs.hop + 4 * self.n_embd * self.batch / link, self.costs.hop)

    @functools.cached_property
    def is_tuned(self) -> bool:
        """Whether ``fitter tune`` has measured the host or a device."""
        factors = (self.host.factors, *(device.factors for device in self.devices))
        return any(each != AS_ESTIMATED for each in factors)

    def tuned(self, seconds: Seconds, place: int, part: str) -> Seconds:
        """Correct the seconds of a ``part`` (a field of ``Factors``) at ``place`` by what was measured of it."""
        if not self.is_tuned:
            return seconds
        factors = self.host.factors if place == HOST else self.devices[place].factors
        factor: Factor = getattr(factors, part)
        return Seconds(seconds.prompt * factor.prompt, seconds.generation * factor.generation)

    def on(self, devices: tuple[DeviceSpeed, ...]) -> PriceBasis:
        """Return the setting with other devices."""
        return replace(self, devices=devices, streams=self.streams and _has_local(devices))

    def link(self, device: int) -> float:
        """Return the bytes per second that reach a device."""
        speed = self.devices[device]
        return speed.pcie if speed.is_remote else self.costs.pcie * speed.pcie

    @property
    def stream(self) -> float:
        """Bytes per second of host weights that reach the streamer."""
        return self.upload(self.streamer)

    def upload(self, device: int) -> float:
        """Return the bytes per second of host weights that reach a device."""
        link = self.link(device)
        return min(link, self.costs.mapped) if self.is_mapped else link

    @property
    def threads(self) -> int:
        """Threads that compute on the host."""
        return self.host.threads or self.costs.host.threads


def setting(
    work: Work, devices: Sequence[DeviceSpeed], host: HostSpeed, workload: Workload, costs: Costs | None = None
) -> PriceBasis:
    """Build the setting of ``work`` on devices and host. Raises ``ValueError`` if a speed is not above 0."""
    if host.bandwidth <= 0 or any(min(d.bandwidth, d.compute, d.pcie) <= 0 for d in devices):
        raise ValueError("bandwidths and compute must be greater than 0")
    costs = costs or default()
    batch = max(1, min(work.n_ubatch, workload.prompt or work.n_ubatch))
    share = work.n_expert_used / work.n_expert if work.n_expert else 1.0
    unlike = batch**costs.unlike_of_text if workload.is_text else batch
    return PriceBasis(
        tuple(devices),
        host,
        costs,
        work.n_embd,
        batch,
        workload.cached + workload.prompt / 2,
        workload.cached + workload.prompt + workload.generate / 2,
        _has_local(devices) and work.op_offload and batch >= MIN_OFFLOAD_BATCH,
        share,
        1 - (1 - share) ** unlike,
        1 - (1 - share) ** workload.tokens_of_step**costs.unlike if workload.tokens_of_step > 1 else share,
        workload,
        work.is_mapped,
    )


def _has_local(devices: Iterable[DeviceSpeed]) -> bool:
    return not all(device.is_remote for device in devices)


def tensor_seconds(weights: Weights, at: PriceBasis) -> Seconds:
    """Compute the seconds to read and compute with ``weights`` at their place."""
    return at.rates(weights).seconds(weights)


def _rates_of(weights: Weights, at: PriceBasis) -> Rates:
    """Compute the rates of weights. The streamer computes with host weights, where their operation allows it."""
    costs, place, cache = at.costs, weights.place, weights.cache
    of_experts = at.expert_share, at.experts_touched, at.experts_of_step
    share, touched, of_step = of_experts if weights.experts else (1.0, 1.0, 1.0)
    may_stream = place == HOST and not weights.is_host_only
    unpacked = looked_up = copied = 0.0
    prompt_place, prompt_byte = place, touched / at.bandwidth(place)
    if may_stream and at.streams:
        prompt_place = at.streamer
        spared = cache.spared if cache and cache.device == prompt_place else 0.0
        # what is cached is read and written once more on the device
        prompt_byte = touched * ((1 - spared) / at.stream + 2 * spared / at.bandwidth(prompt_place))
    if may_stream and at.streams_answers and not cache:
        place, read = at.streamer, of_step / at.stream
    else:
        if cache:
            place, link = cache.device, at.families[cache.device].misses * at.upload(cache.device)
            copied = (1 - cache.hit_rate) * of_step / link
        elif place == HOST:
            looked_up = of_step / (costs.host.lookup * at.threads)
        read = of_step / at.bandwidth(place)
        unpacked = read * costs.min_bits / 8
        if weights.experts and place != HOST:
            read /= at.families[place].experts
    family = None if place == HOST else at.families[place]
    few = 1.0 if family is None else family.few_experts if weights.experts else family.few
    further = 2 * share * (at.workload.tokens_of_step - 1) / (few * at.compute(place))
    prompt_param = 2 * share * at.batch / at.compute(prompt_place)
    tuned = at.tuned(Seconds(1.0, 1.0), weights.place, "weights")
    return Rates(
        tuned.prompt * prompt_byte,
        tuned.prompt * prompt_param,
        *(tuned.generation * each for each in (read, unpacked, looked_up, copied, further)),
    )


def layer_seconds(layer: Layer, at: PriceBasis) -> Seconds:
    """Compute the seconds of a layer without weights: its fixed time and attention. ``price`` adds splits and hops."""
    return _fixed(layer, at) + attention_seconds(layer, at)


def _states_seconds(layer: Layer, at: PriceBasis, place: int) -> Seconds:
    """Compute the seconds to read and write the recurrent states of all users but the first, in ``Layer.weights``."""
    if not layer.state or at.workload.users == 1:
        return Seconds()
    return Seconds(0.0, (at.workload.users - 1) * 2 * layer.state / at.bandwidth(place))


def _fixed(layer: Layer, at: PriceBasis) -> Seconds:
    return at.tuned(_untuned_fixed(layer, at), layer.home, "layers")


def _untuned_fixed(layer: Layer, at: PriceBasis) -> Seconds:
    sync = at.costs.host.sync * at.threads
    if layer.home == HOST:
        # attention and feed-forward
        streamer = at.families[at.streamer].layer if at.streams else 0.0
        return Seconds(streamer + (2 * sync if layer.is_host_only or not at.streams else 0.0), 2 * sync)
    home = at.families[layer.home].layer
    away = sync if any(weights.place == HOST and not weights.cache for weights in layer.weights) else 0.0
    wait = at.families[layer.home].wait if any(weights.cache for weights in layer.weights) else 0.0
    return Seconds(home + (away if layer.is_host_only or not at.streams else 0.0), home + away + wait)


def attention_seconds(layer: Layer, at: PriceBasis) -> Seconds:
    """Compute the seconds of a layer's attention, and of the recurrent states of further users."""
    cache = layer.home if layer.cache is None else layer.cache
    seconds = _attention_seconds(layer, layer.attention, at) if layer.attention else Seconds()
    return at.tuned(seconds + _states_seconds(layer, at, cache), cache, "attention")


def _attention_seconds(layer: Layer, attention: Attention, at: PriceBasis) -> Seconds:
    costs = at.costs
    prompt_seen, seen = attention.seen(at.prompt_live), attention.seen(at.generation_live)
    flops = attention.flops * prompt_seen * at.batch
    on_host = (costs.host.attention if attention.flash else costs.host.plain_attention) * at.threads
    of_prompt = costs.host.plain_prompt_attention
    if attention.flash:
        of_prompt = costs.host.quantized_prompt_attention if attention.quantized else costs.host.prompt_attention
    cache = layer.home if layer.cache is None else layer.cache
    if cache == HOST and ((not attention.flash and layer.attends is None) or _computes_on_host(layer)):
        generation = attention.flops * seen / on_host
    elif cache == HOST:
        # the device computes; the whole cache is copied to it for every token
        device = at.devices[layer.home if layer.attends is None else layer.attends]
        generation = attention.kv_bytes * seen / (device.pcie * (1 if device.is_remote else costs.pageable))
    else:
        device, family = at.devices[cache], at.families[cache]
        # kernels for one token of a cache that is not f16 read it for each query head, not for each KV head
        read = attention.kv_bytes * (attention.sharing if attention.quantized else 1)
        reached = family.quantized_cache if attention.quantized else family.cache
        generation = read * seen / (reached * device.bandwidth)
        if at.workload.is_unified:
            others = (at.workload.users - 1) * seen
            generation += attention.flops * others / (family.attention * device.compute)
    if cache != HOST or (at.streams and not _are_projections_kept(layer)):
        place = cache if cache != HOST else at.streamer
        device, family = at.devices[place], at.families[place]
        prompt = flops / (family.attention * device.compute)
        if cache == HOST:
            prompt += attention.kv_bytes * prompt_seen / at.link(place)
    else:
        prompt = flops / (of_prompt * at.threads)
    return Seconds(prompt, generation * at.workload.users)


def _computes_on_host(layer: Layer) -> bool:
    """Return whether the host computes attention next to a host cache, because it has the projections.

    llama.cpp's scheduler gives an operation without weights to the device of its neighbours
    (``ggml_backend_sched_split_graph``).
    """
    if layer.home == HOST:
        return layer.attends is None
    projections = _projections(layer)
    return projections is not None and projections.place == HOST


def _are_projections_kept(layer: Layer) -> bool:
    """Return whether the host projects in prompts too, and so computes attention next to a host cache."""
    projections = _projections(layer)
    return projections is not None and projections.is_host_only


def _projections(layer: Layer) -> Weights | None:
    """Return the weights at the start of attention: the first that are no experts."""
    return next((weights for weights in layer.weights if not weights.experts), None)


def splits_of(layer: Layer, counts: SplitCounts) -> tuple[int, int]:
    """Predict the graph splits of a layer: of a prompt with streamed host weights, and of generation."""
    of_cache = counts.cache if layer.attention and layer.cache not in (None, layer.home) else 0
    places = {weights.place for weights in layer.weights if not weights.is_host_only}
    if layer.home == HOST and layer.attends is not None:
        prompt = counts.lent_prompt + counts.lent_prompt_apart * (HOST in places)
        return prompt + of_cache, counts.apart * len(places - {HOST}) + counts.lent + of_cache
    if layer.home == HOST:
        return counts.host_prompt + of_cache, counts.apart * len(places - {HOST}) + of_cache
    # tensors that llama.cpp keeps on the host: one more than there are (``cost.toml``)
    kept = layer.n_host_only + 1 if layer.n_host_only else 0
    generation = counts.bare if layer.is_bare else counts.apart * len(places - {layer.home}) + kept
    return counts.apart_prompt * (HOST in places) + kept + of_cache, generation + of_cache


def hops(work: Work, remote: Collection[int] = ()) -> int:
    """Count how often the graph passes from one device to another that is not in ``remote``."""
    homes = [home for home in work.homes if home != HOST]
    return sum([a != b and b not in remote for a, b in itertools.pairwise(homes)])


def visits(work: Work, remote: Collection[int]) -> dict[int, int]:
    """Count how often the graph goes to each device of ``remote`` and back."""
    counts = dict.fromkeys(remote, 0)
    if not counts:
        return counts
    place = HOST
    for layer in work.layers:
        others = {weights.place for weights in layer.weights} | {layer.cache} - {None}
        others.discard(layer.home)
        if layer.home in counts:
            counts[layer.home] += (layer.home != place) + len(others)
        for other in others:
            if other in counts:
                counts[other] += 1
        place = layer.home
    return counts


def visit_seconds(device: int, at: PriceBasis) -> Seconds:
    """Compute the seconds of one visit to a remote device with the activations; 0 for a local device."""
    if not at.devices[device].is_remote:
        return Seconds()
    round_trip, activations = at.devices[device].round_trip, 2 * 4 * at.n_embd / at.link(device)
    of_prompt, of_step = activations * at.batch, activations * at.workload.tokens_of_step
    return at.tuned(Seconds(round_trip + of_prompt, round_trip + of_step), device, "network")


def logits_seconds(output: Layer, at: PriceBasis) -> Seconds:
    """Compute the seconds to fetch the logits of each generated token from a remote output; 0 for a local one."""
    if output.home == HOST or not at.devices[output.home].is_remote:
        return Seconds()
    n_vocab = sum(weights.n_params for weights in output.weights) / at.n_embd
    return at.tuned(Seconds(0, 4 * n_vocab * at.workload.tokens_of_step / at.link(output.home)), output.home, "network")


def price(
    work: Work, devices: Sequence[DeviceSpeed], host: HostSpeed, workload: Workload, costs: Costs | None = None
) -> Estimate:
    """Estimate the seconds of ``workload`` with ``work`` on ``devices`` and ``host``.

    Of several users, one prompt is computed after the other, and then all answers together, a step for a token of each.

    Args:
        work: The placed model.
        devices: Speeds of the devices.
        host: Speed of the host.
        workload: The request.
        costs: Constants of the cost model; by default those of ``cost.toml``.

    Raises:
        ValueError: A speed is not above 0.
    """
    return price_at(work, setting(work, devices, host, workload, costs))


def price_at(work: Work, at: PriceBasis) -> Estimate:
    """Estimate as ``price`` does, in a setting that is the same for all placements of a model."""
    parts: dict[str, list[float]] = {}
    steps = [(name, seconds, count) for layer, count in work.counted for name, seconds in at.priced(layer).parts]
    if not work.n_splits:
        steps += [("graph splits", at.priced(layer).splits, count) for layer, count in work.counted]
    for name, seconds, count in (*steps, *_between_layers(work, at)):
        part = parts.setdefault(name, [0.0, 0.0])
        part[0] += seconds.prompt * count
        part[1] += seconds.generation * count
    shares = [Part(name, of_prompt / at.batch, of_step) for name, (of_prompt, of_step) in parts.items()]
    prompt, generation = float_sum([part.prompt for part in shares]), float_sum([part.generation for part in shares])
    in_all = seconds_of(at.workload, prompt, generation)
    return Estimate(prompt, generation, in_all, tuple([part for part in shares if part.prompt or part.generation]))


def seconds_at(work: Work, at: PriceBasis) -> Seconds:
    """Compute the seconds of ``price_at`` without its parts: a search asks for them some hundred times."""
    prompt = generation = 0.0
    for layer, count in work.counted:
        _, _, seconds, splits = at.priced(layer)
        prompt += seconds.prompt * count
        generation += seconds.generation * count
        if not work.n_splits:
            prompt += splits.prompt * count
            generation += splits.generation * count
    for _, seconds, count in _between_layers(work, at):
        prompt += seconds.prompt * count
        generation += seconds.generation * count
    return Seconds(prompt, generation)


def _between_layers(work: Work, at: PriceBasis) -> list[tuple[str, Seconds, int]]:
    """List names, seconds and numbers of the steps between layers, and of reading weights from the disk: of graph
    splits all that are measured, or else predicted, one for every change of place.

    The token embedding is on the host, and the fixed cost of layers includes the first split, which every model has.
    """
    n_hops = hops(work)
    generation = len(work.homes) - (work.homes[:1] == (HOST,))
    prompt = 1 + n_hops if at.streams else generation
    if work.n_splits:
        prompt, generation = (max(0, n - 1) for n in work.n_splits)
    splits = Seconds(prompt * at.costs.split, generation * at.costs.split)
    found = [("disk: weights", paged_seconds(work, at), 1)] if work.host_room < math.inf else []
    if not at.remote:
        return [*found, ("graph splits", splits, 1), ("device hops", at.hop, n_hops)]
    found += [("graph splits", splits, 1), ("device hops", at.hop, hops(work, at.remote))]
    found += [(f"{at.names[d]}: network", visit_seconds(d, at), n) for d, n in visits(work, at.remote).items()]
    if work.layers and (home := work.layers[-1].home) in at.remote:
        found.append((f"{at.names[home]}: network", logits_seconds(work.layers[-1], at), 1))
    return found


def paged_seconds(work: Work, at: PriceBasis) -> Seconds:
    """Compute the seconds to read weights that the host's memory has no room for from its disk.

    As large a part of what a micro batch or a step reads as of all weights on the host.
    """
    if work.host_room == math.inf or not work.paged:
        return Seconds()
    of_prompt = of_step = 0.0
    for layer, count in work.counted:
        for weights in (each for each in layer.weights if each.place == HOST):
            missed = 1 - weights.cache.hit_rate if weights.cache else 1.0
            of_prompt += count * weights.bytes * (at.experts_touched if weights.experts else 1)
            of_step += count * weights.bytes * (at.experts_of_step * missed if weights.experts else 1)
    return from_disk(work.paged * of_prompt, work.paged * of_step, at)


def from_disk(of_batch: float, of_step: float, at: PriceBasis) -> Seconds:
    """Compute the seconds to read mapped weights from the disk: bytes for a micro batch and for a step."""
    return Seconds(of_batch, of_step) * (1 / (at.costs.host.paged * default_disk_bandwidth()[0]))


def seconds_of(workload: Workload, prompt: float, generation: float) -> float:
    """Compute the seconds of ``workload`` from those of a token of a prompt, and of a step of generation."""
    return workload.users * (workload.prompt * prompt) + workload.generate * generation


@functools.cache
def family_name(device: DeviceSpeed) -> str:
    """Return the key of a device in ``Costs.families``: the family of the first matching rule of ``cost.toml``."""
    for rule in figures()["rule"]:
        if (
            rule["kind"] in (device.kind, "*")
            and device.compute_capability.startswith(tuple(rule.get("capabilities", [""])))
            and rule.get("named", "") in device.source
        ):
            name: str = rule["family"]
            return name
    raise ValueError(f"no rule for a device of kind {device.kind}")


def token_seconds(size: float, n_layer: float, speed: DeviceSpeed | HostSpeed, costs: Costs | None = None) -> float:
    """Compute the seconds of a token through ``n_layer`` layers of ``size`` bytes at one place, without attention."""
    costs = costs or default()
    if isinstance(speed, HostSpeed):
        share, layer = costs.host.bandwidth, 2 * costs.host.sync * (speed.threads or costs.host.threads)
    else:
        family = costs.families[family_name(speed)]
        share, layer = family.bandwidth, family.layer
    factors = speed.factors
    read = size / (share * speed.bandwidth) * factors.weights.generation
    return read + n_layer * layer * factors.layers.generation


@functools.cache
def default() -> Costs:
    """Return the constants of ``cost.toml``."""
    return costs_of(figures())


def costs_of(data: Mapping[str, Any]) -> Costs:
    """Build ``Costs`` from tables like ``cost.toml``; a family inherits missing figures from ``family.cuda``."""
    base = Family(**data["family"]["cuda"])
    families = {name: replace(base, **figures) for name, figures in data["family"].items()}
    return Costs(families, HostCosts(**data["host"]), splits=SplitCounts(**data["splits"]), **data["graph"])


@functools.cache
def figures() -> dict[str, Any]:
    """Read ``cost.toml``."""
    return read_data(__file__)
