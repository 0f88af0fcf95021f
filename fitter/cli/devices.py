"""``fitter devices``: the devices and the host that a plan can use."""

from __future__ import annotations

from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FITS, UsageError


@click.command(cls=options.Command)
@options.gpu_option
@options.rpc_option
@options.llama_cpp_option
@options.timeout_option
@options.catalogue_option
@options.json_option
def devices(as_json: bool | None, catalogue: bool | None, **given: Any) -> int:
    """Show the devices that llama.cpp would use, with their memory, and the host.

    With --catalogue, list the GPUs that --gpu knows by name instead, with the source of each figure.
    """
    if catalogue:
        if given["gpus"] or given["rpc"]:
            raise UsageError(
                "--catalogue lists all GPUs that --gpu knows, and takes neither --gpu nor --rpc: leave them out"
            )
        return _catalogue(as_json)
    from fitter import api

    writer = "fitter.output.documents.listing_documents" if as_json else "fitter.output.tables.plan_table"
    options.import_meanwhile(writer)
    infos, host = api.devices(**options.given(given))
    if as_json:
        from fitter.output.documents.listing_documents import DEVICES, Devices

        answers.print_json(DEVICES.write(Devices(infos, host)))
    else:
        from fitter.output.tables import plan_table

        answers.print_table(plan_table.devices_table(infos, host))
    if not (given["gpus"] or given["rpc"]):
        from fitter.api.device_calls import why_no_gpu

        if problem := why_no_gpu(infos, given["llama_cpp"]):
            click.echo(f"fitter: warning: {problem}", err=True)
    return EXIT_FITS


def _catalogue(as_json: bool | None) -> int:
    from fitter.machine import gpu_catalogue as catalogue
    from fitter.output.documents.listing_documents import CATALOGUE, Catalogue
    from fitter.output.tables import plan_table

    gpus = catalogue.gpus().values()
    if as_json:
        answers.print_json(CATALOGUE.write(Catalogue(tuple(gpus))))
    else:
        answers.print_table(plan_table.catalogue_table(gpus))
    return EXIT_FITS
