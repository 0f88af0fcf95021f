"""Reports of ``fitter diff`` and ``fitter history`` with several builds: tables, Markdown, JSON, CSV, SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from fitter.api.compare_builds import OnBuild
from fitter.errors import EXIT_FITS, EXIT_REGRESSION
from fitter.planning.request.shared import HOST_NAME
from fitter.regression.build_comparison import (
    Compared,
    by_buffer_type,
    change_on,
    first_of,
    has_grown,
    labels,
    lacking,
    own_plans,
    used_on,
)
from fitter.regression.check_report import figure, literal, moves_table, table_cell
from fitter.regression.compare import Move, change
from fitter.regression.regression_documents import BUILDS, Build, Builds, CaseOnBuild, CaseOnBuilds, MemoryOnBuild
from fitter.text import human, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_SAME = "="
_NONE = "-"
DEVICES = "devices"
"""Name of all devices together in a history."""


def versions(compared: Sequence[Compared], builds: Sequence[str]) -> tuple[str, ...]:
    """List the version of each build; empty if no case could be planned with it."""
    result = [""] * len(builds)
    for each in compared:
        result = [version or build.version for version, build in zip(result, each.builds or _none(builds), strict=True)]
    return tuple(result)


def _none(builds: Sequence[str]) -> tuple[OnBuild, ...]:
    return tuple(map(OnBuild, builds))


def _legend(compared: Sequence[Compared], builds: Sequence[str], write: Callable[[str], str] = printable) -> list[str]:
    """Write a line for each build: its short name and its version."""
    named = zip(labels(builds), versions(compared, builds), strict=True)
    return [f"{write(label)}: {write(version)}" for label, version in dict.fromkeys(named) if version]


def error_lines(compared: Iterable[Compared], builds: Sequence[str]) -> tuple[str, ...]:
    """Write a line for each case and build that could not be measured."""
    lines = []
    for each in compared:
        if each.error is not None:
            lines.append(f"error: {printable(each.name)}: {each.error}")
        for label, build in zip(labels(builds), each.builds, strict=bool(each.builds)):
            if build.error is not None:
                lines.append(f"error: {printable(each.name)} with {printable(label)}: {build.error}")
    return tuple(lines)


def _failed(compared: Iterable[Compared]) -> int:
    """The exit status of the worst error: of a case that no build could plan, or of the last build."""
    errors = [each.error or each.builds[-1].error for each in compared]
    return max((error.exit_code for error in errors if error is not None), default=EXIT_FITS)


# --- two builds


def changes_of_plan(each: Compared) -> tuple[Move, ...]:
    """Compare the last build's own plan with the plan of the first."""
    first, last = first_of(each), each.builds[-1] if each.builds else None
    if first is None or first.plan is None or last is None or last.plan is None:
        return ()
    return own_plans(first.plan, last.plan)


def is_same(each: Compared) -> bool:
    """Whether two builds take the same and make the same plan."""
    return not (each.error or each.builds[-1].error or change_on(each, each.builds[-1]) or changes_of_plan(each))


def diff_status(compared: Sequence[Compared]) -> int:
    """Return the exit status of an error, else 4 if anything differs."""
    return _failed(compared) or (EXIT_FITS if all(map(is_same, compared)) else EXIT_REGRESSION)


def summary(compared: Sequence[Compared], builds: Sequence[str], write: Callable[[str], str] = printable) -> str:
    """Write one line: how many cases take more with the last build than with the first, and how many do not."""
    first, last = write(labels(builds)[0]), write(labels(builds)[-1])
    failed = sum(each.error is not None or each.builds[-1].error is not None for each in compared)
    grown = sum(map(has_grown, compared))
    changed = sum(bool(each.builds and change_on(each, each.builds[-1])) for each in compared) - grown
    same = len(compared) - grown - changed - failed
    parts = [
        (grown, f"{'takes' if grown == 1 else 'take'} more with {last} than with {first}"),
        (changed, "changed within the limits"),
        (failed, "could not be compared"),
        (same, f"{'takes' if same == 1 else 'take'} the same"),
    ]
    total = "1 case" if len(compared) == 1 else f"{len(compared)} cases"
    return f"{total}: " + ", ".join(f"{count} {words}" for count, words in parts if count)


def print_diff(stream: IO[str], compared: Sequence[Compared], builds: Sequence[str]) -> None:
    """Write what two builds do differently, case by case."""
    from rich.console import Group
    from rich.text import Text

    from fitter.output.tables.plan_table import print_to

    first, last = labels(builds)
    parts: list[RenderableType] = [Text(line, overflow="fold") for line in _legend(compared, builds)]
    for each in compared:
        if not each.builds or is_same(each):
            continue
        parts.append(Text(printable(each.name), style="bold"))
        if moves := change_on(each, each.builds[-1]):
            parts.append(moves_table(moves, printable(first), printable(last)))
        elif each.builds[-1].error is None:
            parts.append(Text("  the same parameters take the same"))
        if words := plan_line(each, last):
            parts.append(Text(f"  {words}", overflow="fold"))
    print_to(stream, Group(*parts, Text(summary(compared, builds))))


