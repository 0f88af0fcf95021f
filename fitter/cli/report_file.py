"""Check the files of a report before anything is planned, and write them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from fitter.errors import AnswerError, UsageError
from fitter.output.pages import page

STDOUT = Path("-")
"""The name that stands for stdout."""

_GGUF = b"GGUF"


def check(
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


def write(file: Path, text: str) -> None:
    """Write ``text`` to ``file``, all or nothing, or to stdout. Raises ``AnswerError``."""
    if file == STDOUT:
        click.echo(text, nl=False)
        return
    from fitter.storage import replace_document

    replace_document(file, text.encode())
