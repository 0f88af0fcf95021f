"""Tables of models in llama-quantize's file types: of one model, and of those without a file for a machine. Bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fitter.errors import ModelError
from fitter.llama.header.gguf_writer import Tensor
from fitter.llama.header.read_header import padded
from fitter.llama.types import FileType, FileTypes
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.model.files.source import show
from fitter.model.header import Model
from fitter.model.shapes.catalogue import ShapeInfo
from fitter.model.tensors import file_type_data, is_expert, stays_on_host
from fitter.planning.plan.plan import Plan
from fitter.planning.request.summary import ModelSummary
from fitter.planning.speed.cost import token_seconds
from fitter.planning.tables.file_rows import FULL, Planned, Plans, TypeFigures, best_type, is_useful
from fitter.text import LONGEST_NAME, printable


@dataclass(frozen=True)
class Quantization(Planned):
    """A model in one of llama-quantize's file types, and its plan."""

    name: str
    """llama-quantize's name of the file type."""
    bytes: int | None
    """Bytes of the file that llama-quantize would write; ``None`` if unknown."""
    bits_per_weight: float | None
    """Bits of all tensors per weight; ``None`` if unknown."""
    types: Mapping[str, int]
    """Number of tensors of each type; empty if unknown."""
    needs_imatrix: bool
    """Whether llama-quantize needs an importance matrix for it."""
    is_trained_for: bool = False
    """Whether the type has so few values that it suits only models trained for it."""
    plan: Plan | None = None
    """The plan for such a file, if any."""
    longest_context: int | None = None
    """The longest context that fits, in tokens, however slow; ``None`` if none fits."""
    problem: str | None = None
    """Why there is no plan."""

    @property
    def tokens_per_second(self) -> float | None:
        """Estimated speed of generation; ``None`` if it does not fit."""
        return self.generation_tokens_per_second


@dataclass(frozen=True)
class Quantizations(Plans):
    """A model in every file type of llama-quantize."""

    model: ModelSummary
    """The model whose header was read."""
    source_type: str
    """The type of most of its weights."""
    found: tuple[Quantization, ...]
    """Its file types, the largest file first, unknown sizes last."""
    best: Quantization | None
    """The type with the most bits per weight that generates ``tokens_per_second``, by the rule of
    ``fitter.planning.tables.file_rows``; ``None`` if nothing fits. Excluded are types that another one beats by size
    and published perplexity, types that suit only models trained for them, F16 of a BF16 model and the other way round,
    and, for a model published quantized (gpt-oss, in MXFP4), types no smaller than the one that keeps its weights.
    """
    n_devices: int = 0
    """Number of devices."""
    tokens_per_second: float | None = None
    """The useful speed of generation that the user set; ``None`` for the default, 20."""
    notes: tuple[str, ...] = field(default=())
    """Assumptions about the original model, one line each."""

    @property
    def fits(self) -> bool:
        """Whether any type fits."""
        return any(each.fits for each in self.found)

    def __repr__(self) -> str:
        best = f"the best is {self.best.name}" if self.best else "none fits"
        return f"<Quantizations: {printable(self.model.name, LONGEST_NAME)} in {len(self.found)} file types, {best}>"


def check_source(model: Model) -> None:
    """Raise ``ModelError`` if the header does not tell which tensors a quantization would keep."""
    if not any(tensor.type in FULL for tensor in model.tensors):
        raise ModelError(
            f"{show(model.path)} has no tensor of type f32, f16 or bf16, so it is not known what a file that is "
            "quantized again would keep: give the F16 or BF16 file"
        )


def short(model: Model) -> str:
    """Return the name of the model's file."""
    return model.called.rpartition("/")[2]


def published_as(model: Model) -> str:
    """Return the file type that keeps the weights of a model that is published quantized; empty for other models."""
    published = file_type_data()["published"].get(model.architecture)
    return (
        published["file_type"]
        if published and any(tensor.type == published["type"] for tensor in model.tensors)
        else ""
    )