def plan_line(each: Compared, last: str) -> str:
    """Describe the last build's own plan; empty if it is the same."""
    moves = changes_of_plan(each)
    if not moves:
        return ""
    words = ", ".join(
        f"{move.what} {figure(move.before, move.unit)} → {figure(move.after, move.unit)}" for move in moves
    )
    return printable(f"fitted anew with {last}: {words}")


# --- many builds


def history_status(compared: Sequence[Compared]) -> int:
    """Return the exit status of an error with the last build, else 4 if a case takes more than with the first."""
    return _failed(compared) or (EXIT_REGRESSION if any(map(has_grown, compared)) else EXIT_FITS)


def totals(each: OnBuild) -> dict[str, int] | None:
    """Sum bytes on all devices together and on the host; ``None`` if they were not measured."""
    if each.breakdown is None:
        return None
    used = used_on(each)
    host = used.pop(HOST_NAME, 0)
    return {DEVICES: sum(used.values()), HOST_NAME: host}


def _rows(each: Compared) -> Iterator[tuple[str, list[str]]]:
    """A line for devices and one for the host: bytes with the first build, and by how much the others differ."""
    first = first_of(each)
    sizes = [totals(build) for build in each.builds]
    start = None if first is None else totals(first)
    if first is None or start is None:
        return
    for place in (DEVICES, HOST_NAME):
        if not any(size and size[place] for size in sizes):
            continue
        cells = []
        for build, size in zip(each.builds, sizes, strict=True):
            if size is None:
                cells.append(_NONE)
            elif build is first:
                cells.append(human(size[place]))
            else:
                same = size[place] == start[place]
                mark = "!" if place == DEVICES and not build.fits and first.fits else ""
                cells.append(mark + (_SAME if same else change(start[place], size[place], "bytes")))
        yield place, cells


