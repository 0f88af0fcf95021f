"""``fitter verify``: load a plan for real, and compare its memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, llama_options, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, EXIT_REGRESSION, UsageError
from fitter.parameters.table import PARAMETERS

_EPILOG = """\
Examples:
  fitter verify model.gguf -c 32768
  fitter model.gguf --json > plan.json && fitter verify --plan plan.json
  fitter verify model.gguf --for llama-server    starts the llama-server on the PATH, and sends it prompts

Exit status: 0 it takes the predicted bytes, or fewer, 1 it does not fit and was not loaded, 2 usage error, 3 the model
cannot be read or llama.cpp failed, 4 it takes more than predicted, 5 the result cannot be written.
"""

_WITH_PLAN = ("timeout", "llama_cpp", "program")


@click.command(cls=llama_options.Command, epilog=_EPILOG)
@options.optional_model_argument
@options.fitting_options()
@options.verification_options
@options.page_option
@options.json_option
@options.verbose_option
def verify(
    model: str | None,
    plan: str | None,
    tolerance: str | None,
    server: str | None,
    prompts: int | None,
    page_file: Path | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Fit MODEL, or read a plan with --plan, load it for real, and compare the real bytes with the predicted ones.

    The model is loaded in a separate process, without mmap, and computes a full micro batch of prompt tokens and a few
    single tokens. The table shows the bytes of each buffer type, and each device's free memory before and after. What
    llama.cpp does not count is shown as unaccounted: kernels, work spaces of libraries, other programs.

    With --for llama-server, a llama-server loads it, with the plan's arguments and on a free port of this machine, and
    is sent prompts. What its log says of buffers, context checkpoints and prompt cache is shown beside the plan, and
    what its process has in memory.
    """
    words = options.given(given)
    llama_cpp_options = llama_options.used()
    llama_options.report_ignored((*llama_cpp_options.names, *llama_cpp_options.ignored))
    if model is None and plan is None:
        raise UsageError("there is nothing to verify: give a model, or a plan with --plan")
    if plan is not None and (others := sorted(words.keys() - _WITH_PLAN)):
        listed = ", ".join(f"--{PARAMETERS[other].long}" for other in others)
        raise UsageError(f"--plan already sets every parameter: leave {listed} out, or fit again with it")
    if page_file is not None:
        answers.check_files({"--report": page_file}, model, plan)
    from fitter import api

    with answers.asking(verbose, is_long=True) as callbacks:
        verification = api.verify(
            model, plan=plan, tolerance=tolerance or 0, server=server, prompts=prompts, **callbacks, **words
        )
    answers.report_problems(verification.problems)
    if as_json:
        from fitter.output.documents.checked_documents import VERIFICATION

        answers.print_json(VERIFICATION.write(verification))
    elif verification.fits:
        from fitter.output.tables.checked_tables import verification_table

        answers.print_table(verification_table(verification))
    if page_file is not None:
        from fitter.output.pages.verification_page import verification_page

        sys.stdout.flush()
        answers.write_file(page_file, verification_page(verification))
    if not verification.fits:
        return EXIT_DOES_NOT_FIT
    return EXIT_FITS if verification.holds else EXIT_REGRESSION
