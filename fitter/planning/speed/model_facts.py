"""What the cost model needs of a model's header. No architecture is special: missing entries are left out. Bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fitter.llama.types import Array, MetadataValue
from fitter.model.header import Model
from fitter.model.tensors import Role, is_expert, layer_of, role_of, source_type
from fitter.storage import read_data

LOOKED_UP = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
"""Types whose weights are entries of a codebook: a processor looks them up in small groups, one after another."""


class WeightFacts(NamedTuple):
    """A tensor that every token computes with.

    Attributes:
        name: Its name.
        bytes: Bytes as stored.
        n_params: Number of weights.
        experts: Whether it has routed experts, of which a token uses a part.
        looked_up: Whether its type is one of ``LOOKED_UP``.
        type: The name of its type.
    """

    name: str
    bytes: int
    n_params: int
    experts: bool
    looked_up: bool = False
    type: str = ""

    @property
    def n_looked_up(self) -> int:
        """Number of its weights that a processor looks up."""
        return self.n_params if self.looked_up else 0


@dataclass(frozen=True)
class LayerFacts:
    """A layer as the header describes it. Head counts and lengths are 0 if the header has none.

    Attributes:
        tensors: Its tensors; the ``n_attention`` projections of attention come first.
        is_latent: Whether the cache has one compressed row for all heads.
        is_windowed: Whether attention has a sliding window; ``None`` if the header does not say so for each layer.
    """

    tensors: tuple[WeightFacts, ...]
    n_head: int = 0
    n_head_kv: int = 0
    key_length: int = 0
    value_length: int = 0
    is_latent: bool = False
    is_windowed: bool | None = None
    n_attention: int = 0

    @cached_property
    def heads(self) -> tuple[object, ...]:
        """Values that decide its attention."""
        return (self.n_head, self.n_head_kv, self.key_length, self.value_length, self.is_latent, self.is_windowed)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What tells its tensors from those of layers of another kind."""
        return tuple([(in_layer(tensor.name), *tensor[1:]) for tensor in self.tensors])


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model's header that prices depend on.

    Attributes:
        n_layer: Number of all layers, as in ``Model.n_layer``.
        layers: Layers that generation computes: without the last ones, for multi-token prediction.
        output: Tensors after the layers, with the token embedding if it serves as the output.
        n_embd: Length of an activation vector.
        n_expert: Number of experts.
        n_expert_used: Number of experts that a token uses.
        window: Tokens of sliding-window attention; 0 without.
        type: The type of most of its weights.
        compressed: For each layer, how many tokens share a row of what it keeps beside its window; 0 for none.
    """

    n_layer: int
    layers: tuple[LayerFacts, ...]
    output: tuple[WeightFacts, ...]
    n_embd: int
    n_expert: int
    n_expert_used: int
    window: int
    type: str = ""
    compressed: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[WeightFacts]:
        """All tensors that tokens compute with."""
        return [tensor for tensors in (*(layer.tensors for layer in self.layers), self.output) for tensor in tensors]

    @property
    def names(self) -> list[str]:
        """Names of these tensors."""
        return [tensor.name for tensor in self.tensors]

    @property
    def bits_per_weight(self) -> float:
        """Bits of an average weight."""
        return 8 * sum(each.bytes for each in self.tensors) / max(1, sum(each.n_params for each in self.tensors))


def in_layer(name: str) -> str:
    """Cut the layer's number off a tensor's name."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def scaled(facts: ModelFacts, share: float) -> ModelFacts:
    """Return the facts of a model whose weights take ``share`` of the bytes."""

    def of(tensors: tuple[WeightFacts, ...]) -> tuple[WeightFacts, ...]:
        return tuple(each._replace(bytes=int(share * each.bytes)) for each in tensors)

    layers = tuple(replace(layer, tensors=of(layer.tensors)) for layer in facts.layers)
    return replace(facts, layers=layers, output=of(facts.output))


