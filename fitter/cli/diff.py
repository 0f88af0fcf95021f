"""``fitter diff``: what differs between two plans."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, EXIT_REGRESSION

_EPILOG = """\
Exit status: 0 the plans say the same, 2 usage, 4 they do not, 5 the answer cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@options.json_option
def diff(a: Path, b: Path, as_json: bool | None) -> int:
    """Compare the plans A and B, files that 'fitter --json' wrote.

    The comparison is of the memory of each device and of the host, the estimated speed, parameters, devices and the
    model. Where the model is and how long the search took do not matter.
    """
    from fitter.regression import plans, report

    found = plans.diff(plans.read_plan(a), plans.read_plan(b))
    if as_json:
        from fitter.output import json

        click.echo(json.dumps(report.diff_to_dict(found)))
    else:
        report.print_diff(sys.stdout, found)
    return EXIT_FITS if found.is_empty else EXIT_REGRESSION
