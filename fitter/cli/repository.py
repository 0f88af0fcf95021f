"""``fitter hf://org/repo``: what ``fitter fit`` does with a repository, or with a directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from fitter.cli import llama_options, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, UsageError


def fit(
    model: str,
    types: tuple[str, ...] | None,
    tokens_per_second: float | None,
    output_format: str | None,
    anyway: bool | None,
    verbose: int,
    given: Mapping[str, Any],
) -> int:
    """Plan every model of the repository at ``model``, and print a table to stdout; returns the exit status."""
    if output_format not in (None, "json"):
        raise UsageError(f"--format {output_format} is for one model: name a file of {model}, or leave it out")
    if anyway:
        raise UsageError(f"--anyway is for one model: name a file of {model}, or leave it out")
    from fitter import programs
    from fitter.api import plan_repository
    from fitter.output import progress

    given = {**given, "program": given["program"] or programs.chosen("llama-server")}
    options.import_meanwhile("fitter.output.tables.plan_table", is_long=True)
    with progress.progress(sys.stderr, every_step=verbose > 0) as on_progress:
        found = plan_repository.repository(
            model,
            types=types,
            tokens_per_second=tokens_per_second,
            on_progress=on_progress,
            on_log=options.log_line if verbose > 1 else None,
            **options.given(given),
        )
    llama_options.report_ignored(llama_options.used().names, "the table contains only the plans")
    if output_format == "json":
        from fitter.output.documents.document import dumps

        click.echo(dumps(found.to_dict()))
    else:
        from fitter.output.tables import plan_table
        from fitter.output.tables import repository_table as output

        plan_table.print_to(sys.stdout, output.repository_table(found, verbose=verbose > 0))
        for line in output.commands(found):
            click.echo(line)
    return EXIT_FITS if found.fits else EXIT_DOES_NOT_FIT
