"""Shapes that can be planned without a file, and their plans on a machine: the tables of ``fitter shapes``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.arguments import command_line
from fitter.output.tables.narrow import table_of
from fitter.parameters.table import USEFUL_SPEED
from fitter.text import human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.model.shapes.catalogue import ShapeInfo
    from fitter.planning.tables.quantization_rows import ShapePlans


def shapes_table(shapes: Sequence[ShapeInfo]) -> RenderableType:
    """Draw a row for each shape; one alone is shown with its source and its hyperparameters."""
    if len(shapes) == 1:
        return _alone(shapes[0])
    columns = ("shape", "architecture", "parameters", "layers", "experts", "context", "GiB")
    table = table_of(*columns, texts=("architecture",), spare=("layers", "experts", "GiB"))
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


def plans_table(plans: ShapePlans, asked: Sequence[str] = ()) -> RenderableType:
    """Draw a row for each model with its best file type; ``asked`` are words of the command, for the last lines."""
    columns = ("shape", "type", "parameters", "MiB", "host MiB", "context", "prompt t/s", "t/s")
    table = table_of(*columns, texts=("type",), spare=("parameters", "prompt t/s", "MiB", "host MiB"))
    for each in plans.found:
        best = each.best
        rates = (
            "-" if rate is None else speed(rate) for rate in (best.prompt_tokens_per_second, best.tokens_per_second)
        )
        size = _count(each.shape.parameters), mib(best.bytes), mib(best.host_weights)
        table.add_row(each.shape.name, best.name, *size, str(best.n_ctx), *rates)
    return Group(*([table] if plans.found else []), *(Text(line, overflow="fold") for line in _below(plans, asked)))


def _below(plans: ShapePlans, asked: Sequence[str]) -> Iterator[str]:
    rate = f"{USEFUL_SPEED if plans.tokens_per_second is None else plans.tokens_per_second:g} t/s"
    if not plans.found:
        yield f"none of these models generates {rate} there: --tokens-per-second N accepts less"
        return
    yield (
        f"the most weights first, each in the file type with the most bits per weight that generates {rate} or more "
        "(--tokens-per-second)"
    )
    if plans.left:
        yield f"{plans.left} smaller models were not planned: --most N shows more, and words choose among them"
    if any(each.best.plan is not None and each.best.plan.host.total is None for each in plans.found):
        yield "host memory is unlimited here: --host-memory 32GiB says what the machine has"
    first = plans.found[0]
    yield f"plan one: fitter {command_line([f'{first.shape.name}:{first.best.name}', *asked], quoted=True)}"


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
