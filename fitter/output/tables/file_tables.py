"""Tables with a plan for each of many files: ``fitter quants`` and ``fitter hf://org/repo``. They decide nothing."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.errors import Message, Remedy
from fitter.output.arguments import arguments, command_line
from fitter.output.tables.narrow import NarrowTable
from fitter.planning.tables.file_rows import figures_of as file_figures
from fitter.planning.tables.file_rows import reason
from fitter.planning.tables.quantization_rows import figures_of as type_figures
from fitter.text import human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan
    from fitter.planning.tables.file_rows import Planned, Repository, RepositoryFile
    from fitter.planning.tables.quantization_rows import Quantization, Quantizations

_BEST = "bold green"
_PLURAL = {"importance matrix": "importance matrices"}


def _table_of(
    name: str,
    rows: Iterator[tuple[Sequence[str], Sequence[str], bool]],
    *,
    rates: Sequence[str],
    spare: Sequence[str],
    is_folded: bool = False,
) -> NarrowTable:
    """Make a table with a row for each plan: its cells, its notes, and whether it is the best.

    ``spare`` columns may be hidden. The first column is folded, or its names become headings.
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


def _cells(each: Planned, *rates: float | None) -> tuple[str, ...]:
    """Write the cells of a row; ``rates`` are tokens per second."""
    bits = "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    fits = "unknown" if each.plan is None else "yes" if each.fits else "no"
    contexts = ("-" if count is None else str(count) for count in (each.n_ctx, each.longest_context))
    host = mib(each.host_weights if each.fits else None)
    speeds = ("-" if rate is None else speed(rate) for rate in rates)
    return (printable(each.name), mib(each.bytes), bits, fits, *contexts, host, *speeds)


def _shown(*parts: RenderableType, lines: Iterator[str]) -> RenderableType:
    """Join ``parts``, and ``lines`` below them, folded to the terminal's width."""
    return Group(*parts, *(Text(line, overflow="fold") for line in lines))


def _lines_below(found: Sequence[Planned], notes: Iterable[str], why: str, word: str = "") -> Iterator[str]:
    """Write the lines below a table: why rows have no plan, and ``why`` one is the best.

    If none fits, the last line says what the smallest one lacks, whose name ``word`` stands before.
    """
    # added to the names, since a text that is put into another loses its remedies
    yield from (f"{printable(each.name)}: " + printable(each.problem) for each in found if each.problem)
    yield from notes
    if any(each.n_ctx != each.longest_context for each in found):
        yield "context: of the plan, which is for speed; longest: the most that fits, whatever it costs in time"
    if why:
        yield why
    elif not any(each.fits for each in found):
        planned = [(each.bytes or 0, each.name, each.plan.problems) for each in found if each.plan is not None]
        for _, name, problems in sorted(planned, key=lambda each: each[:2])[:1]:
            yield from (f"none fits; {word}{printable(name)}: " + printable(each.message) for each in problems[:1])


def _best_line(name: str, size: int, more: str = "") -> str:
    """Write the line that names the best one."""
    return f"best: {name}, {human(size)}{more}"


def _arguments_line(plan: Plan) -> str:
    """Write the line with its arguments."""
    return f"arguments: {command_line(arguments(plan), quoted=True)}"


def quantizations_table(quantizations: Quantizations, *, verbose: bool = False) -> RenderableType:
    """Draw a row for each file type, and notes below; ``verbose`` adds the types of its tensors."""
    model = quantizations.model
    source = f" ({model.architecture}, {quantizations.source_type})"
    title = Text.assemble((model.name, "bold"), source, overflow="fold")
    rows = (
        (_cells(each, each.tokens_per_second), _quantization_notes(each), each is quantizations.best)
        for each in quantizations.found
    )
    table = _table_of("file type", rows, rates=("t/s",), spare=("bits", "host MiB", "context"))
    return _shown(title, table, lines=_lines_of_types(quantizations, verbose))


