"""``fitter devices``: what there is to plan with."""

from __future__ import annotations

import sys
from typing import Any

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS


@click.command(cls=options.Command, short_help="What there is to plan with.")
@options.gpu_option
@options.json_option
def devices(as_json: bool | None, **given: Any) -> int:
    """Show the devices that llama.cpp would use, with their memory, and the host."""
    from fitter import api
    from fitter.output import json, table

    found, host = api.devices(**options.given(given))
    if as_json:
        click.echo(json.dumps(json.devices_to_dict(found, host)))
    else:
        table.print_to(sys.stdout, table.devices_table(found, host))
    return EXIT_FITS
