"""Shapes that can be planned without a file: the table of ``fitter shapes``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.tables.narrow import NarrowTable
from fitter.text import human, printable

if TYPE_CHECKING:
    from fitter.model.shapes.listing import ShapeInfo


def shapes_table(shapes: Sequence[ShapeInfo]) -> RenderableType:
    """Draw a row for each shape; one alone is shown with its source and its hyperparameters."""
    if len(shapes) == 1:
        return _alone(shapes[0])
    table = NarrowTable(spare=("layers", "experts", "GiB"))
    table.add_column("shape", no_wrap=True)
    table.add_column("architecture", no_wrap=True)
    for column in ("parameters", "layers", "experts", "context", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in shapes:
        table.add_row(
            each.name,
            each.architecture,
            _count(each.parameters),
            str(each.n_layer),
            str(each.n_expert or "-"),
            str(each.n_ctx_train),
            f"{each.bytes / 2**30:.1f}",
        )
    notes = (
        f"{len(shapes)} shapes: 'fitter --shape NAME' plans one, 'fitter shapes NAME' shows where its figures are from",
        "GiB: of all tensors before it is quantized; layers: with those for multi-token prediction",
    )
    return Group(table, Text(), *(Text(note, overflow="fold") for note in notes))


def _alone(each: ShapeInfo) -> RenderableType:
    title = Text.assemble((each.title, "bold"), f" ({each.architecture})", overflow="fold")
    experts = f", {each.n_expert} experts" if each.n_expert else ""
    lines = [
        f"{_count(each.parameters)} parameters in {each.n_layer} layers{experts}, for up to {each.n_ctx_train} tokens",
        f"{human(each.bytes)} as it is converted ({each.type.upper()})",
        f"source: {each.source}",
        f"plan it: fitter --shape {each.name}",
        "",
        *_listed(each.config),
    ]
    return Group(title, *(Text(printable(line), overflow="fold") for line in lines))


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    """Write a value on one line; a run of equal values is written once with its length."""
    if isinstance(value, list) and len(value) > 8:
        runs: list[tuple[Any, int]] = []
        for each in value:
            if runs and runs[-1][0] == each:
                runs[-1] = (each, runs[-1][1] + 1)
            else:
                runs.append((each, 1))
        return ", ".join(f"{each}" if n == 1 else f"{n}x {each}" for each, n in runs)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(parameters: int) -> str:
    """Write a number of parameters as in models' names: 8.03B, 360M, 1.03T."""
    size, unit = next((each for each in _UNITS if parameters >= 0.9995 * each[0]), _UNITS[-1])
    return f"{parameters / size:.3g}{unit}"


_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


__all__ = ["shapes_table"]
