"""``fitter diff``: compare two plans, or two builds of llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fitter.cli import answers, options
from fitter.cli.history import compared
from fitter.errors import EXIT_FITS, EXIT_REGRESSION, UsageError
from fitter.parameters.table import PARAMETERS

_EPILOG = """\
Examples:
  fitter diff old.json new.json                                 two plans
  fitter diff model.gguf --llama-cpp old/ --llama-cpp new/ --gpu rtx-4090
  fitter diff --cases fitter.toml --llama-cpp old/ --llama-cpp new/

Exit status: 0 nothing differs, 2 usage error, 3 a model cannot be read or llama.cpp failed, 4 something differs, 5 the
result cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("files", nargs=-1, type=click.Path(), metavar="A B | MODEL...")
@options.shapes_option
@options.builds_option
@options.subject_options
@options.selection_option
@options.fitting_options(without="llama_cpp")
@options.markdown_option
@options.json_option
def diff(
    files: tuple[str, ...],
    builds: tuple[str, ...] | None,
    cases_file: Path | None,
    expression: str | None,
    jobs: int | None,
    trust: bool | None,
    as_markdown: bool | None,
    as_json: bool | None,
    **given: Any,
) -> int:
    """Compare the plans in the files A and B, or what each MODEL takes with two builds of llama.cpp.

    Plans are those that 'fitter --json' wrote. Their memory on each device and on the host, the estimated speed, the
    parameters, the devices and the model are compared, but not the model's path and the duration of the search.

    With --llama-cpp twice, each MODEL is planned with the first build, and measured with the same parameters with the
    second: what grew or shrank, by device and buffer type, and whether it still fits. Below that is how the second
    build's own plan differs. --cases compares the cases in a fitter.toml instead, whatever builds they name.
    """
    words = options.given(given)
    if not builds and cases_file is None:
        return _diff_of_plans(files, as_json, as_markdown, sorted(words))
    if builds is None or len(builds) != 2:
        raise UsageError("two builds of llama.cpp are compared: give --llama-cpp OLD --llama-cpp NEW")
    from fitter.regression import build_report

    comparisons = compared(files, builds, cases_file, expression, jobs, words, trust=trust)
    if as_json:
        answers.print_json(build_report.to_dict(comparisons, builds))
    elif as_markdown:
        click.echo(build_report.markdown(comparisons, builds), nl=False)
    else:
        build_report.print_diff(sys.stdout, comparisons, builds)
    return build_report.diff_status(comparisons)


def _diff_of_plans(files: tuple[str, ...], as_json: bool | None, as_markdown: bool | None, others: list[str]) -> int:
    if len(files) != 2:
        raise UsageError(
            "two plans are compared: give the files A and B that 'fitter --json' wrote; or give models, and two builds "
            "with --llama-cpp OLD --llama-cpp NEW"
        )
    if as_markdown or others:
        names = [*(f"--{PARAMETERS[name].long}" for name in others), *(["--markdown"] if as_markdown else [])]
        raise UsageError(f"two plans are compared as they are: leave {', '.join(names)} out")
    from fitter.output.documents.plan_document import read_plan
    from fitter.regression import check_report, plans

    differences = plans.diff(*map(read_plan, files))
    if as_json:
        from fitter.regression.regression_documents import DIFF

        answers.print_json(DIFF.write(differences))
    else:
        check_report.print_diff(sys.stdout, differences)
    return EXIT_FITS if differences.is_empty else EXIT_REGRESSION
