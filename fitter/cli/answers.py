"""How commands ask and answer: progress and llama.cpp's log on stderr, the result on stdout or in files."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, AnswerError, LlamaCppError, UsageError
from fitter.text import as_log_line, dummy_loads, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.planning.request.request import Progress
    from fitter.planning.request.summary import Problem


STDOUT = Path("-")
"""The name that stands for stdout."""

_GGUF = b"GGUF"


@contextmanager
def asking(verbose: int = 0, *, is_long: bool = False) -> Iterator[dict[str, Any]]:
    """Show progress on stderr unless it is quiet, and llama.cpp's log with ``-vv``, or with ``-v`` after an error.

    ``is_long`` is for a command that takes minutes: without a terminal it writes a line now and then.

    Yields the keywords ``on_progress`` and ``on_log`` for the call inside the block.
    """
    shown = nullcontext() if verbose < 0 else progress(sys.stderr, every_step=verbose > 0, is_long=is_long)
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


def print_plans(plans: Any, kind: str, *, as_json: bool | None, verbose: int) -> int:
    """Print a result with many plans to stdout.

    Args:
        plans: The result.
        kind: ``exploration``, ``quantizations`` or ``repository``.
        as_json: Whether to print its document in place of the table and of the commands for the best plan.
        verbose: How often ``-v`` is given.

    Returns:
        The exit status.
    """
    if as_json:
        print_json(plans.to_dict())
    elif kind == "exploration":
        from fitter.output.tables.exploration_table import exploration_table

        print_table(exploration_table(plans, verbose=verbose > 0))
    else:
        from fitter.output.tables import file_tables

        print_table(getattr(file_tables, f"{kind}_table")(plans, verbose=verbose > 0))
        for line in getattr(file_tables, f"{kind}_commands")(plans):
            click.echo(line)
    return EXIT_FITS if plans.fits else EXIT_DOES_NOT_FIT


def print_table(table: RenderableType) -> None:
    """Print a table to stdout."""
    from fitter.output.tables import plan_table

    plan_table.print_to(sys.stdout, table)


def check_files(
    files: Mapping[str, Path | None],
    *inputs: str | Path | None,
    others: Mapping[str, Path | None] | None = None,
    may_print: bool = False,
) -> None:
    """Check the files that a command will write, and that the packages for HTML are installed.

    Args:
        files: The files, by the options that name them.
        inputs: Files that the command reads.
        others: Further files that it writes.
        may_print: Whether a page may go to stdout.

    Raises:
        AnswerError: A file cannot be written.
        UsageError: A file would replace an input, or two options name it.
        LibraryError: A package is missing.
    """
    from fitter.output.pages import page

    named = {option: file for option, file in files.items() if file is not None}
    for option, file in named.items():
        if option != "--svg":
            page.check_installed()
        if file != STDOUT:
            check_place(option, file)
            _check_kept(option, file, inputs)
        elif option == "--svg" or not may_print:
            raise UsageError(f"{option} -: stdout has what the command prints otherwise: name a file")
    written: dict[str, str] = {}
    for option, other in {**named, **(others or {})}.items():
        if other is not None:
            first = written.setdefault(os.path.realpath(other), option)
            if first != option:
                raise UsageError(f"{first} and {option} both name {other}: give each a file of its own")


def _check_kept(option: str, file: Path, inputs: Iterable[str | Path | None]) -> None:
    """Raise ``UsageError`` if ``file`` is an input or a model."""
    if any(source is not None and _is_same(file, source) for source in inputs):
        raise UsageError(f"{option} {file} would replace what is read: name another file")
    if _is_model(file):
        raise UsageError(f"{option} {file} is a GGUF file, which a report would replace: name another file")


def check_place(option: str, file: Path) -> None:
    """Raise ``AnswerError`` if ``file``, the value of ``option``, cannot be written."""
    try:
        kind = file.stat().st_mode
    except FileNotFoundError:
        kind = None
    except OSError as error:
        raise AnswerError(f"{option} {file} cannot be written: {error.strerror}: name another file") from None
    folder = os.path.dirname(os.path.realpath(file))
    if kind is not None and stat.S_ISDIR(kind):
        raise AnswerError(f"{option} {file} cannot be written: it is a directory: name a file in it")
    if not os.path.isdir(folder):
        raise AnswerError(f"{option} {file} cannot be written: there is no directory {folder}")
    # replacing a file needs a writable directory; a pipe or a device is written to
    written = folder if kind is None or stat.S_ISREG(kind) else file
    if not os.access(written, os.W_OK):
        raise AnswerError(f"{option} {file} cannot be written: Permission denied: name another file")


def _is_same(file: Path, source: str | Path) -> bool:
    try:
        return os.path.samefile(file, source)
    except (OSError, ValueError):
        return False


def _is_model(file: Path) -> bool:
    # opening a pipe could wait forever
    if not os.path.isfile(file):
        return False
    try:
        with file.open("rb") as opened:
            return opened.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def write_file(file: Path, text: str) -> None:
    """Write ``text`` to ``file``, all or nothing, or to stdout. Raises ``AnswerError``."""
    if file == STDOUT:
        click.echo(text, nl=False)
        return
    from fitter.storage import replace_document

    replace_document(file, text.encode())


_BAR = 24
"""Characters of a bar."""
_WORTH_COUNTING = 2
"""Seconds after which a step shows its duration."""


_NOW_AND_THEN = 15
"""Seconds between two lines where there is no terminal."""


@contextmanager
def progress(
    stream: IO[str], *, every_step: bool = False, is_long: bool = False
) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function to call with each step, or ``None`` if nothing is shown.

    On a terminal it updates one line, which is removed at the end; with ``every_step`` each step gets a line. Elsewhere
    a call that takes minutes (``is_long``) writes a line now and then.
    """
    if every_step:
        yield lambda step: None if _is_on_its_way(step) else print(_text(step), file=stream, flush=True)
    elif stream.isatty():
        from rich.console import Console

        with Console(file=stream, highlight=False, markup=False).status(Step("reading the model")) as status:
            yield lambda step: status.update(Step(_text(step), step.part))
    elif is_long:
        began = time.monotonic()

        def say(step: Progress) -> None:
            nonlocal began
            if time.monotonic() - began >= _NOW_AND_THEN:
                began = time.monotonic()
                print(_text(step), file=stream, flush=True)

        yield say
    else:
        yield None


@contextmanager
def counted(stream: IO[str], doing: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a function to call with the number done, the number of all, and the last name; ``None`` if nothing is
    shown.

    On a terminal it draws a bar, which is removed at the end.
    """
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    console = Console(file=stream, highlight=False, markup=False)
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(doing, last="")
        yield lambda done, total, last: bars.update(task, completed=done, total=total, last=last)


class Step:
    """The text of a step, with its seconds if it is slow, and a bar if its ``part`` is known."""

    def __init__(self, text: str, part: float | None = None) -> None:
        self._text = text
        self._part = part
        self._began = time.monotonic()

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        seconds = int(time.monotonic() - self._began)
        text = Text(f"{self._text} ({seconds} s)" if seconds >= _WORTH_COUNTING else self._text)
        if self._part is None:
            return text
        from rich.columns import Columns
        from rich.progress_bar import ProgressBar

        return Columns([ProgressBar(total=1.0, completed=self._part, width=_BAR), text])


def _is_on_its_way(step: Progress) -> bool:
    """Return whether a step is reported repeatedly until it is done."""
    return step.part is not None and step.part < 1


def _text(step: Progress) -> str:
    if step.part is not None:
        return printable(step.text)
    return f"[{dummy_loads(step.dummy_loads)}] {printable(step.text)}"
