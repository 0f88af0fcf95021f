"""``fitter calibrate``: compare real devices with their virtual twins."""

from __future__ import annotations

from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FITS, EXIT_REGRESSION
from fitter.parameters.table import DEVICES

_EPILOG = """\
Exit status: 0 all bytes agree, 2 usage error, 3 no GPU here or llama.cpp failed, 4 bytes differ, 5 the result cannot be
written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
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
