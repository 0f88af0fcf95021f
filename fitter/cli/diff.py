"""``fitter diff``: the differences between two plans."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, EXIT_REGRESSION

_EPILOG = """\
Exit status: 0 the plans are the same, 2 usage error, 4 they differ, 5 the result cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@options.json_option
def diff(a: Path, b: Path, as_json: bool | None) -> int:
    """Compare the plans in the files A and B, written by 'fitter --json'.

    This compares the memory of each device and of the host, the estimated speed, the parameters, the devices and the
    model. It ignores the model's path and the duration of the search.
    """
    from fitter.regression import plans, report

    found = plans.diff(plans.read_plan(a), plans.read_plan(b))
    if as_json:
        from fitter.output import json

        click.echo(json.dumps(report.diff_to_dict(found)))
    else:
        report.print_diff(sys.stdout, found)
    return EXIT_FITS if found.is_empty else EXIT_REGRESSION
