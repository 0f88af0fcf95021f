"""A header while it is made: names, shapes and types as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.header.gguf_writer import Tensor, Value

_ALWAYS_F32 = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "ssm_conv1d_q",
    "ssm_conv1d_k",
    "ssm_conv1d_v",
    "shortconv.conv",
    "time_mix_first",
    "time_mix_w1",
    "time_mix_w2",
    "time_mix_decay_w1",
    "time_mix_decay_w2",
    "time_mix_lerp_fused",
    "altup_correct_coef",
    "altup_predict_coef",
    "indexer.proj",
)
"""Matrices that the converter leaves in F32."""


class ShapeHeader:
    """Metadata and tensors of a model. ``type`` is the type of its matrices, ``bf16`` or ``f16``."""

    def __init__(self, architecture: str, type: str = "bf16") -> None:
        self.architecture = architecture
        self.type = type
        self.metadata: dict[str, Value] = {"general.architecture": architecture, "general.type": "model"}
        self.tensors: list[Tensor] = []

    def key(self, name: str, value: Value | None) -> None:
        """Set a key of the architecture; ``None`` sets nothing."""
        if value is not None and not (isinstance(value, Sequence) and not value):
            self.metadata[f"{self.architecture}.{name}"] = value

    def keys(self, **values: Value | None) -> None:
        """Set several keys; ``__`` in a name becomes a dot."""
        for name, value in values.items():
            self.key(name.replace("__", "."), value)

    def weight(self, name: str, *shape: int, type: str | None = None) -> None:
        """Add the tensor ``name.weight``; ``shape`` in ggml's order."""
        self.tensor(f"{name}.weight", *shape, type=type)

    def bias(self, name: str, *shape: int) -> None:
        """Add the tensor ``name.bias``."""
        self.tensor(f"{name}.bias", *shape)

    def tensor(self, name: str, *shape: int, type: str | None = None) -> None:
        """Add a tensor, by default of the converter's type."""
        self.tensors.append(Tensor(name, _without_ones(shape), type or self._type_of(name, shape)))

    def number(self, name: str) -> int:
        """Return the number at a key of the architecture; 0 without one."""
        value = self.metadata.get(f"{self.architecture}.{name}", 0)
        return value if isinstance(value, int) else 0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def of_type(self, type: str) -> ShapeHeader:
        """Return the header with matrices of another type; those that are published quantized stay so."""
        if type == self.type:
            return self
        other = ShapeHeader(self.architecture, type)
        other.metadata = self.metadata
        other.tensors = [replace(each, type=type) if each.type == self.type else each for each in self.tensors]
        return other

    def _type_of(self, name: str, shape: Sequence[int]) -> str:
        stem = name.removesuffix(".weight")
        short_name = stem.split(".", 2)[-1] if stem.startswith("blk.") else stem
        is_f32 = len(shape) == 1 or stem == name or name.endswith("_norm.weight") or short_name in _ALWAYS_F32
        return "f32" if is_f32 else self.type


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n]
