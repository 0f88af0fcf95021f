"""``fitter calibrate``: real devices against their virtual twins."""

from __future__ import annotations

import sys
from typing import Any

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, EXIT_REGRESSION

_EPILOG = """\
Exit status: 0 no byte differs, 2 usage, 3 no GPU here or llama.cpp failed, 4 a byte differs, 5 the answer cannot be
written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.optional_model_argument
@options.calibration_options
@options.timeout_option
@options.json_option
@options.verbose_option
def calibrate(model: str | None, as_json: bool | None, verbose: int, no_store: bool | None, **given: Any) -> int:
    """Compare this machine's devices with their virtual twins, and measure what llama.cpp does not count.

    Small models of several kinds, or MODEL, are loaded without allocating in many configurations, on each device and
    on a virtual one of the same name and memory: every number of bytes that differs is shown. The small ones are then
    loaded for real. What that takes of a device beyond llama.cpp's own bytes is kept, and from then on decides the
    default margin on such a device: it and 512 MiB, 1024 MiB at least.
    """
    from fitter import api
    from fitter.output import json, progress, table

    with progress.progress(sys.stderr, every_step=verbose > 0) as on_progress:
        on_log = options.log_line if verbose > 1 else None
        found = api.calibrate(model, store=not no_store, on_progress=on_progress, on_log=on_log, **options.given(given))
    for device in found.devices:
        if device.twin is None:
            why = f"there is no profile for this {device.info.backend} device; name one, such as --twin cuda:8.6"
            click.echo(f"fitter: warning: {device.info.name} cannot be compared: {why}", err=True)
    if as_json:
        click.echo(json.dumps(json.calibration_to_dict(found)))
    else:
        table.print_to(sys.stdout, table.calibration_table(found))
    return EXIT_FITS if found.is_exact else EXIT_REGRESSION
