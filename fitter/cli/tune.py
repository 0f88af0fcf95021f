"""``fitter tune``: run a plan and changes of it for real, and keep the quickest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, llama_options, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS
from fitter.planning.checked.tuning import MINUTES

_EPILOG = """\
Examples:
  fitter tune model.gguf                                 the llama-server on the PATH, one user's requests
  fitter tune model.gguf --workload agent --users 4 --minutes 30
  fitter tune model.gguf --export runs.json              what was measured, for another machine like this one
  fitter tune --import runs.json                         use what was measured there

Exit status: 0 tuned, or rows written or read, 1 the plan does not fit, 2 usage error, 3 the model cannot be read or
llama.cpp failed, 5 the result cannot be written.
"""


@click.command(cls=llama_options.Command, epilog=_EPILOG)
@options.optional_model_argument
@options.fitting_options()
@options.tuning_options
@options.json_option
@options.verbose_option
def tune(
    model: str | None,
    minutes: float | None,
    server: str | None,
    export: Path | None,
    imported: Path | None,
    no_store: bool | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Run a plan of MODEL for real, with other threads, batches, load modes and so on, and keep the quickest.

    A llama-server gets the turns of --workload and --users, without gaps, or one user's requests. A change stays if it
    is quicker beyond noise. What was measured is stored for this machine and this llama.cpp: later plans estimate with
    it.
    """
    words = options.given(given)
    llama_options.report_ignored(llama_options.used().names)
    from fitter.api.real_runs import tune_plan

    if imported is not None:
        path, count = tune_plan.import_rows(imported)
        click.echo(f"runs read into {path}: {count}", err=bool(as_json))
    if model is None:
        if imported is None and export is None:
            from fitter.errors import UsageError

            raise UsageError("there is nothing to tune: give a model, or --import or --export with a file")
    else:
        with answers.asking(verbose, is_long=True) as callbacks:
            tuning = tune_plan.tune(
                model,
                minutes=MINUTES if minutes is None else minutes,
                server=server,
                store=not no_store,
                **callbacks,
                **words,
            )
        answers.report_problems(tuning.plan.problems)
        if as_json:
            from fitter.output.documents.checked_documents import TUNING

            answers.print_json(TUNING.write(tuning))
        elif tuning.plan.fits:
            from fitter.output.tables.checked_tables import tuning_table

            answers.print_table(tuning_table(tuning))
            click.echo(tune_plan.command_line(tuning))
        if not tuning.plan.fits:
            return EXIT_DOES_NOT_FIT
    if export is not None:
        count = tune_plan.export_rows(export)
        click.echo(f"runs written to {export}: {count}", err=bool(as_json))
    return EXIT_FITS
