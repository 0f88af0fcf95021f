"""``fitter check``: fail if a case takes more memory than its lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, options

_EPILOG = """\
-k takes parts of names, combined with and, or, not and parentheses:
  fitter check -k "chat and not q8_0"

Exit status: 0 within the limits, 2 usage error, or a case is only in fitter.toml or only in the lock, 3 a case cannot
be measured, 4 a case exceeds its limits, 5 the result cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
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
