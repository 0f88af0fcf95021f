"""Models as their headers say, and placements of one of them, as such and as parameters."""

from __future__ import annotations

import re
from pathlib import Path

from fitter.llama.types import Array, MetadataValue, Params, TensorBuftOverride, TensorInfo
from fitter.model.header import Model
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement, overrides_of
from fitter.planning.speed.model_facts import ModelFacts, facts_of
from tools.models.shapes import SHAPES, Shape


def value_of(value: object) -> MetadataValue:
    if isinstance(value, list):
        return Array("int32", len(value), tuple(value))
    assert isinstance(value, int | float | str)
    return value


def model_of(shape: Shape, **changed: MetadataValue) -> Model:
    """The header of ``shape``; ``changed`` replaces metadata, with ``__`` for a dot, ``None`` taking it away."""
    metadata = {
        shape.architecture + key if key.startswith(".") else key: value_of(value)
        for key, value in shape.metadata.items()
    }
    metadata |= {f"{shape.architecture}.{key.replace('__', '.')}": value for key, value in changed.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    experts = metadata.get(f"{shape.architecture}.expert_count", 0)
    nextn = metadata.get(f"{shape.architecture}.nextn_predict_layers", 0)
    assert isinstance(experts, int) and isinstance(nextn, int)
    return Model(
        Path("model.gguf"),
        (Path("model.gguf"),),
        shape.title,
        shape.architecture,
        shape.bytes,
        shape.n_layer,
        nextn,
        131072,
        experts,
        tuple(TensorInfo(t.name, t.type.name, t.shape, t.bytes) for t in shape.tensors),
        metadata,
    )


def facts(name: str, **changed: MetadataValue) -> ModelFacts:
    return facts_of(model_of(SHAPES[name], **changed))


def items(name: str, layers: range, *tails: str) -> tuple[Item, ...]:
    return tuple(Item(i, f"blk.{i}.{tail}", ("weight",), 1) for i in layers for tail in tails)


EXPERTS = ("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps")
MODEL = "qwen3-30b-a3b"

PLACEMENTS = {
    "all on one": Placement(0, (49,)),
    "all on the host": Placement(49, ()),
    "last layers": Placement(30, (19,)),
    "two devices": Placement(0, (30, 19)),
    "one without a layer": Placement(0, (30, 0, 19)),
    "experts on the host": Placement(0, (49,), tuple((i, HOST) for i in items(MODEL, range(10, 48), *EXPERTS))),
    "single tensors": Placement(
        5,
        (20, 24),
        (
            *((item, 1) for item in items(MODEL, range(7, 9), "ffn_up_exps")),
            *((item, HOST) for item in items(MODEL, range(40, 48), "ffn_down_exps", "ffn_up_exps")),
        ),
    ),
}


def said(placement: Placement, user: tuple[TensorBuftOverride, ...] = ()) -> tuple[Params, dict[str, int]]:
    """``placement`` as parameters, and what their patterns catch, as llama.cpp tells it."""
    types = [f"CUDA{d}" for d in range(len(placement.counts))]
    overrides = (*user, *overrides_of(placement, types))
    names = facts(MODEL).names
    matches = [next((i for i, o in enumerate(overrides) if re.search(o.pattern, name)), -1) for name in names]
    targets = [types.index(o.buffer_type) if o.buffer_type in types else HOST for o in overrides]
    caught = {name: targets[match] for name, match in zip(names, matches, strict=True) if match >= 0}
    split = tuple(map(float, placement.counts)) if len(placement.counts) > 1 else None
    params = Params(n_gpu_layers=placement.n_gpu_layers, tensor_split=split, tensor_buft_overrides=overrides)
    return params, caught
