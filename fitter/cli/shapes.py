"""``fitter shapes``: list the models that can be planned without a file."""

from __future__ import annotations

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FITS

_EPILOG = """\
Examples:
  fitter shapes                    all of them
  fitter shapes qwen3 moe          those whose name, title or architecture has both words
  fitter shapes llama-3.1-70b      one of them, with its source and its hyperparameters
  fitter --shape llama-3.1-70b:Q5_K_M --gpu "2x rtx-4090"
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@options.json_option
def shapes(words: tuple[str, ...], as_json: bool | None) -> int:
    """List the models that --shape knows, or those that have each WORD in their name, title or architecture.

    A shape is what is published of a model's dimensions. Its header is written from them, and llama.cpp plans on that
    as on the file that would be downloaded.
    """
    from fitter.model.shapes import listing
    from fitter.output.documents.shape_document import SHAPES, Shapes
    from fitter.output.tables import shapes_table as output

    infos = listing.shapes(*words)
    if as_json:
        answers.print_json(SHAPES.write(Shapes(tuple(infos))))
    else:
        answers.print_table(output.shapes_table(infos))
    return EXIT_FITS
