"""Inputs of the cost model, from a model's header and the sizes that llama.cpp recorded.

No architecture is special here: a layer's attention reads its cache, and head counts of the header give the number of
operations. ``Pieces`` is a model at one context; a search makes all its placements of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fitter.llama.types import Layout, Params
from fitter.model.tensors import layer_of, stays_on_host
from fitter.parameters.table import MAPPED, PARAMETERS
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement, llama_placement
from fitter.planning.speed.caches import CACHE_BYTES, cells_of, resized, with_cache
from fitter.planning.speed.cost import Attention, Layer, Weights, Work
from fitter.planning.speed.model_facts import LayerFacts, ModelFacts, in_layer

_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class HostOnlyTensors:
    """Tensors that llama.cpp keeps on the host, because devices cannot compute with them.

    Attributes:
        without_kernels: Tensors for which the recording device has no kernels.
        takes: Indices of devices that hold those tensors nevertheless, by measurement.
        too_large: For each device, tensors above its limit for one tensor.
    """

    without_kernels: frozenset[str] = frozenset()
    takes: frozenset[int] = frozenset()
    too_large: tuple[frozenset[str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.without_kernels) or any(self.too_large)

    def has(self, name: str, place: int) -> bool:
        """Return whether the host computes with a tensor of a layer at ``place``; for ``HOST``, whether no device
        would.
        """
        if place == HOST:
            return name in self.without_kernels or (bool(self.too_large) and all(name in of for of in self.too_large))
        return (name in self.without_kernels and place not in self.takes) or self.is_too_large(name, place)

    def is_too_large(self, name: str, device: int) -> bool:
        """Return whether a tensor is above the device's limit for one tensor."""
        return device < len(self.too_large) and name in self.too_large[device]


NO_HOST_ONLY = HostOnlyTensors()


Apart = tuple[tuple[tuple[str, ...], int], ...]
"""Names of tensors of a layer, with or without the layer's number, and their place: a device's index, or ``HOST``."""


