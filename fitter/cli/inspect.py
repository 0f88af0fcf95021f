"""``fitter inspect``: show a model's metadata, tensors and layers."""

from __future__ import annotations

from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FITS


@click.command(cls=options.Command)
@options.model_argument
@options.parameter("n_ctx", help="Context in tokens; 0 is the model's own. [default: the model's own]")
@options.llama_cpp_option
@options.timeout_option
@options.json_option
def inspect(model: str, as_json: bool | None, **given: Any) -> int:
    """Show MODEL's metadata, its tensors by role, and the bytes of weights and KV cache in each layer.

    KV cache and compute buffers are measured for a context of -c tokens, with everything in host memory.
    """
    from fitter import api

    writer = "fitter.output.documents.inspection_document" if as_json else "fitter.output.tables.plan_table"
    options.import_meanwhile(writer)
    with answers.asking() as callbacks:
        inspection = api.inspect(model, on_progress=callbacks["on_progress"], **options.given(given))
    if as_json:
        from fitter.output.documents.inspection_document import INSPECTION

        answers.print_json(INSPECTION.write(inspection))
    else:
        from fitter.output.tables import plan_table

        answers.print_table(plan_table.inspection_table(inspection))
    return EXIT_FITS
