"""``fitter lock``: record the memory of every case."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, options, typed_words
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS

_EPILOG = """\
Exit status: 0 the lock was written, 1 it was written although a case does not fit, 2 usage error, 3 a case cannot be
measured and nothing was written, 5 the lock cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.option(
    "--update",
    shell_complete=typed_words.complete_cases,
    multiple=True,
    metavar="CASE",
    cls=options.SectionOption,
    section="Cases",
    help="Measure only this case, and leave the rest of the lock unchanged. Repeatable.",
)
@click.option(
    "--prune",
    is_flag=True,
    cls=options.SectionOption,
    section="Cases",
    help="Remove the cases from the lock that are no longer in fitter.toml. Nothing is measured, except with --update.",
)
@options.regression_options
def lock(update: tuple[str, ...], prune: bool, cases_file: Path | None, lock_file: Path | None, **given: Any) -> int:
    """Fit every case in fitter.toml and record the memory that it takes in fitter.lock.

    The lock contains no path, no time and nothing about this machine, so that it is the same wherever it is made.
    Commit it with fitter.toml; 'fitter check' compares with it.
    """
    from fitter.model.files.source import show
    from fitter.regression import check_report
    from fitter.regression.cases import CASES_FILE
    from fitter.regression.check_cases import lock as write
    from fitter.regression.check_cases import lock_path
    from fitter.regression.check_cases import prune as remove

    path = cases_file or Path(CASES_FILE)
    if prune:
        gone = remove(path, lock_file, trust=bool(given["trust"]))
        text = f"removed {', '.join(gone)} from" if gone else "there is no case to remove from"
        click.echo(f"fitter: {text} {show(lock_path(path, lock_file))}", err=True)
        if not update:
            return EXIT_FITS
    with answers.counted(sys.stderr, "fitting") as on_done:
        measured = write(path, lock_file, update=update, on_done=on_done, **options.given(given))
    for line in check_report.lock_lines(measured):
        click.echo(f"fitter: {line}", err=True)
    file = show(lock_path(path, lock_file))
    failed = [each.error.exit_code for each in measured if each.error]
    if failed:
        click.echo(f"fitter: {file} was not changed", err=True)
        return max(failed)
    click.echo(f"fitter: wrote {file}", err=True)
    return EXIT_FITS if all(each.snapshot and each.snapshot.fits for each in measured) else EXIT_DOES_NOT_FIT