def facts_of(model: Model) -> ModelFacts:
    """Read the facts from a model's header. Missing entries are left out, never refused."""
    layers: list[list[WeightFacts]] = [[] for _ in range(model.n_layer)]
    output: list[WeightFacts] = []
    lookup: list[WeightFacts] = []
    for tensor in model.tensors:
        n_params = math.prod(tensor.shape)
        looked_up = tensor.type.upper() in LOOKED_UP
        facts = WeightFacts(tensor.name, tensor.bytes, n_params, is_expert(tensor.name), looked_up, tensor.type)
        layer = layer_of(tensor.name)
        if layer is not None:
            if layer < len(layers):
                layers[layer].append(facts)
        elif role_of(tensor.name) is Role.TOKEN_EMBEDDING:
            lookup.append(facts)
        else:
            output.append(facts)
    if not any(tensor.name == "output.weight" for tensor in output):
        output += [tensor for tensor in lookup if tensor.name == "token_embd.weight"]
    read = _reader(model.metadata, model.architecture)
    n_embd = read("embedding_length", 0)
    window = read("attention.sliding_window", read_data(__file__)["window"].get(model.architecture, 0))
    compressed = _compressed(model)
    # what such a layer keeps beside its window grows with the context
    windowed = (False,) * model.n_layer if compressed else _windowed(model) if window else ()
    computed = model.n_layer - model.n_layer_nextn
    return ModelFacts(
        n_layer=model.n_layer,
        layers=tuple(
            _layer_facts(read, i, tensors, n_embd, windowed[i] if i < len(windowed) else None)
            for i, tensors in enumerate(layers[:computed])
        ),
        output=tuple(output),
        n_embd=n_embd,
        n_expert=model.n_expert,
        n_expert_used=min(read("expert_used_count", 0), model.n_expert) or model.n_expert,
        window=window,
        type=source_type(model.tensors),
        compressed=compressed,
    )


def _compressed(model: Model) -> tuple[int, ...]:
    ratios = model.metadata.get(f"{model.architecture}.attention.compress_ratios")
    if not isinstance(ratios, Array) or model.architecture not in read_data(__file__)["compressed"]:
        return ()
    return tuple(each if isinstance(each, int) else 0 for each in ratios.values)


def _windowed(model: Model) -> tuple[bool, ...]:
    """Say of each layer whether its attention has a sliding window; empty where that is unknown.

    As llama.cpp's ``load_swa_pattern``: by the header's list, its period, or the architecture's (``model_facts.toml``).
    """
    pattern = model.metadata.get(f"{model.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, Array):
        return tuple(map(bool, pattern.values))
    data = read_data(__file__)
    default = data["period"].get(model.architecture)
    period = pattern if isinstance(pattern, int) and pattern > 0 else default
    if default is None:
        return ()
    dense = 0 if model.architecture in data["dense_first"] else period - 1
    return tuple(layer % period != dense for layer in range(model.n_layer))


def _reader(metadata: Mapping[str, MetadataValue], architecture: str) -> Callable[..., int]:
    """Make a function that reads ``<arch>.<key>`` as a whole number; from an array, the layer's entry or else the
    largest.

    Other values count as missing, as in llama.cpp.
    """

    def read(key: str, default: int, layer: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, Array):
            values = [int(each) for each in value.values if isinstance(each, int)]
            if layer is not None and layer < len(values):
                return values[layer]
            return max(values, default=default)
        return int(value) if isinstance(value, int) else default

    return read


def _layer_facts(
    read: Callable[..., int], layer: int, tensors: Iterable[WeightFacts], n_embd: int, is_windowed: bool | None
) -> LayerFacts:
    n_head = read("attention.head_count", 0, layer)
    n_head_kv = read("attention.head_count_kv", n_head, layer)
    length = n_embd // n_head if n_head else 0
    suffix = "_swa" if is_windowed else ""
    key_length, value_length = (
        read(f"attention.{kind}_length{suffix}", read(f"attention.{kind}_length", length)) for kind in ("key", "value")
    )
    ordered = tuple(sorted(tensors, key=lambda tensor: not _is_projection(tensor.name)))
    return LayerFacts(
        tensors=ordered,
        n_head=n_head,
        n_head_kv=n_head_kv,
        key_length=key_length,
        value_length=value_length,
        is_latent=n_head_kv == 1 and read("attention.kv_lora_rank", 0) > 0,
        is_windowed=is_windowed,
        n_attention=sum(_is_projection(tensor.name) for tensor in ordered),
    )


def _is_projection(name: str) -> bool:
    return ".attn_" in name and "norm" not in name
