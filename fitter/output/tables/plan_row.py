"""Parts of tables with several plans: a row, the lines below, and the commands at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.arguments import arguments, command_line
from fitter.output.tables.narrow import NarrowTable
from fitter.text import human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan
    from fitter.planning.tables.file_rows import Planned

_BEST = "bold green"


def table_of(
    name: str,
    rows: Iterator[tuple[Sequence[str], Sequence[str], bool]],
    *,
    rates: Sequence[str],
    spare: Sequence[str],
    is_folded: bool = False,
) -> NarrowTable:
    """Make a table with a row for each plan.

    Args:
        name: Header of the first column.
        rows: For each plan its cells, its notes, and whether it is the best.
        rates: Headers of speeds.
        spare: Headers of columns that may be hidden.
        is_folded: Whether the first column is folded, or its names become headings.
    """
    table = NarrowTable(spare=spare, headings=int(is_folded))
    table.add_column(name, overflow="fold" if is_folded else "ellipsis", no_wrap=not is_folded)
    for column in ("MiB", "bits", "fits", "context", "longest", "host MiB", *rates):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for cells, notes, is_best in rows:
        style = _BEST if is_best else ""
        table.add_row(*(Text(cell, style=style) for cell in cells), ", ".join((*["best"] * is_best, *notes)))
    return table


def cells(each: Planned, *rates: float | None) -> tuple[str, ...]:
    """Write the cells of a row; ``rates`` are tokens per second."""
    bits = "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    fits = "unknown" if each.plan is None else "yes" if each.fits else "no"
    contexts = ("-" if count is None else str(count) for count in (each.n_ctx, each.longest_context))
    host = mib(each.host_weights if each.fits else None)
    speeds = ("-" if rate is None else speed(rate) for rate in rates)
    return (printable(each.name), mib(each.bytes), bits, fits, *contexts, host, *speeds)


def shown(*parts: RenderableType, lines: Iterator[str]) -> RenderableType:
    """Join ``parts``, and ``lines`` below them, folded to the terminal's width."""
    return Group(*parts, *(Text(line, overflow="fold") for line in lines))


def lines_below(found: Sequence[Planned], notes: Iterable[str], reason: str, word: str = "") -> Iterator[str]:
    """Write the lines below a table: why rows have no plan, and which one is the best.

    Args:
        found: The rows.
        notes: Lines of the table's own.
        reason: Why the best one is; empty if there is none.
        word: Stands before the name of the smallest one, of which the last line says what it lacks, if none fits.
    """
    # added to the names, since a text that is put into another loses its remedies
    yield from (f"{printable(each.name)}: " + printable(each.problem) for each in found if each.problem)
    yield from notes
    if any(each.n_ctx != each.longest_context for each in found):
        yield "context: of the plan, which is for speed; longest: the most that fits, whatever it costs in time"
    if reason:
        yield reason
    elif not any(each.fits for each in found):
        planned = [(each.bytes or 0, each.name, each.plan.problems) for each in found if each.plan is not None]
        for _, name, problems in sorted(planned, key=lambda each: each[:2])[:1]:
            yield from (f"none fits; {word}{printable(name)}: " + printable(each.message) for each in problems[:1])


def best(name: str, size: int, more: str = "") -> str:
    """Write the line that names the best one."""
    return f"best: {name}, {human(size)}{more}"


def with_arguments(plan: Plan) -> str:
    """Write the line with its arguments."""
    return f"arguments: {command_line(arguments(plan), quoted=True)}"
