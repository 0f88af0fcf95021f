"""A model in every file type: the table of ``fitter quants``, and its JSON. No native code, nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.arguments import arguments, command_line
from fitter.output.json import SCHEMA, figure
from fitter.output.narrow import NarrowTable
from fitter.output.units import human, mib, speed
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.quantizations import Quantization, Quantizations

_BEST = "bold green"


def to_dict(found: Quantizations) -> dict[str, Any]:
    """The document of ``fitter quants --json``; a figure is ``null`` where it is not known."""
    model = found.model
    return {
        "schema": SCHEMA,
        "fits": found.fits,
        "model": {"path": model.path, "name": model.name, "architecture": model.architecture, "bytes": model.bytes},
        "source_type": found.source_type,
        "best": None if found.best is None else found.best.name,
        "file_types": [_file_type(each) for each in found.found],
        "notes": list(found.notes),
    }


def _file_type(each: Quantization) -> dict[str, Any]:
    plan = each.plan
    return {
        "name": each.name,
        "bytes": each.bytes,
        "bits_per_weight": figure(each.bits_per_weight),
        "types": dict(each.types),
        "needs_imatrix": each.needs_imatrix,
        "fits": None if plan is None else plan.fits,
        "n_ctx": each.n_ctx,
        "longest_context": each.longest_context,
        "host_weights": each.host_weights,
        "on_devices": None if plan is None else each.is_on_devices,
        "tokens_per_second": figure(each.tokens_per_second),
        "arguments": arguments(plan) if plan is not None and plan.fits else None,
        "problem": each.problem or (plan.problems[0].message if plan is not None and plan.problems else None),
    }


def quantizations_table(found: Quantizations, *, verbose: bool = False) -> RenderableType:
    """A row for each file type, and the best one with its arguments; ``verbose``: also what each is made of."""
    model = found.model
    title = Text.assemble((model.name, "bold"), f" ({model.architecture}, {found.source_type})", overflow="fold")
    table = NarrowTable(spare=("bits", "host MiB"))
    table.add_column("file type", no_wrap=True)
    for column in ("MiB", "bits", "fits", "context", "longest", "host MiB", "t/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for each in found.found:
        table.add_row(*_row(each, is_best=each is found.best))
    parts: list[RenderableType] = [title, table]
    parts += [Text(line, overflow="fold") for line in _below(found, verbose)]
    return Group(*parts)


def _row(each: Quantization, *, is_best: bool) -> tuple[str | Text, ...]:
    style = _BEST if is_best else ""
    bits = "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    fits = "unknown" if each.plan is None else "yes" if each.fits else "no"
    contexts = ("-" if count is None else str(count) for count in (each.n_ctx, each.longest_context))
    rate = "-" if each.tokens_per_second is None else speed(each.tokens_per_second)
    cells = (each.name, mib(each.bytes), bits, fits, *contexts, mib(each.host_weights if each.fits else None), rate)
    notes = ["best"] if is_best else []
    notes += ["needs an importance matrix"] if each.needs_imatrix else []
    notes += ["for models trained for it"] if each.is_trained_for else []
    return (*(Text(cell, style=style) for cell in cells), ", ".join(notes))


def _below(found: Quantizations, verbose: bool) -> Iterator[str]:
    if verbose:
        for each in found.found:
            if each.types:
                yield f"{each.name}: " + ", ".join(f"{count} {kind}" for kind, count in each.types.items())
    for each in found.found:
        if each.problem:
            yield f"{each.name}: {printable(each.problem)}"
    yield from map(printable, found.notes)
    if any(each.n_ctx != each.longest_context for each in found.found):
        yield "context: of the plan, which is for speed; longest: the most that fits, whatever it costs in time"
    best = found.best
    if best is not None and best.plan is not None and best.bytes is not None:
        imatrix = ", made with an importance matrix" if best.needs_imatrix else ""
        words = command_line(arguments(best.plan), quoted=True)
        yield f"best: {best.name}, {human(best.bytes)}{imatrix}, with {printable(words)}"
    elif found.fits and found.tokens_per_second is not None:
        rate = speed(found.tokens_per_second)
        yield f"none of them generates {rate} tokens per second: ask for fewer with --tokens-per-second"
    elif found.fits:
        yield (
            "none is marked as the best, which has every layer on the devices: --tokens-per-second N marks the one "
            "with the most bits per weight that generates as fast, wherever its weights are"
        )
    else:
        planned = [(each.bytes or 0, each.name, each.plan) for each in found.found if each.plan is not None]
        for _, name, plan in sorted(planned, key=lambda each: each[:2])[:1]:
            yield f"none fits; as {name}: {printable(plan.problems[0].message)}"


__all__ = ["quantizations_table", "to_dict"]
