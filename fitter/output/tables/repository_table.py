"""The models of a repository: the table of ``fitter hf://org/repo``. Nothing is decided here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from fitter.errors import Message, Remedy
from fitter.output.arguments import arguments, command_line
from fitter.output.tables import plan_row
from fitter.planning.tables.file_rows import figures_of, reason
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.tables.file_rows import Repository, RepositoryFile

_PLURAL = {"importance matrix": "importance matrices"}


def repository_table(repository: Repository, *, verbose: bool = False) -> RenderableType:
    """Draw a row for each model, and notes below; ``verbose`` adds the arguments of each plan."""
    rows = ((_cells(each), _notes(each), each is repository.best) for each in repository.found)
    rates, spare = ("prompt t/s", "t/s"), ("bits", "context", "host MiB", "prompt t/s", "MiB")
    table = plan_row.table_of("file", rows, rates=rates, spare=spare, is_folded=True)
    title = Text(printable(repository.address), "bold", overflow="fold")
    return plan_row.shown(title, table, lines=lines_below(repository, verbose=verbose))


def _cells(each: RepositoryFile) -> tuple[str, ...]:
    return plan_row.cells(each, each.prompt_tokens_per_second, each.generation_tokens_per_second)


def _notes(each: RepositoryFile) -> list[str]:
    return [f"{len(each.files)} files"] if len(each.files) > 1 else []


def lines_below(repository: Repository, *, verbose: bool = False) -> Iterator[str]:
    """Write the notes below the table: models without a plan, other files, and the choice of the best one."""
    if verbose:
        for each in repository.found:
            if each.plan is not None and each.fits:
                yield f"{printable(each.name)}: {printable(command_line(arguments(each.plan), quoted=True))}"
    best = repository.best
    why = "" if best is None else reason(figures_of(best), best.name, repository.tokens_per_second)
    yield from plan_row.lines_below(repository.found, _companion_files(repository, verbose), why)


def commands(repository: Repository) -> tuple[str, ...]:
    """List commands for the best model, a line each, which must not be folded since a shell may run it."""
    return tuple(map(printable, _commands(repository)))


def _commands(repository: Repository) -> Iterator[str]:
    best = repository.best
    if best is None or best.plan is None:
        return
    yield plan_row.best(best.name, best.bytes)
    if repository.download is not None:
        yield f"download: {shlex.join(repository.download)}"
    if repository.run is not None:
        yield f"run: {command_line(repository.run, quoted=True)}"
        if repository.hf is not None:
            yield f"run without downloading it first: {shlex.join(repository.hf)} in place of -m and the file"
    else:
        yield plan_row.with_arguments(best.plan)


def _companion_files(repository: Repository, verbose: bool) -> Iterator[str]:
    kinds = Counter(each.kind for each in repository.beside)
    for kind, count in kinds.items():
        names = [each.name for each in repository.beside if each.kind == kind]
        shown = names if verbose else names[:3]
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        word = kind if count == 1 else _PLURAL.get(kind, f"{kind}s")
        options = (Remedy(" (--mmproj plans with one)", "mmproj"),) if kind == "multimodal projector" else ()
        yield Message(f"not planned, {word}", *options, end=f": {printable(', '.join(shown))}{more}")


__all__ = ["commands", "lines_below", "repository_table"]
