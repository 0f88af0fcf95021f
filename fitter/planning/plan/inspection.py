"""An inspection of a model: its tensors by role, and the bytes of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown, Layout, MetadataValue, Row
from fitter.model.header import Model
from fitter.model.tensors import Role, layer_of, role_of
from fitter.planning.placing.layer_sizes import units_of
from fitter.planning.request.summary import ModelSummary


@dataclass(frozen=True)
class RoleSize:
    """The tensors of one role."""

    role: str
    """The role, such as ``attention`` or ``experts``."""
    count: int
    """Number of tensors."""
    bytes: int
    """Bytes of their weights in the file."""


@dataclass(frozen=True)
class LayerSize:
    """One repeating layer, or everything outside the layers."""

    index: int | None
    """The layer's number from 0; ``None`` for tensors outside layers, such as embeddings and output."""
    weights: tuple[RoleSize, ...]
    """Bytes of its weights by role."""
    context: int
    """Bytes of its KV cache at the inspection's ``n_ctx``."""

    @property
    def bytes(self) -> int:
        """Bytes of the layer's weights."""
        return sum(role.bytes for role in self.weights)


@dataclass(frozen=True)
class Inspection:
    """The tensors and layers of a model."""

    model: ModelSummary
    """The model."""
    metadata: Mapping[str, MetadataValue]
    """Every key of the header."""
    roles: tuple[RoleSize, ...]
    """Its tensors by role."""
    layers: tuple[LayerSize, ...]
    """The layers in order, after an entry for tensors outside layers."""
    n_ctx: int
    """Context of the caches and ``rows``, in tokens."""
    rows: tuple[Row, ...]
    """Memory of one dummy load with everything on the host; compute bytes belong to no layer."""


def inspection_of(model: Model, breakdown: Breakdown, layout: Layout) -> Inspection:
    """Build the inspection from a load of ``model`` with everything on the host."""
    units = units_of(layout, model.n_layer)
    layers = [_layer_size(model, None, units[-1].cache)]
    layers += [_layer_size(model, unit.index, unit.cache) for unit in units[:-1]]
    return Inspection(
        model=ModelSummary.of(model),
        metadata=model.metadata,
        roles=_roles([(role_of(tensor.name), tensor.bytes) for tensor in model.tensors]),
        layers=tuple(layers),
        n_ctx=breakdown.n_ctx,
        rows=breakdown.rows,
    )


def _layer_size(model: Model, index: int | None, cache: int) -> LayerSize:
    tensors = [(role_of(tensor.name), tensor.bytes) for tensor in model.tensors if layer_of(tensor.name) == index]
    return LayerSize(index, _roles(tensors), cache)


def _roles(tensors: Sequence[tuple[Role, int]]) -> tuple[RoleSize, ...]:
    sizes = [[size for role, size in tensors if role is wanted] for wanted in Role]
    return tuple(
        RoleSize(role.value, len(of_role), sum(of_role)) for role, of_role in zip(Role, sizes, strict=True) if of_role
    )
