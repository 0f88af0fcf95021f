"""``fitter quants`` and ``fitter hf://org/repo``: plan a model in every file type, or every file of a repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fitter.cli import answers, llama_options, options
from fitter.errors import UsageError

_EPILOG = """\
Examples:
  fitter quants model-BF16.gguf --gpu rtx-4090
  fitter quants model-BF16.gguf --gpu rtx-3060 -c 32768 --type Q4_K_M,Q5_K_M --type IQ4_XS
  fitter quants model-BF16.gguf --gpu rtx-3060 --tokens-per-second 20

Exit status: 0 a file type fits, 1 none fits, 2 usage error, 3 the model cannot be read or llama.cpp failed.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.model_argument
@options.quantization_options
@options.fitting_options()
@options.json_option
@options.verbose_option
def quants(
    model: str,
    types: tuple[str, ...] | None,
    tokens_per_second: float | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Plan MODEL in every file type that llama-quantize makes of it, before any of the files exists.

    One header is read: best that of the BF16 or F16 file, but any file of the model will do. llama.cpp's own rule says
    which tensor gets which type, and every row of the table is a plan that llama.cpp has measured. Marked as the best
    is the file type with the most bits per weight that generates text fast enough to be useful (--tokens-per-second);
    its arguments for llama-server and similar programs are the last line.
    """
    from fitter import programs
    from fitter.api import quantizations

    given["program"] = given["program"] or programs.chosen("llama-server")
    options.import_meanwhile("fitter.output.tables.plan_table")
    with answers.asking(verbose, is_long=True) as callbacks:
        quantized = quantizations.quants(
            model, types=types, tokens_per_second=tokens_per_second, **callbacks, **options.given(given)
        )
    return answers.print_plans(quantized, "quantizations", as_json=as_json, verbose=verbose)


def repository(
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
    return answers.print_plans(planned, "repository", as_json=output_format == "json", verbose=verbose)
