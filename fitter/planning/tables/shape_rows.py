"""Models without a file on one machine: the best file type of each, and which types are worth a plan. Bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.llama.header.gguf_writer import Tensor
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.model.file_types import data
from fitter.model.shapes.listing import ShapeInfo
from fitter.model.tensors import is_expert, stays_on_host
from fitter.planning.speed.cost import token_seconds
from fitter.planning.tables.quantization_rows import Quantization, best_of, figures_of
from fitter.planning.tables.type_choice import is_useful


@dataclass(frozen=True)
class ShapePlan:
    """A model of the catalogue in the best file type for a machine."""

    shape: ShapeInfo
    """The model."""
    best: Quantization
    """The file type and its plan."""


@dataclass(frozen=True)
class ShapePlans:
    """The strongest models of the catalogue for a machine: those with the most weights."""

    found: tuple[ShapePlan, ...]
    """Models that generate at a useful speed with a useful context, the most weights first."""
    left: int
    """Number of smaller models that were not planned, because enough were found."""
    tokens_per_second: float | None = None
    """The useful speed of generation that the user set; ``None`` for the default."""

    @property
    def fits(self) -> bool:
        """Whether any model is useful."""
        return bool(self.found)

    def __repr__(self) -> str:
        names = ", ".join(f"{each.shape.name}:{each.best.name}" for each in self.found)
        return f"<ShapePlans: {names or 'none is useful'}>"

    def __bool__(self) -> bool:
        return self.fits

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON, schema 1. Bytes."""
        from fitter.api import result_methods

        return result_methods.shapes_document(self)


@dataclass(frozen=True)
class Place:
    """A machine, as far as it bounds the speed of a model.

    Attributes:
        room: Bytes that weights can have on its devices.
        device: Its fastest device, if any.
        host: Its host.
    """

    room: int
    device: DeviceSpeed | None
    host: HostSpeed

    def most_tokens_per_second(self, tensors: Iterable[Tensor], n_layer: int, used: float, bits: float) -> float:
        """Estimate the speed without attention, with experts on the host before anything else.

        Args:
            tensors: The model's tensors.
            n_layer: Its layers.
            used: The share of a layer's experts that a token uses.
            bits: Bits per weight.
        """
        weights = {False: 0, True: 0}
        for tensor in tensors:
            if not stays_on_host(tensor.name):
                weights[is_expert(tensor.name)] += math.prod(tensor.shape)
        others, experts = (weights[kind] * bits / 8 for kind in (False, True))
        beyond = max(0.0, others + experts - self.room) if self.device else others + experts
        on_host = min(beyond, experts) * used + max(0.0, beyond - experts)
        layers = n_layer * min(1.0, beyond / (experts or others or 1.0))
        seconds = token_seconds(on_host, layers, self.host)
        if self.device:
            seconds += token_seconds(others + experts * used - on_host, n_layer, self.device)
        return 1 / seconds if seconds else math.inf


def types_to_plan(is_packed: bool, bits_as_published: float) -> dict[str, float]:
    """Return the file types to plan for a shape with their bits per weight, the most bits first."""
    if is_packed:
        return {each["file_type"]: bits_as_published for each in data()["published"].values()}
    return {name: each["bits"] for name, each in data()["smaller"].items()}


def is_enough(each: Quantization, shape: ShapeInfo, tokens_per_second: float | None) -> bool:
    """Return whether a plan has a useful speed and context; the model's own context is enough."""
    figures = figures_of(each)
    has_context = figures.context >= min(figures.least_context, shape.n_ctx_train)
    return each.fits and has_context and is_useful(figures, tokens_per_second)


def best_of_shape(
    planned: Sequence[Quantization], shape: ShapeInfo, tokens_per_second: float | None
) -> ShapePlan | None:
    """Choose the best of the planned file types; ``None`` if it is not useful."""
    best = best_of(planned, "", tokens_per_second)
    return ShapePlan(shape, best) if best is not None and is_enough(best, shape, tokens_per_second) else None