def history_table(compared: Sequence[Compared], builds: Sequence[str]) -> RenderableType:
    """Draw bytes with the first build of each case, and the difference from them with each of the others."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("case", overflow="fold")
    table.add_column("on", no_wrap=True)
    for label in labels(builds):
        table.add_column(printable(label), justify="right", no_wrap=True)
    for each in compared:
        for index, (place, cells) in enumerate(_rows(each)):
            table.add_row("" if index else printable(each.name), place, *cells)
    notes = [f"! no longer fits: {_misfit(each, builds)}" for each in compared if _misfit(each, builds)]
    lines = [*_legend(compared, builds), *notes, summary(compared, builds)]
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def _misfit(each: Compared, builds: Sequence[str]) -> str:
    """The first build with which the parameters of a plan that fits do not fit any more."""
    first = first_of(each)
    if first is None or not first.fits:
        return ""
    misfits = ((label, build) for label, build in zip(labels(builds), each.builds, strict=True) if build.missing)
    label, build = next(misfits, ("", None))
    return "" if build is None else printable(f"{each.name} with {label}, {lacking(build.missing)}")


def print_history(stream: IO[str], compared: Sequence[Compared], builds: Sequence[str]) -> None:
    """Write the table."""
    from fitter.output.tables.plan_table import print_to

    print_to(stream, history_table(compared, builds))


def markdown(compared: Sequence[Compared], builds: Sequence[str]) -> str:
    """Write the cases that changed from the first to the last build, as a comment for a pull request."""
    is_good = history_status(compared) == EXIT_FITS
    lines = [f"### {'✅' if is_good else '📈'} llama.cpp — {summary(compared, builds, literal)}"]
    first, last = labels(builds)[0], labels(builds)[-1]
    rows = [(each, move) for each in compared if each.builds for move in change_on(each, each.builds[-1])]
    if rows:
        head = f"| case | what | {literal(first)} | {literal(last)} | change | |"
        lines += ["", head, "| --- | --- | ---: | ---: | ---: | --- |"]
    for each, move in rows:
        mark = "📈 " if move.failure else ""
        cells = (each.name, move.what, figure(move.before, move.unit), figure(move.after, move.unit))
        more = (change(move.before, move.after, move.unit), mark + move.detail)
        lines.append("| " + " | ".join(map(table_cell, (*cells, *more))) + " |")
    notes = [
        f"- **{literal(each.name)}**: {literal(plan_line(each, last))}" for each in compared if plan_line(each, last)
    ]
    notes += [f"- {literal(line)}" for line in error_lines(compared, builds)]
    notes += [f"- {line}" for line in _legend(compared, builds, literal)]
    return "\n".join([*lines, "", *notes]) + "\n"


def to_dict(compared: Sequence[Compared], builds: Sequence[str]) -> dict[str, Any]:
    """Write the document of ``fitter history --json``, and of ``fitter diff --json`` with builds."""
    named = zip(builds, labels(builds), versions(compared, builds), strict=True)
    return BUILDS.write(
        Builds(
            equal=all(map(is_same, compared)),
            grown=any(map(has_grown, compared)),
            builds=tuple(Build(where, label, version or None) for where, label, version in named),
            cases=tuple(_case_on_builds(each, builds) for each in compared),
        )
    )


def _case_on_builds(each: Compared, builds: Sequence[str]) -> CaseOnBuilds:
    error = None if each.error is None else str(each.error)
    named = zip(each.builds, labels(builds), strict=True) if each.builds else ()
    return CaseOnBuilds(each.name, error, tuple(_case_on_build(each, build, label) for build, label in named))


def _case_on_build(each: Compared, build: OnBuild, label: str) -> CaseOnBuild:
    first = first_of(each)
    has_plans = first is not None and first.plan is not None and build is not first and build.plan is not None
    plan = own_plans(first.plan, build.plan) if has_plans else ()  # type: ignore[union-attr, arg-type]
    return CaseOnBuild(label, build, tuple(_memory(build)), tuple(change_on(each, build)), tuple(plan))


def _memory(build: OnBuild) -> Iterator[MemoryOnBuild]:
    for (place, buffer_type), row in by_buffer_type(build).items():
        yield MemoryOnBuild(place, buffer_type, row)


COLUMNS = ("case", "build", "version", "device", "buffer_type", "model", "context", "compute", "used", "fits")
"""The columns of the CSV; a line for each buffer type, sizes in bytes."""


def to_csv(compared: Sequence[Compared], builds: Sequence[str]) -> str:
    """Write bytes by case, build and buffer type, for a spreadsheet. Cases without a measurement have no line."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    for each in compared:
        for label, build in zip(labels(builds), each.builds, strict=bool(each.builds)):
            for part in _memory(build):
                sizes = (part.row.model, part.row.context, part.row.compute, part.row.used)
                place = (part.device, part.buffer_type)
                fits = str(build.fits).lower()
                lines.writerow((printable(each.name), printable(label), build.version, *place, *sizes, fits))
    return out.getvalue()


def to_svg(compared: Sequence[Compared], builds: Sequence[str]) -> str:
    """Draw the change of each case since its first build, on devices and on the host."""
    from fitter.output.pictures.change_pictures import chart

    panels = [_panel(each) for each in compared if first_of(each) is not None]
    first = labels(builds)[0]
    title = f"Memory of the same parameters, more or less than with {first}"
    return chart(title, (DEVICES, HOST_NAME), "does not fit", labels(builds), panels)


def _panel(each: Compared) -> Any:
    from fitter.output.pictures.change_pictures import Line, Panel

    first = first_of(each)
    assert first is not None
    start = totals(first)
    assert start is not None
    sizes = [totals(build) for build in each.builds]
    lines = []
    for place in (DEVICES, HOST_NAME):
        values = tuple(None if differences is None else differences[place] - start[place] for differences in sizes)
        differences = [value for value in values if value is not None]
        most = max(differences, key=abs)
        is_past = abs(most) > abs(differences[-1])
        words = change(0, differences[-1], "bytes") if differences[-1] else "no change"
        lines.append(Line(values, words, change(0, most, "bytes") if is_past else ""))
    subtitle = ", ".join(f"{human(start[place])} on {_name(place)}" for place in (DEVICES, HOST_NAME) if start[place])
    bad = tuple(step for step, build in enumerate(each.builds) if build.missing)
    return Panel(each.name, subtitle, tuple(lines), bad)


def _name(place: str) -> str:
    return "the host" if place == HOST_NAME else place


def badge(compared: Sequence[Compared], builds: Sequence[str]) -> dict[str, Any]:
    """Write the endpoint file from which https://shields.io draws a badge."""
    grown = sum(map(has_grown, compared))
    failed = _failed(compared)
    words = f"{grown} of {len(compared)} grew" if grown else "unchanged"
    if not grown and any(each.builds and change_on(each, each.builds[-1]) for each in compared):
        words = "within limits"
    return {
        "schemaVersion": 1,
        "label": printable(f"memory {labels(builds)[0]} → {labels(builds)[-1]}"),
        "message": "error" if failed else words,
        "color": "lightgrey" if failed else "orange" if grown else "brightgreen",
    }
