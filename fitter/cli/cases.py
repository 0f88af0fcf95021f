"""``fitter lock``, ``check`` and ``fleet``: the cases of fitter.toml."""

from __future__ import annotations

import os
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


_CHECK_EPILOG = """\
-k takes parts of names, combined with and, or, not and parentheses:
  fitter check -k "chat and not q8_0"

Exit status: 0 within the limits, 2 usage error, or a case is only in fitter.toml or only in the lock, 3 a case cannot
be measured, 4 a case exceeds its limits, 5 the result cannot be written.
"""


@click.command(cls=options.Command, epilog=_CHECK_EPILOG)
@options.regression_options
@options.selection_option
@options.report_options
@options.page_option
@options.json_option
def check(
    cases_file: Path | None,
    lock_file: Path | None,
    as_json: bool | None,
    as_markdown: bool | None,
    junit: Path | None,
    page_file: Path | None,
    verbose: bool | None,
    **given: Any,
) -> int:
    """Measure every case in fitter.toml again and compare it with fitter.lock.

    A case fails if a device or the host takes more than max_growth allows, if the plan no longer fits, has a shorter
    context or more weights on the host, if its estimated speed drops by more than max_slowdown (2 %), or if it exceeds
    its budget. Changes that may explain a difference are listed: settings, devices, the model's header, llama.cpp,
    fitter. Cases that are only in fitter.toml, or only in fitter.lock, are listed after those that were measured.
    """
    from fitter.regression import check_report
    from fitter.regression.cases import CASES_FILE
    from fitter.regression.check_cases import check as measure
    from fitter.regression.check_cases import lock_path

    path = cases_file or Path(CASES_FILE)
    if page_file is not None:
        answers.check_files({"--report": page_file}, path, lock_path(path, lock_file), others={"--junit": junit})
    with answers.counted(sys.stderr, "checking") as on_done:
        outcomes = measure(path, lock_file, on_done=on_done, **options.given(given))
    for line in check_report.error_lines(outcomes):
        click.echo(f"fitter: {line}", err=True)
    if as_json:
        answers.print_json(check_report.check_to_dict(outcomes))
    elif as_markdown:
        click.echo(check_report.markdown(outcomes), nl=False)
    else:
        check_report.print_check(sys.stdout, outcomes, verbose=bool(verbose))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        # GitHub reads them from stderr as well, and stdout may be a document.
        for line in check_report.github_annotations(outcomes, path):
            click.echo(line, err=True)
    if junit is not None:
        # Last: if it cannot be written, everything else has been printed.
        sys.stdout.flush()
        check_report.write_junit(junit, outcomes)
    if page_file is not None:
        sys.stdout.flush()
        answers.write_file(page_file, check_report.page(outcomes))
    return check_report.exit_status(outcomes)


_FLEET_EPILOG = """\
fitter.toml has the models as cases, and [fleet] what they need:
  [cases.chat]
  model = "chat.gguf"
  [fleet.models.chat]
  share = 3
  resident = true

Exit status: 0 planned, 1 the models do not fit, 2 usage error, 3 a model cannot be read or llama.cpp failed, 5 the
result cannot be written.
"""


@click.command(cls=options.Command, epilog=_FLEET_EPILOG)
@options.fleet_options
@options.json_option
@options.verbose_option
def fleet(
    cases_file: Path | None,
    output_format: str | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Plan several models on one machine: which are in memory together, and what makes room for what.

    The cases of fitter.toml are the models, and [fleet] says what they need: shares of the requests, or a log to count
    them from; which always stay; which may be evicted; which never go together. Each gets one plan, with which every
    set of models that can be in memory is within the margins.
    """
    from fitter.regression.cases import CASES_FILE
    from fitter.regression.fleets import fleet as plan

    words = options.given(given)
    with answers.counted(sys.stderr, "planning") as on_step:
        planned = plan(cases_file or CASES_FILE, on_step=on_step if verbose >= 0 else None, **words)
    for problem in planned.problems:
        click.echo(f"fitter: does not fit: {problem}", err=True)
    if as_json:
        from fitter.output.documents.deployment_documents import FLEET

        answers.print_json(FLEET.write(planned))
    elif planned.fits and output_format:
        from fitter.output.formats import render_fleet

        click.echo(render_fleet(planned, output_format))
    elif planned.fits:
        from fitter.output.tables.fleet_table import fleet_table

        answers.print_table(fleet_table(planned, verbose=verbose > 0))
    return EXIT_FITS if planned.fits else EXIT_DOES_NOT_FIT
