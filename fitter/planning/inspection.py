"""What a model is made of: its tensors by role, and what each layer takes. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fitter.llama.types import MetadataValue, Row
from fitter.planning.plan import ModelSummary


@dataclass(frozen=True)
class RoleSize:
    """``count`` tensors of one role (``attention``, ``experts``, ...) and the bytes of their weights in the file."""

    role: str
    count: int
    bytes: int


@dataclass(frozen=True)
class LayerSize:
    """One repeating layer, or with ``index`` ``None`` whatever belongs to none (embeddings, output).

    ``weights`` by role; ``context`` is the layer's share of the KV cache at the inspection's ``n_ctx``.
    """

    index: int | None
    weights: tuple[RoleSize, ...]
    context: int

    @property
    def bytes(self) -> int:
        """Bytes of the layer's weights."""
        return sum(role.bytes for role in self.weights)


@dataclass(frozen=True)
class Inspection:
    """A model's metadata, tensors by role, layers in order (the one without index first), and measured memory.

    ``rows`` come from one dummy load at ``n_ctx`` tokens; their compute bytes belong to no layer.
    """

    model: ModelSummary
    metadata: Mapping[str, MetadataValue]
    roles: tuple[RoleSize, ...]
    layers: tuple[LayerSize, ...]
    n_ctx: int
    rows: tuple[Row, ...]
