"""``fitter history`` and ``diff``: compare the memory of models with builds of llama.cpp, and two plans."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FITS, EXIT_REGRESSION, UsageError
from fitter.parameters.table import DEFAULTS, PARAMETERS

if TYPE_CHECKING:
    from fitter.regression.build_comparison import Compared


_EPILOG = """\
Examples:
  fitter history --cases fitter.toml --llama-cpp b10361/ --llama-cpp v0.5.0/ --llama-cpp python --svg history.svg
  fitter history model.gguf --gpu rtx-4090 --llama-cpp b10361/ --llama-cpp python

Exit status: 0 nothing takes more with the last build than with the first, 2 usage error, 3 a model cannot be read, or
the last build failed, 4 something takes more, or does not fit any more, 5 the result cannot be written.
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("files", nargs=-1, type=click.Path(), metavar="[MODEL]...")
@options.shapes_option
@options.builds_option
@options.subject_options
@options.selection_option
@options.fitting_options(without="llama_cpp")
@options.history_options
@options.markdown_option
@options.json_option
def history(
    files: tuple[str, ...],
    builds: tuple[str, ...] | None,
    cases_file: Path | None,
    expression: str | None,
    jobs: int | None,
    trust: bool | None,
    csv_file: Path | None,
    svg_file: Path | None,
    badge_file: Path | None,
    as_markdown: bool | None,
    as_json: bool | None,
    **given: Any,
) -> int:
    """Show what each MODEL, or each case of --cases, takes with one build of llama.cpp after another.

    Each is planned with the first build that can, and measured with the same parameters with the others, so that a
    difference is growth and not another plan. The builds are those of --llama-cpp, or of [history] in the fitter.toml.
    The table has the bytes with the first build, and the difference from them with each of the others.
    """
    from fitter.output.documents.document import dumps
    from fitter.regression import build_report
    from fitter.regression.cases import read_builds
    from fitter.storage import replace_document

    models, cases_file = _split(files, cases_file)
    if builds is None and cases_file is not None:
        builds = read_builds(cases_file, is_trusted=bool(trust))
    if not builds:
        raise UsageError(
            "no build of llama.cpp is named: give --llama-cpp OLD --llama-cpp NEW, or llama_cpp = [...] in "
            "[history] of fitter.toml"
        )
    comparisons = compared(
        models, builds, cases_file, expression, jobs, options.given(given), own_plans=False, trust=trust
    )
    if as_json:
        answers.print_json(build_report.to_dict(comparisons, builds))
    elif as_markdown:
        click.echo(build_report.markdown(comparisons, builds), nl=False)
    else:
        build_report.print_history(sys.stdout, comparisons, builds)
    # Last: if they cannot be written, everything else has been printed.
    sys.stdout.flush()
    if csv_file is not None:
        replace_document(csv_file, build_report.to_csv(comparisons, builds).encode())
    if svg_file is not None:
        replace_document(svg_file, build_report.to_svg(comparisons, builds).encode())
    if badge_file is not None:
        replace_document(badge_file, (dumps(build_report.badge(comparisons, builds)) + "\n").encode())
    return build_report.history_status(comparisons)


def _split(files: Sequence[str], cases_file: Path | None) -> tuple[tuple[str, ...], Path | None]:
    """Split the files into models and the one file with cases."""
    tables = [*(Path(file) for file in files if file.endswith(".toml")), *([cases_file] if cases_file else [])]
    if len(tables) > 1:
        raise UsageError(f"{tables[0]} and {tables[1]} are two files with cases: give one")
    return tuple(file for file in files if not file.endswith(".toml")), next(iter(tables), None)


def compared(
    files: Sequence[str],
    builds: Sequence[str],
    cases_file: Path | None,
    expression: str | None,
    jobs: int | None,
    given: Mapping[str, Any],
    *,
    own_plans: bool = True,
    trust: bool | None = None,
) -> tuple[Compared, ...]:
    """Compare models, or the cases of a file, with several builds; print errors to stderr.

    Raises:
        UsageError: There is nothing to compare, or options contradict each other.
    """
    from fitter import programs
    from fitter.regression import build_comparison as over
    from fitter.regression import build_report
    from fitter.regression.cases import check_trusted, read_cases, select_named, with_build

    models, cases_file = _split(files, cases_file)
    timeout = given.get("timeout", DEFAULTS["timeout"])
    words = {name: value for name, value in given.items() if name != "timeout"}
    if cases_file is None:
        words.setdefault("program", programs.chosen("llama-server"))
        if not models:
            raise UsageError("there is nothing to compare: name models, or a fitter.toml with --cases")
        if expression is not None:
            raise UsageError("-k selects cases of a fitter.toml: name one with --cases, or leave -k out")
        subjects = over.of_models(models, words)
    else:
        if others := [f"--{PARAMETERS[name].long}" for name in words] or list(models):
            raise UsageError(f"the cases in {cases_file} say what is measured: leave {', '.join(others)} out")
        cases = with_build(select_named(read_cases(cases_file, is_trusted=bool(trust)), expression), builds[0])
        check_trusted(cases, cases_file, bool(trust))
        subjects = over.of_cases(cases)
    with answers.counted(sys.stderr, "comparing") as on_done:
        comparisons = over.over_builds(
            subjects, builds, own_plans=own_plans, jobs=jobs, timeout=timeout, on_done=on_done
        )
    for line in build_report.error_lines(comparisons, builds):
        click.echo(f"fitter: {line}", err=True)
    return comparisons


_DIFF_EPILOG = """\
Examples:
  fitter diff old.json new.json                                 two plans
  fitter diff model.gguf --llama-cpp old/ --llama-cpp new/ --gpu rtx-4090
  fitter diff --cases fitter.toml --llama-cpp old/ --llama-cpp new/

Exit status: 0 nothing differs, 2 usage error, 3 a model cannot be read or llama.cpp failed, 4 something differs, 5 the
result cannot be written.
"""


@click.command(cls=options.Command, epilog=_DIFF_EPILOG)
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
    from fitter.regression import check_report, compare

    differences = compare.diff(*map(read_plan, files))
    if as_json:
        from fitter.regression.regression_documents import DIFF

        answers.print_json(DIFF.write(differences))
    else:
        check_report.print_diff(sys.stdout, differences)
    return EXIT_FITS if differences.is_empty else EXIT_REGRESSION