def _quantization_notes(each: Quantization) -> list[str]:
    notes = ["needs an importance matrix"] if each.needs_imatrix else []
    return [*notes, *(["for models trained for it"] if each.is_trained_for else [])]


def _lines_of_types(quantizations: Quantizations, verbose: bool) -> Iterator[str]:
    if verbose:
        for each in quantizations.found:
            if each.types:
                yield f"{each.name}: " + ", ".join(f"{count} {kind}" for kind, count in each.types.items())
    best = quantizations.best
    why = "" if best is None else reason(type_figures(best), best.name, quantizations.tokens_per_second)
    yield from _lines_below(quantizations.found, map(printable, quantizations.notes), why, "as ")


def quantizations_commands(quantizations: Quantizations) -> tuple[str, ...]:
    """List commands for the best file type, a line each, which must not be folded since it may be copied."""
    best = quantizations.best
    if best is None or best.plan is None or best.bytes is None:
        return ()
    imatrix = ", made with an importance matrix" if best.needs_imatrix else ""
    return tuple(map(printable, (_best_line(best.name, best.bytes, imatrix), _arguments_line(best.plan))))


def repository_table(repository: Repository, *, verbose: bool = False) -> RenderableType:
    """Draw a row for each model, and notes below; ``verbose`` adds the arguments of each plan."""
    rows = ((_file_cells(each), _file_notes(each), each is repository.best) for each in repository.found)
    rates, spare = ("prompt t/s", "t/s"), ("bits", "context", "host MiB", "prompt t/s", "MiB")
    table = _table_of("file", rows, rates=rates, spare=spare, is_folded=True)
    title = Text(printable(repository.address), "bold", overflow="fold")
    return _shown(title, table, lines=repository_lines(repository, verbose=verbose))


def _file_cells(each: RepositoryFile) -> tuple[str, ...]:
    return _cells(each, each.prompt_tokens_per_second, each.generation_tokens_per_second)


def _file_notes(each: RepositoryFile) -> list[str]:
    return [f"{len(each.files)} files"] if len(each.files) > 1 else []


def repository_lines(repository: Repository, *, verbose: bool = False) -> Iterator[str]:
    """Write the notes below the table: models without a plan, other files, and the choice of the best one."""
    if verbose:
        for each in repository.found:
            if each.plan is not None and each.fits:
                yield f"{printable(each.name)}: {printable(command_line(arguments(each.plan), quoted=True))}"
    best = repository.best
    why = "" if best is None else reason(file_figures(best), best.name, repository.tokens_per_second)
    yield from _lines_below(repository.found, _companion_files(repository, verbose), why)


def repository_commands(repository: Repository) -> tuple[str, ...]:
    """List commands for the best model, a line each, which must not be folded since a shell may run it."""
    return tuple(map(printable, _commands(repository)))


def _commands(repository: Repository) -> Iterator[str]:
    best = repository.best
    if best is None or best.plan is None:
        return
    yield _best_line(best.name, best.bytes)
    if repository.download is not None:
        yield f"download: {shlex.join(repository.download)}"
    if repository.run is not None:
        yield f"run: {command_line(repository.run, quoted=True)}"
        if repository.hf is not None:
            yield f"run without downloading it first: {shlex.join(repository.hf)} in place of -m and the file"
    else:
        yield _arguments_line(best.plan)


def _companion_files(repository: Repository, verbose: bool) -> Iterator[str]:
    kinds = Counter(each.kind for each in repository.beside)
    for kind, count in kinds.items():
        names = [each.name for each in repository.beside if each.kind == kind]
        shown = names if verbose else names[:3]
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        word = kind if count == 1 else _PLURAL.get(kind, f"{kind}s")
        options = (Remedy(" (--mmproj plans with one)", "mmproj"),) if kind == "multimodal projector" else ()
        yield Message(f"not planned, {word}", *options, end=f": {printable(', '.join(shown))}{more}")
