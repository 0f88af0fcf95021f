"""Loads of one model that differ in one parameter: contexts in a report, and layers on devices. Bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fitter.llama.types import Breakdown, Row
from fitter.planning.placing.placement import Placement
from fitter.planning.plan.plan import Plan, resolved
from fitter.text import human

MOST_POINTS = 9
"""Most contexts beside the chosen one; each doubles the one before."""


@dataclass(frozen=True)
class ContextPoint:
    """The best plan for one context, with all other parameters unchanged."""

    n_ctx: int
    """Tokens of context, for all sequences together."""
    fits: bool
    """Whether a plan fits."""
    devices: int
    """Bytes on all devices."""
    host: int
    """Bytes of host memory."""
    on_host: int
    """Bytes of weights and cache in host memory, which slow the plan down."""
    prompt_tokens_per_second: float | None
    """Estimated speed; ``None`` if it does not fit."""
    generation_tokens_per_second: float | None
    """Estimated speed; ``None`` if it does not fit, or for a model that embeds or ranks texts."""
    message: str = ""
    """Why it does not fit or has no plan."""
    full_context_tokens_per_second: float | None = None
    """Estimated speed of generation when the context of a user is full; ``None`` if it does not fit."""
    prompt: int | None = None
    """Tokens of the prompt that its speeds are for; ``None`` without an estimate."""

    def to_dict(self) -> dict[str, Any]:
        """Return the point for JSON."""
        return asdict(self)


def point_of(plan: Plan) -> ContextPoint:
    """Return the point of a plan."""
    price = plan.estimate
    full = None if price is None else price.full_context
    return ContextPoint(
        resolved(plan).n_ctx,
        plan.fits,
        sum(use.used for use in plan.devices),
        plan.host.used,
        plan.host.model + plan.host.context,
        None if price is None else price.prompt_tokens_per_second,
        None if price is None or price.input_tokens is not None else price.generation_tokens_per_second,
        "; ".join(f"{problem.device} lacks {human(problem.missing)}" for problem in plan.problems),
        None if full is None else full.generation_tokens_per_second,
        None if price is None else price.workload.prompt,
    )


def contexts_to_try(n_ctx_train: int, n_streams: int, smallest: int, chosen: int) -> list[int]:
    """List contexts from the ``smallest`` per sequence to the model's own, each twice the one before."""
    most = max(n_ctx_train * n_streams, 1)
    context = min(max(smallest * n_streams, 1), most)
    contexts = []
    while context < most:
        contexts.append(context)
        context *= 2
    # of too many, keep the largest
    return [each for each in [*contexts, most][-MOST_POINTS:] if each != chosen]


@dataclass(frozen=True)
class OffloadPlace:
    """The host's or a device's part of a model.

    Attributes:
        n_layers: Its repeating layers.
        last_layer: Index of the last of them; -1 without any.
        has_output: Whether it has the output.
        bytes: All of its memory.
        weights: Its weights.
    """

    n_layers: int
    last_layer: int
    has_output: bool
    bytes: int
    weights: int


@dataclass(frozen=True)
class OffloadRow:
    """A load with ``n_gpu_layers`` layers on devices, the output counted as the last one."""

    n_gpu_layers: int
    is_whole: bool
    host: OffloadPlace
    devices: tuple[OffloadPlace, ...]


@dataclass(frozen=True)
class OffloadTable:
    """Loads of one model with the same parameters but for ``n_gpu_layers``.

    Attributes:
        architecture: The model's architecture.
        n_ctx: Context in tokens.
        flash_attn: Whether flash attention is on.
        n_batch: Tokens of a logical batch.
        n_ubatch: Tokens of a physical batch.
        embeddings: Whether the model only reads texts.
        ranks: Whether it ranks them.
        rows: Fewest layers on devices first.
    """

    architecture: str
    n_ctx: int
    flash_attn: bool
    n_batch: int
    n_ubatch: int
    embeddings: bool
    ranks: bool
    rows: tuple[OffloadRow, ...]


def layer_counts(n_gpu_layers: int, step: int, n_units: int) -> tuple[int, ...]:
    """List numbers of layers on devices: from none in steps up to ``n_gpu_layers``, or that number alone.

    Args:
        n_gpu_layers: The largest number; all where it is negative or larger than all.
        step: Layers between two numbers; 0 for the largest number alone.
        n_units: All layers and the output.
    """
    most = n_units if not 0 <= n_gpu_layers <= n_units else n_gpu_layers
    return (*range(0, most, step), most) if step else (most,)


def offload_row(
    placement: Placement, breakdown: Breakdown, beside: Sequence[Row], names: Sequence[str] | None = None
) -> OffloadRow:
    """Build the row of one load.

    Args:
        placement: The layers of each device that the load uses.
        breakdown: llama.cpp's measurement.
        beside: Memory of other models that are loaded with it.
        names: All devices, if the load does not use each.
    """
    n_units = placement.first + placement.n_gpu_layers
    host = [breakdown.host, *(row for row in beside if row.is_host or row.device is None)]
    ranges = dict(zip(breakdown.devices, placement.ranges(), strict=True))
    places = []
    for name in breakdown.devices if names is None else names:
        start, stop = ranges.get(name, (0, 0))
        rows = [breakdown.on(name), *(row for row in beside if row.device == name and not row.is_host)]
        places.append(_place(start, stop, n_units, rows))
    return OffloadRow(
        placement.n_gpu_layers, placement.first == 0, _place(0, placement.first, n_units, host), tuple(places)
    )


def _place(start: int, stop: int, n_units: int, rows: Sequence[Row]) -> OffloadPlace:
    n_layers = min(stop, n_units - 1) - start
    has_output = start < stop == n_units
    last = start + n_layers - 1 if n_layers > 0 else -1
    return OffloadPlace(
        max(0, n_layers), last, has_output, sum(row.used for row in rows), sum(row.model for row in rows)
    )
