"""``fitter fleet``: plan several models on one machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS

_EPILOG = """\
fitter.toml has the models as cases, and [fleet] what they need:
  [cases.chat]
  model = "chat.gguf"
  [fleet.models.chat]
  share = 3
  resident = true

Exit status: 0 planned, 1 the models do not fit, 2 usage error, 3 a model cannot be read or llama.cpp failed, 5 the
result cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
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
