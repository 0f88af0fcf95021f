"""``fitter shapes``: list the models that can be planned without a file, or the best of them for a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, UsageError
from fitter.parameters.table import PARAMETERS

_EPILOG = """\
Examples:
  fitter shapes                    all of them
  fitter shapes qwen3 moe          those whose name, title or architecture has both words
  fitter shapes llama-3.1-70b      one of them, with its source and its hyperparameters
  fitter shapes --gpu rtx-4060     the strongest that run well on a card; also: fitter --gpu rtx-4060
  fitter shapes --gpu "2x rtx-3090" --tokens-per-second 30 --fit-ctx 32k
  fitter --shape llama-3.1-70b:Q5_K_M --gpu "2x rtx-4090"

Exit status with --gpu: 0 a model runs well there, 1 none does.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@options.best_shapes_options
@options.fitting_options()
@options.json_option
@options.verbose_option
def shapes(
    words: tuple[str, ...],
    most: int | None,
    tokens_per_second: float | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """List the models that --shape knows, or those that have each WORD in their name, title or architecture.

    A shape is what is published of a model's dimensions. Its header is written from them, and llama.cpp plans on that
    as on the file that would be downloaded.

    With --gpu, the strongest of them for that machine are listed: those with the most weights that generate at a useful
    speed (--tokens-per-second) with a useful context (--fit-ctx), each in its best file type.
    """
    if given["gpus"] is not None:
        return plan(words, given, as_json=as_json, verbose=verbose, most=most, tokens_per_second=tokens_per_second)
    asked = {**given, "most": most, "tokens_per_second": tokens_per_second}
    if used := next((name for name, value in asked.items() if value is not None), None):
        option = f"--{used}".replace("_", "-") if used not in PARAMETERS else f"--{PARAMETERS[used].long}"
        raise UsageError(f"{option} is for plans on a machine: name one with --gpu, or leave it out")
    from fitter.model.shapes.catalogue import shapes
    from fitter.output.documents.listing_documents import SHAPES, Shapes
    from fitter.output.tables import listing_tables as output

    infos = shapes(*words)
    if as_json:
        answers.print_json(SHAPES.write(Shapes(tuple(infos))))
    else:
        answers.print_table(output.shapes_table(infos))
    return EXIT_FITS


def plan(
    words: Sequence[str],
    given: Mapping[str, Any],
    *,
    as_json: bool | None,
    verbose: int,
    most: int | None = None,
    tokens_per_second: float | None = None,
) -> int:
    """Print the strongest shapes for a machine; return the exit status."""
    from fitter import programs
    from fitter.api import quantizations
    from fitter.output.tables import listing_tables as output

    named = options.given({**given, "program": given["program"] or programs.chosen("llama-server")})
    limits = options.given({"most": most, "tokens_per_second": tokens_per_second})
    with answers.asking(verbose, is_long=True) as callbacks:
        found = quantizations.best_shapes(words, **limits, **callbacks, **named)
    if as_json:
        answers.print_json(found.to_dict())
    else:
        asked = [word for gpu in given["gpus"] for word in ("--gpu", gpu)]
        answers.print_table(output.plans_table(found, asked))
    return EXIT_FITS if found.fits else EXIT_DOES_NOT_FIT
