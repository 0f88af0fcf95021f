"""A model with each number of layers on devices, as estimators of other programs list it. Bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.llama.types import Breakdown, Row
from fitter.planning.placing.placement import Placement


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
