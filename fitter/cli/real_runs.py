"""``fitter verify``, ``tune`` and ``calibrate``: load models for real, and compare or keep what they took."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, llama_options, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, EXIT_REGRESSION, UsageError
from fitter.parameters.table import DEVICES, PARAMETERS
from fitter.planning.checked.tuning import MINUTES

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


_TUNE_EPILOG = """\
Examples:
  fitter tune model.gguf                                 the llama-server on the PATH, one user's requests
  fitter tune model.gguf --workload agent --users 4 --minutes 30
  fitter tune model.gguf --export runs.json              what was measured, for another machine like this one
  fitter tune --import runs.json                         use what was measured there

Exit status: 0 tuned, or rows written or read, 1 the plan does not fit, 2 usage error, 3 the model cannot be read or
llama.cpp failed, 5 the result cannot be written.
"""


@click.command(cls=llama_options.Command, epilog=_TUNE_EPILOG)
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


_CALIBRATE_EPILOG = """\
Exit status: 0 all bytes agree, 2 usage error, 3 no GPU here or llama.cpp failed, 4 bytes differ, 5 the result cannot be
written.
"""


@click.command(cls=options.Command, epilog=_CALIBRATE_EPILOG)
@options.optional_model_argument
@options.parameter("devices", section=DEVICES, help="Devices to calibrate. [default: all]")
@options.rpc_option
@options.grid_option(
    DEVICES,
    "twin",
    "--twin",
    metavar="PROFILE",
    help="Profile of the virtual twins, such as cuda:8.6. [default: that of each device's backend]",
)
@options.grid_option(
    DEVICES,
    "no_store",
    "--no-store",
    is_flag=True,
    help="Do not store the measurements, which set the default margin.",
)
@options.llama_cpp_option
@options.timeout_option
@options.json_option
@options.verbose_option
def calibrate(model: str | None, as_json: bool | None, verbose: int, no_store: bool | None, **given: Any) -> int:
    """Compare this machine's devices with their virtual twins, and measure what llama.cpp does not count.

    Small built-in models, or MODEL, are loaded without allocating in many configurations, once on each device and once
    on a virtual device of the same name and memory. Every byte count that differs is shown. The small models are then
    loaded for real. The memory that this takes beyond llama.cpp's own count is stored, and sets the default margin for
    such a device: the stored size plus 512 MiB, at least 1024 MiB.
    """
    from fitter import api

    with answers.asking(verbose, is_long=True) as callbacks:
        calibration = api.calibrate(model, store=not no_store, **callbacks, **options.given(given))
    for device in calibration.devices:
        if device.twin is None:
            why = f"fitter has no profile for this {device.info.backend} device; choose one, such as --twin cuda:8.6"
            click.echo(f"fitter: warning: {device.info.name} cannot be compared: {why}", err=True)
    if as_json:
        from fitter.output.documents.checked_documents import CALIBRATION

        answers.print_json(CALIBRATION.write(calibration))
    else:
        from fitter.output.tables.checked_tables import calibration_table

        answers.print_table(calibration_table(calibration))
    return EXIT_FITS if calibration.is_exact else EXIT_REGRESSION