@dataclass(frozen=True)
class Pieces:
    """A model at one context: the facts that all its placements share.

    Attributes:
        facts: The facts of its header.
        attention: Attention of each of ``facts.layers``.
        states: For each layer, bytes of the recurrent state that every token reads and writes.
        n_ubatch: Tokens of a micro batch.
        op_offload: Whether devices compute with host weights in prompts.
        cache_on_host: Whether all caches are on the host.
        pinned: Places of tensors by the user's overrides: a device's index, or ``HOST``.
        is_mapped: Whether host weights are mapped from their file.
        host_only: Tensors that llama.cpp keeps on the host.
        moe_cache_size: Bytes of a cache of experts on the devices.
        made: Layers that ``layer`` has made, by kind, place, and tensors with other places.
    """

    facts: ModelFacts
    attention: tuple[Attention | None, ...]
    states: tuple[float, ...]
    n_ubatch: int
    op_offload: bool
    cache_on_host: bool
    pinned: Mapping[str, int] = field(default_factory=dict)
    is_mapped: bool = False
    host_only: HostOnlyTensors = NO_HOST_ONLY
    moe_cache_size: int = 0
    made: dict[tuple[int, int, Apart], Layer] = field(default_factory=dict, init=False, repr=False, compare=False)
    _whole: dict[int, tuple[Layer, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def layer(self, index: int, home: int, apart: Apart = ()) -> Layer:
        """Return a layer at ``home``, or the output (the index after the last layer).

        Layers of a kind are one object, which is priced once.

        Args:
            index: Index in ``facts.layers``.
            home: The layer's place.
            apart: Tensors with other places.
        """
        key = self.kinds[index], home, tuple([(tuple(map(in_layer, names)), place) for names, place in apart])
        if key not in self.made:
            self.made[key] = self._make(index, home, {name: place for names, place in key[2] for name in names})
        return self.made[key]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each layer and the output, equal for those that ``_make`` cannot tell apart."""
        layers, numbers = self.facts.layers, dict[object, int]()
        whole: list[object] = [
            (self.attention[index], self.states[index], layer.n_attention, layer.kind, self._fixed_in(layer))
            for index, layer in enumerate(layers)
        ]
        return tuple(numbers.setdefault(each, len(numbers)) for each in (*whole, len(layers)))

    def _fixed_in(self, layer: LayerFacts) -> tuple[object, ...]:
        """List the tensors of a layer that are not placed with it."""
        sets = [names for names in (self.host_only.without_kernels, *self.host_only.too_large, self.pinned) if names]
        names = [tensor.name for tensor in layer.tensors] if sets else []
        return tuple((self.pinned.get(name), *(name in each for each in sets)) for name in names)

    def whole(self, home: int) -> tuple[Layer, ...]:
        """Return all layers, and the output, with all their tensors at ``home``."""
        if home not in self._whole:
            of_kind = {kind: self.layer(self.kinds.index(kind), home) for kind in set(self.kinds)}
            self._whole[home] = tuple(map(of_kind.__getitem__, self.kinds))
        return self._whole[home]

    def _make(self, index: int, home: int, apart: Mapping[str, int]) -> Layer:
        facts = self.facts
        is_output = index == len(facts.layers)
        tensors = facts.output if is_output else facts.layers[index].tensors
        chosen = [apart.get(in_layer(tensor.name), home) if apart else home for tensor in tensors]
        places = [self._place_of(tensor.name, place) for tensor, place in zip(tensors, chosen, strict=True)]
        sums: dict[tuple[int, bool, bool], tuple[int, int, int]] = {}
        for tensor, (place, is_host_only) in zip(tensors, places, strict=True):
            key = place, tensor.experts, is_host_only
            size, n_params, n_looked_up = sums.get(key, (0, 0, 0))
            sums[key] = size + tensor.bytes, n_params + tensor.n_params, n_looked_up + tensor.n_looked_up
        cache = HOST if self.cache_on_host and home != HOST else None
        if not is_output and self.states[index]:
            key = home if cache is None else cache, False, False
            size, *counts = sums.get(key, (0, 0, 0))
            sums[key] = size + round(2 * self.states[index]), counts[0], counts[1]
        weights = tuple(
            Weights(place, size, n_params, experts, n_looked_up, is_host_only)
            for (place, experts, is_host_only), (size, n_params, n_looked_up) in sums.items()
        )
        attention = None if is_output else self.attention[index]
        attends = None
        if attention and home == HOST:
            projections = places[: facts.layers[index].n_attention]
            attends = next((place for place, _ in projections if place != HOST), None)
        n_host_only = sum(is_host_only for _, is_host_only in places)
        state = 0.0 if is_output else self.states[index]
        return Layer(home, weights, attention, cache if attention else None, attends, n_host_only, state)

    def _place_of(self, name: str, chosen: int) -> tuple[int, bool]:
        """Return the place of a tensor that should be at ``chosen``, and whether llama.cpp keeps it on the host."""
        wanted = self.pinned.get(name, chosen)
        is_host_only = self.host_only.has(name, wanted)
        return (HOST if is_host_only else wanted), is_host_only

    def work(self, layers: tuple[Layer, ...], n_splits: tuple[int, int] | None, shares: Sequence[float] = ()) -> Work:
        """Build the work of these layers, in the order of computation.

        ``shares``: each device's share of a cache of experts.
        """
        facts = self.facts
        if self.moe_cache_size:
            layers = with_cache(facts, layers, self.moe_cache_size, shares)
        return Work(
            layers,
            facts.n_embd,
            facts.n_expert,
            facts.n_expert_used,
            self.n_ubatch,
            self.op_offload,
            n_splits,
            self.is_mapped,
        )


def pieces_of(
    facts: ModelFacts,
    units: Sequence[Unit],
    n_ctx: int,
    params: Params,
    flash_attn: bool | None = None,
    pinned: Mapping[str, int] | None = None,
    host_only: HostOnlyTensors = NO_HOST_ONLY,
) -> Pieces:
    """Collect the facts that all placements share.

    Args:
        facts: The facts of the model's header.
        units: Layer sizes recorded at ``n_ctx`` tokens.
        n_ctx: The context.
        params: Parameters that decide the cache.
        flash_attn: Whether flash attention is on, if known.
        pinned: Places of tensors by the user's overrides.
        host_only: Tensors that llama.cpp keeps on the host.
    """
    flash = params.flash_attn != "off" if flash_attn is None else flash_attn
    made = dict[tuple[object, ...], Attention | None]()
    attention = []
    for layer, unit in zip(facts.layers, units, strict=False):
        # most layers are alike
        key = *layer.heads, unit.cache - unit.state
        if key not in made:
            made[key] = _attention(layer, facts.window, unit.cache - unit.state, n_ctx, params, flash)
        attention.append(made[key])
    return Pieces(
        facts,
        tuple(attention),
        tuple([unit.state / params.n_seq_max for unit, _ in zip(units, facts.layers, strict=False)]),
        params.n_ubatch,
        params.op_offload,
        not params.offload_kqv,
        pinned or {},
        params.of_parameter(PARAMETERS["load_mode"]) in MAPPED,
        host_only,
        params.moe_cache_size,
    )


def resized_layout(facts: ModelFacts, layout: Layout, before: Params, after: Params) -> Layout:
    """Estimate a layout with parameters ``after`` from one that was recorded with ``before``, at its own context."""
    attention = pieces_of(facts, units_of(layout, facts.n_layer), layout.n_ctx, before).attention
    windowed = {index for index, each in enumerate(attention) if each and each.window}
    return resized(layout, facts.window, windowed, before, after, facts.compressed)


def host_only_tensors(facts: ModelFacts, layout: Layout, largest_tensors: Sequence[int | None]) -> HostOnlyTensors:
    """Find the tensors that llama.cpp keeps on the host.

    llama.cpp keeps weights on the host if a device does not support their type, size or operation
    (``weight_buft_supported`` of its model loader).

    Args:
        facts: The facts of the model's header.
        layout: Recorded with all layers on a device without a limit for one tensor.
        largest_tensors: For each device, the most bytes of one tensor; ``None`` if it names no limit.
    """
    loaded = layout.on_device.union(layout.unused)
    without = frozenset(name for name in facts.names if name not in loaded and not stays_on_host(name))
    if not any(largest_tensors):
        return HostOnlyTensors(without)
    sizes = {tensor.name: tensor.bytes for tensor in facts.tensors}
    too_large = (frozenset(name for name, size in sizes.items() if most and size > most) for most in largest_tensors)
    return HostOnlyTensors(without, too_large=tuple(too_large))


def as_measured(pieces: Pieces, work: Work, on_devices: Sequence[int]) -> Pieces:
    """Correct ``pieces`` by the bytes that a load has on each device.

    The layout was recorded on one kind of device. Another kind may have kernels for more tensors, and a remote device
    claims to have all.

    Args:
        pieces: The model.
        work: The work of the load, made of ``pieces``.
        on_devices: Bytes of weights that the load has on each device.
    """
    facts = pieces.facts
    tensors = (*(layer.tensors for layer in facts.layers), facts.output)
    others, kept = [0.0] * len(on_devices), [0.0] * len(on_devices)
    for layer, weights, state in zip(work.layers, tensors, (*pieces.states, 0.0), strict=True):
        for part in layer.weights:
            if part.place != HOST:
                others[part.place] += part.bytes
        if layer.home != HOST and not pieces.cache_on_host:
            # a recurrent state counts as weights that are read and written
            others[layer.home] -= 2 * state
        for tensor in weights:
            # an override of the user puts a tensor on a device, whether it can compute or not
            is_there = tensor.name in pieces.pinned
            place = pieces.pinned.get(tensor.name, layer.home)
            if place != HOST and pieces.host_only.has(tensor.name, place):
                if is_there:
                    others[place] += tensor.bytes
                elif not pieces.host_only.is_too_large(tensor.name, place):
                    kept[place] += tensor.bytes
    takes = frozenset(d for d, size in enumerate(on_devices) if kept[d] and size > others[d] + kept[d] / 2)
    return replace(pieces, host_only=replace(pieces.host_only, takes=takes)) if takes else pieces


def _attention(layer: LayerFacts, window: int, cache: int, n_ctx: int, params: Params, flash: bool) -> Attention | None:
    if cache <= 0 or n_ctx <= 0:
        return None
    width = layer.n_head_kv * (layer.key_length + layer.value_length)
    cells, short = cells_of(n_ctx, params), cells_of(n_ctx, params, window)
    is_windowed = bool(layer.is_windowed)
    if window and layer.is_windowed is None and short < cells:
        elements = layer.n_head_kv * (
            layer.key_length * CACHE_BYTES.get(params.type_k, 2)
            + layer.value_length * CACHE_BYTES.get(params.type_v, 2)
        )
        is_windowed = abs(cache / short - elements) < abs(cache / cells - elements)
    kv_bytes = cache / (short if is_windowed else cells)
    flops = 2 * layer.n_head * (layer.key_length + layer.value_length)
    sharing = layer.n_head / layer.n_head_kv if layer.n_head_kv and not layer.is_latent else 1.0
    return Attention(
        kv_bytes,
        # without head counts: two operations for every cached number of 16 bits
        float(flops if width else kv_bytes),
        sharing,
        window if is_windowed else 0,
        params.type_k not in _FLOATS or params.type_v not in _FLOATS,
        flash,
    )


def work_of(pieces: Pieces, placement: Placement, n_splits: tuple[int, int] | None = None) -> Work:
    """Build the work of ``placement``, of cached layers.

    Args:
        pieces: The model.
        placement: The placement.
        n_splits: Graph splits as counted by llama.cpp, if known.
    """
    output, n_layer = len(pieces.facts.layers), pieces.facts.n_layer
    layers = list(pieces.whole(HOST)[: placement.first])
    homes, start = [HOST] * placement.first, placement.first
    for device, count in enumerate(placement.counts):
        layers += pieces.whole(device)[start : start + count]
        homes += [device] * count
        start += count
    # layers for multi-token prediction, which generation does not compute, are the last before the output
    layers[output:] = [pieces.whole(homes[-1])[output]]
    moved: dict[int, list[tuple[tuple[str, ...], int]]] = {}
    for item, target in placement.moved:
        moved.setdefault(item.layer, []).append((item.tail, target))
    for unit, apart in moved.items():
        if unit < output or unit == n_layer:
            index = output if unit == n_layer else unit
            key = pieces.kinds[index], homes[unit], tuple(apart)
            # most of them are there: a call of its own would take as long as all else
            layers[index] = pieces.made.get(key) or pieces.layer(index, *key[1:])
    return pieces.work(tuple(layers), n_splits, placement.counts)


def work_of_params(
    pieces: Pieces,
    params: Params,
    free: Sequence[int],
    targets: Mapping[str, int],
    n_splits: tuple[int, int] | None = None,
) -> Work:
    """Build the work of ``params``, with layers placed as llama.cpp places them.

    Args:
        pieces: The model.
        params: Parameters of the load.
        free: Free bytes of each device.
        targets: Places of the tensors that match an override: a device's index, or ``HOST``.
        n_splits: Graph splits as counted by llama.cpp, if known.
    """
    homes = llama_placement(pieces.facts.n_layer + 1, params.n_gpu_layers, params.tensor_split, free).homes
    caught: dict[int | None, list[tuple[tuple[str, ...], int]]] = {}
    for name, target in targets.items():
        caught.setdefault(layer_of(name), []).append(((name,), target))
    output = pieces.facts.n_layer
    return pieces.work(
        tuple(
            pieces.layer(index, homes[unit], tuple(caught.get(None if unit == output else unit, ())))
            for index, unit in _computed(pieces.facts)
        ),
        n_splits,
        params.tensor_split or free,
    )


def _computed(facts: ModelFacts) -> Iterable[tuple[int, int]]:
    """List the layers and the output: index among computed layers, and index among units."""
    yield from ((index, index) for index in range(len(facts.layers)))
    yield len(facts.layers), facts.n_layer
