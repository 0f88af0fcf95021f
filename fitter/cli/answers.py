"""How commands ask and answer: progress and llama.cpp's log on stderr, the result on stdout."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from fitter.errors import LlamaCppError
from fitter.text import as_log_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.planning.request.summary import Problem


@contextmanager
def asking(verbose: int = 0, *, is_long: bool = False) -> Iterator[dict[str, Any]]:
    """Show progress on stderr unless it is quiet, and llama.cpp's log with ``-vv``, or with ``-v`` after an error.

    ``is_long`` is for a command that takes minutes: without a terminal it writes a line now and then.

    Yields the keywords ``on_progress`` and ``on_log`` for the call inside the block.
    """
    from fitter.output import progress

    shown = nullcontext() if verbose < 0 else progress.progress(sys.stderr, every_step=verbose > 0, is_long=is_long)
    with shown as on_progress:
        try:
            yield {"on_progress": on_progress, "on_log": _log_line if verbose > 1 else None}
        except LlamaCppError as error:
            for line in error.log if verbose == 1 else ():
                _log_line(line)
            raise


def _log_line(line: str) -> None:
    click.echo(as_log_line(line), err=True)


def report_problems(problems: Iterable[Problem]) -> None:
    """Say on stderr what does not fit, a line each; a terminal gets them folded at words."""
    for problem in problems:
        line = f"fitter: does not fit: {problem.message}"
        if sys.stderr.isatty():
            line = click.wrap_text(line, shutil.get_terminal_size().columns, subsequent_indent="  ")
        click.echo(line, err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print a document to stdout."""
    from fitter.output.documents.document import dumps

    click.echo(dumps(document))


def print_table(table: RenderableType) -> None:
    """Print a table to stdout."""
    from fitter.output.tables import plan_table

    plan_table.print_to(sys.stdout, table)
