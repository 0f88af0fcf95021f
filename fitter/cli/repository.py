"""``fitter hf://org/repo``: ``fitter fit`` for a repository or a directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fitter.cli import answers, llama_options, options
from fitter.errors import UsageError


def fit(
    model: str,
    types: tuple[str, ...] | None,
    tokens_per_second: float | None,
    output_format: str | None,
    anyway: bool | None,
    verbose: int,
    given: Mapping[str, Any],
) -> int:
    """Plan every model of the repository at ``model``, and print a table to stdout; return the exit status."""
    if output_format not in (None, "json"):
        raise UsageError(f"--format {output_format} is for one model: name a file of {model}, or leave it out")
    if anyway:
        raise UsageError(f"--anyway is for one model: name a file of {model}, or leave it out")
    from fitter import programs
    from fitter.api import plan_repository

    given = {**given, "program": given["program"] or programs.chosen("llama-server")}
    options.import_meanwhile("fitter.output.tables.plan_table")
    with answers.asking(verbose, is_long=True) as callbacks:
        planned = plan_repository.repository(
            model, types=types, tokens_per_second=tokens_per_second, **callbacks, **options.given(given)
        )
    llama_options.report_ignored(llama_options.used().names, "the table contains only the plans")
    return answers.print_plans(planned, "repository_table", as_json=output_format == "json", verbose=verbose)
