"""A model in every file type: the table of ``fitter quants``. No native code, nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from fitter.output.tables import plan_row
from fitter.planning.tables.file_rows import reason
from fitter.planning.tables.quantization_rows import figures_of
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.tables.quantization_rows import Quantization, Quantizations


def quantizations_table(quantizations: Quantizations, *, verbose: bool = False) -> RenderableType:
    """Draw a row for each file type, and notes below; ``verbose`` adds the types of its tensors."""
    model = quantizations.model
    source = f" ({model.architecture}, {quantizations.source_type})"
    title = Text.assemble((model.name, "bold"), source, overflow="fold")
    rows = (
        (plan_row.cells(each, each.tokens_per_second), _notes(each), each is quantizations.best)
        for each in quantizations.found
    )
    table = plan_row.table_of("file type", rows, rates=("t/s",), spare=("bits", "host MiB", "context"))
    return plan_row.shown(title, table, lines=_lines_below(quantizations, verbose))


def _notes(each: Quantization) -> list[str]:
    notes = ["needs an importance matrix"] if each.needs_imatrix else []
    return [*notes, *(["for models trained for it"] if each.is_trained_for else [])]


def _lines_below(quantizations: Quantizations, verbose: bool) -> Iterator[str]:
    if verbose:
        for each in quantizations.found:
            if each.types:
                yield f"{each.name}: " + ", ".join(f"{count} {kind}" for kind, count in each.types.items())
    best = quantizations.best
    why = "" if best is None else reason(figures_of(best), best.name, quantizations.tokens_per_second)
    yield from plan_row.lines_below(quantizations.found, map(printable, quantizations.notes), why, "as ")


def commands(quantizations: Quantizations) -> tuple[str, ...]:
    """List commands for the best file type, a line each, which must not be folded since it may be copied."""
    best = quantizations.best
    if best is None or best.plan is None or best.bytes is None:
        return ()
    imatrix = ", made with an importance matrix" if best.needs_imatrix else ""
    return tuple(map(printable, (plan_row.best(best.name, best.bytes, imatrix), plan_row.with_arguments(best.plan))))


__all__ = ["commands", "quantizations_table"]
