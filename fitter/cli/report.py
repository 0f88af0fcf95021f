"""``fitter report``: write a plan as an HTML page or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, UsageError
from fitter.parameters.table import PARAMETERS

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan

_EPILOG = """\
Examples:
  fitter report model.gguf -o report.html
  fitter report model.gguf -o - | ssh host 'cat > report.html'
  fitter report model.gguf --gpu rtx-4090 --svg plan.svg
  fitter model.gguf --json > plan.json && fitter report plan.json -o report.html

Exit status: 0 fits, 1 does not fit, which the report shows, 2 usage error, 3 the model cannot be read or llama.cpp
failed, or a package is missing for reports, 5 the report cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.model_argument
@options.fitting_options()
@options.page_options
@options.verbose_option
def report(
    model: str,
    page_file: Path | None,
    svg_file: Path | None,
    no_contexts: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Plan MODEL as fitter fit does, or read a plan that fitter --json wrote, and write a report of it.

    It is one page that needs no network: the memory of each device, where each layer is, what other contexts would
    take, what was chosen over what, how far the plan is from the best that it could be, and the arguments for each
    program. A plan that does not fit has one too, which shows what lacks where.

    A plan from a file has no other contexts, since the file does not say what was asked for.
    """
    if page_file is None and svg_file is None:
        raise UsageError("there is nothing to write: give -o report.html, or --svg plan.svg")
    answers.check_files({"-o": page_file, "--svg": svg_file}, model, may_print=True)
    words = options.given(given)
    # the address of a model's config.json ends with .json too
    if model.lower().endswith(".json") and "://" not in model:
        plan = _read_plan(model, words)
        where = None
    else:
        plan, where = _fit_model(model, words, verbose), model
    answers.report_problems(plan.problems)
    with_contexts = not no_contexts and page_file is not None
    write(plan, where, page_file, svg_file, with_contexts=with_contexts, verbose=verbose)
    for file in (page_file, svg_file):
        if file not in (None, answers.STDOUT) and verbose >= 0:
            click.echo(f"fitter: wrote {file}", err=True)
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _read_plan(file: str, words: dict[str, Any]) -> Plan:
    from fitter.output.documents.plan_document import read_plan

    if words:
        listed = ", ".join(f"--{PARAMETERS[name].long}" for name in words)
        raise UsageError(f"{file} already sets every parameter: leave {listed} out, or give a model")
    return read_plan(file)


def _fit_model(model: str, words: dict[str, Any], verbose: int) -> Plan:
    from fitter import api, programs

    words.setdefault("program", programs.unless_named("llama-server"))
    with answers.asking(verbose) as callbacks:
        return api.fit(model, **callbacks, **words)


def write(
    plan: Plan,
    model: str | None,
    page_file: Path | None = None,
    svg_file: Path | None = None,
    *,
    with_contexts: bool = True,
    verbose: int = 0,
) -> None:
    """Write the page of ``plan``, its picture, or both. Raises ``AnswerError`` and ``LibraryError``."""
    from fitter.api.report_plan import beside
    from fitter.output.pages import report_page as pages

    with answers.asking(min(verbose, 0)) as callbacks:
        extras = beside(plan, model, with_contexts=with_contexts, on_progress=callbacks["on_progress"])
    if page_file is not None:
        answers.write_file(page_file, pages.plan_page(plan, extras.layer_map, extras.contexts, extras.notes))
    if svg_file is not None:
        answers.write_file(svg_file, pages.plan_picture(plan.to_dict(), plan.model.name, extras.layer_map))
