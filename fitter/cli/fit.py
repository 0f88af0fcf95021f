"""``fitter fit``: find the parameters that fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitter.cli import answers, llama_options, options
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS, UsageError
from fitter.model import location
from fitter.model.shapes import catalogue
from fitter.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.planning.plan.plan import Plan

_EPILOG = """\
Examples:
  fitter --shape gpt-oss-120b --gpu rtx-4090
  args=$(fitter model.gguf --format shell) && eval "llama-server -m model.gguf $args"
  fitter -m model.gguf -t 8 --port 8080    other options of llama-server are passed on
  fitter model.gguf --gpu "2x rtx-3090" --host-memory 64GiB -c 32768 -ctk q8_0 -ctv q8_0
  fitter hf://org/repo --gpu rtx-4090      every model of a repository

Exit status: 0 fits, 1 does not fit, 2 usage error, 3 the model cannot be read or llama.cpp failed,
5 the result cannot be written.
"""


_FOR_SERVER = (None, "args", "shell", "ini")
"""Formats that llama-server reads."""
_PASSING_ON = ("args", "shell")
"""Formats that contain llama.cpp's other options as well."""


@click.command(cls=llama_options.Command, epilog=_EPILOG)
@options.model_or_machine
@options.repository_options
@options.fitting_options()
@options.json_option
@options.format_option
@options.anyway_option
@options.alternatives_option
@options.page_option
@options.verbose_option
def fit(
    model: str | None,
    types: tuple[str, ...] | None,
    tokens_per_second: float | None,
    as_json: bool | None,
    output_format: str | None,
    anyway: bool | None,
    alternatives: bool | None,
    page_file: Path | None,
    verbose: int,
    **given: Any,
) -> int:
    """Find the llama.cpp parameters that run MODEL fastest in the free memory of every device and of the host.

    A terminal gets the command that starts the program with them. Into a pipe or a file goes one line of arguments for
    llama-server, llama-cli and similar programs, or what is chosen with --format. A table of the memory that they take
    goes to stderr; llama.cpp itself measured every number in it, by loading the model without allocating. If MODEL does
    not fit, stdout stays empty, except with --json or --anyway.

    MODEL may be a repository of Hugging Face's hub, hf://org/repo, or a directory: every model in it is planned, a
    table of the plans goes to stdout, and its last lines say what to download and how to run the best one. Without
    MODEL, --gpu lists the strongest models for that machine, as fitter shapes does.
    """
    if model is None:
        return _shapes(given, tokens_per_second, as_json=as_json or output_format == "json", verbose=verbose)
    if as_json and output_format not in (None, "json"):
        raise UsageError(f"--json means --format json, but --format {output_format} is given too: leave one out")
    if location.is_repository(model):
        if page_file is not None:
            raise UsageError(f"--report shows the plan of one model, and {model} has several: name one of its files")
        from fitter.cli import quants

        wanted = "json" if as_json else output_format
        return quants.repository(model, types, tokens_per_second, wanted, anyway, verbose, given)
    for value, option in ((types, "--type"), (tokens_per_second, "--tokens-per-second")):
        if value is not None:
            shape, more = catalogue.wanted(model), ""
            if types and shape:
                typed = shape.of_type(catalogue.type_name(types[0]))
                more = f": write --{typed.shown.replace('://', ' ')}"
            raise UsageError(f"{option} chooses among the models of a repository, and {model} is one model{more}")
    if page_file is not None:
        answers.check_files({"--report": page_file}, model)
    output_format = "json" if as_json else output_format or _own_format(given["program"])
    # programs that read JSON ask for more than one plan by themselves
    is_wanted = output_format != "json" and verbose >= 0 if alternatives is None else alternatives
    plan = _fit_model(model, output_format or "args", verbose, is_wanted, given)
    if verbose >= 0:
        from fitter.output.tables import plan_table

        drawn = plan_table.plan_table(plan, verbose=verbose > 0)
        plan_table.print_to(sys.stderr, _with_picture(drawn, plan, model) if verbose else drawn)
    answers.report_problems(plan.problems)
    _print(plan, output_format, anyway, is_quiet=verbose < 0)
    if output_format in _FOR_SERVER and plan.fits and verbose >= 0:
        _warn_of_other_server(plan)
    if page_file is not None:
        from fitter.cli.report import write

        # Last: if it cannot be written, everything else has been printed.
        sys.stdout.flush()
        write(plan, model, page_file, verbose=verbose)
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _own_format(program: str | None) -> str | None:
    from fitter import programs

    return programs.own_format(program)


def _shapes(given: Mapping[str, Any], tokens_per_second: float | None, *, as_json: bool, verbose: int) -> int:
    """Without a model, list those that run well on the described machine; return the exit status."""
    if given["gpus"] is None:
        raise click.UsageError(
            "no model is given: name a file, an address or a shape ('fitter shapes' lists them), or a machine with "
            "--gpu to see the strongest models for it"
        )
    from fitter.cli import shapes

    return shapes.plan((), given, as_json=as_json, verbose=verbose, tokens_per_second=tokens_per_second)


def _fit_model(model: str, output_format: str, verbose: int, alternatives: bool, given: dict[str, Any]) -> Plan:
    from fitter import api, programs

    given["program"] = programs.for_format(output_format, given["program"])
    options.import_meanwhile("fitter.output.tables.plan_table")
    with answers.asking(verbose) as callbacks:
        return api.fit(model, alternatives=alternatives, **callbacks, **options.given(given))


def _print(plan: Plan, wanted_format: str | None, anyway: bool | None, *, is_quiet: bool) -> None:
    """Print ``plan`` to stdout in a format, with llama.cpp's other options where the format has them.

    A person at a terminal who asks for no format gets the whole command.
    """
    from fitter.output import arguments, formats

    others = llama_options.used()
    output_format = wanted_format or "args"
    passes_on = output_format in _PASSING_ON
    if not is_quiet:
        llama_options.report_ignored(others.ignored)
    if not passes_on and not is_quiet:
        llama_options.report_ignored(others.names, f"--format {output_format} contains only the plan")
    passed = others.passed if passes_on else ()
    arguments.check_line(passed)
    if (plan.fits or anyway) and formats.is_unquoted(output_format):
        is_terminal = sys.stdout.isatty()
        command = arguments.command(plan) if is_terminal and wanted_format is None else None
        if command is not None and not is_quiet:
            click.echo(arguments.run_hint(plan), err=True)
        args = [*(command or formats.words(plan, output_format)), *passed]
        for unsafe in [] if is_terminal else arguments.unsafe_arguments(args):
            click.echo(
                f"fitter: warning: a shell or xargs may change '{printable(unsafe)}': use --format shell", err=True
            )
        click.echo(arguments.command_line(args, quoted=is_terminal))
    elif plan.fits or anyway or output_format == "json":
        click.echo(" ".join([plan.format(output_format, anyway=bool(anyway)), *map(arguments.shell_word, passed)]))


def _with_picture(drawn: RenderableType, plan: Plan, model: str) -> RenderableType:
    from rich.console import Group

    from fitter.api.report_plan import beside
    from fitter.output.pictures.plan_pictures import PlanPicture

    extras = beside(plan, model, with_contexts=False)
    return Group(drawn, PlanPicture(plan.to_dict(), extras.layer_map))


def _warn_of_other_server(plan: Plan) -> None:
    from fitter.llama.build.inspect_build import other_server

    if plan.llama_cpp is not None and (problem := other_server(plan.llama_cpp)):
        click.echo(f"fitter: warning: {problem}", err=True)
