"""``fitter check``: fail where a case takes more than was locked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import options

_EPILOG = """\
-k takes parts of names, combined with and, or, not and parentheses:
  fitter check -k "chat and not q8_0"

Exit status: 0 within the limits, 2 usage, or a case is not in the lock or only there, 3 a case cannot be measured,
4 a case takes more than it may, 5 the answer cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.regression_options
@options.selection_option
@options.report_options
@options.json_option
def check(
    cases_file: Path | None,
    lock_file: Path | None,
    as_json: bool | None,
    as_markdown: bool | None,
    junit: Path | None,
    verbose: bool | None,
    **given: Any,
) -> int:
    """Measure every case of fitter.toml again, and compare with fitter.lock.

    A case fails where a device or the host takes more than max_growth allows, where the plan no longer fits, has a
    shorter context or more weights on the host, where its estimated speed is below what max_slowdown allows (2 %), or
    where it is beyond its budget. What has changed is said as well: settings, devices, the model's header, llama.cpp,
    fitter. A case that is not in fitter.lock yet, or only there, is named beside those that were measured.
    """
    from fitter.output.progress import counted
    from fitter.regression import report
    from fitter.regression.cases import CASES_FILE
    from fitter.regression.check import check as measure

    path = cases_file or Path(CASES_FILE)
    with counted(sys.stderr, "checking") as on_done:
        outcomes = measure(path, lock_file, on_done=on_done, **options.given(given))
    for line in report.error_lines(outcomes):
        click.echo(f"fitter: {line}", err=True)
    if as_json:
        from fitter.output import json

        click.echo(json.dumps(report.check_to_dict(outcomes)))
    elif as_markdown:
        click.echo(report.markdown(outcomes), nl=False)
    else:
        report.print_check(sys.stdout, outcomes, verbose=bool(verbose))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        # GitHub reads them from stderr as well, and stdout may be a document.
        for line in report.github_annotations(outcomes, path):
            click.echo(line, err=True)
    if junit is not None:
        # Last: where it cannot be written, the rest has been said.
        sys.stdout.flush()
        report.write_junit(junit, outcomes)
    return report.exit_status(outcomes)