def assumptions(model: Model) -> tuple[str, ...]:
    """List the assumptions about a model that is itself quantized."""
    published = published_as(model)
    published_types = {file_type_data()["published"][model.architecture]["type"]} if published else set()
    notes = (
        (
            f"{short(model)} has weights in {', '.join(sorted(published_types)).upper()} as they are published, which "
            f"{published} keeps: llama-quantize makes the other file types only with --allow-requantize, and no larger "
            "one is better",
        )
        if published
        else ()
    )
    types = sorted({tensor.type for tensor in model.tensors} - {*FULL, *published_types})
    if not types:
        return notes
    kept = sum(tensor.type in FULL for tensor in model.tensors)
    return (
        *notes,
        f"{short(model)} is quantized itself ({', '.join(types)}); it is assumed that its {kept} tensors of other "
        "types have these in the original too. Quantize the original: llama-quantize takes a quantized file only with "
        "--allow-requantize, which loses quality",
    )


def needs_imatrix(tensors: Sequence[str], file_type: FileType) -> bool:
    """Return whether llama-quantize refuses to write the file without an importance matrix."""
    rule = file_type_data()["imatrix"]
    needing = {*rule["types"], rule["also"].get(file_type.name)}
    return any(kind in needing and name not in rule["but"] for name, kind in zip(tensors, file_type.types, strict=True))


def quantization(model: Model, types: FileTypes, file_type: FileType) -> Quantization:
    """Describe one file type before it is planned; ``problem`` says why it will not be planned."""
    name, trained = file_type.name, file_type_data()["trained"]
    is_trained_for = name in trained["names"] and model.architecture not in trained["architectures"]
    if file_type.problem:
        return Quantization(name, None, None, {}, False, is_trained_for, problem=f"llama.cpp: {file_type.problem}")
    needs = needs_imatrix(types.tensors, file_type)
    if needs and name in file_type_data()["changed_by_imatrix"]["names"]:
        problem = "its tensors' types depend on the importance matrix, and llama.cpp tells only those without one"
        return Quantization(name, None, None, {}, needs, is_trained_for, problem=problem)
    weights = sum(math.prod(tensor.shape) for tensor in model.tensors)
    return Quantization(
        name,
        types.header_bytes + padded(file_type.sizes),
        8 * sum(file_type.sizes) / weights,
        dict(Counter(file_type.types).most_common()),
        needs,
        is_trained_for,
    )


def ordered(quantizations: Iterable[Quantization]) -> tuple[Quantization, ...]:
    """Sort by size, the largest file first, unknown sizes last."""
    return tuple(sorted(quantizations, key=lambda each: (each.bytes is None, -(each.bytes or 0), each.name)))


def best_of(
    quantizations: Iterable[Quantization], own_type: str, tokens_per_second: float | None, published: str = ""
) -> Quantization | None:
    """Choose the best type; see ``Quantizations.best``.

    Args:
        quantizations: The planned types.
        own_type: The type of most weights of the model.
        tokens_per_second: The useful speed of generation, if the user sets it.
        published: See ``published_as``.
    """
    rows = [each for each in quantizations if each.fits]
    return best_type(rows, figures_of, tokens_per_second, own_type=own_type, published=published)


def figures_of(each: Quantization) -> TypeFigures:
    """Return the figures of a type to choose by."""
    contexts = each.n_ctx, each.least_context
    return TypeFigures(
        each.name, each.bytes, each.bits_per_weight, each.tokens_per_second, each.needs_imatrix, *contexts
    )


@dataclass(frozen=True)
class ShapePlan:
    """A model of the catalogue in the best file type for a machine."""

    shape: ShapeInfo
    """The model."""
    best: Quantization
    """The file type and its plan."""


@dataclass(frozen=True)
class ShapePlans(Plans):
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
        return {each["file_type"]: bits_as_published for each in file_type_data()["published"].values()}
    return {name: each["bits"] for name, each in file_type_data()["smaller"].items()}


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
