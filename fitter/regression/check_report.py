"""The results of ``fitter check`` and ``fitter diff``: tables, Markdown, JSON, JUnit XML, annotations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fitter.errors import EXIT_FITS, EXIT_REGRESSION, EXIT_USAGE
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import Cause, Move, Unit, change, missing
from fitter.regression.measuring import Measured
from fitter.regression.regression_documents import CHECK, Check
from fitter.storage import replace_document
from fitter.text import human, printable, speed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.regression.compare import PlanDiff

_UNKNOWN_CAUSE = "nothing that the lock records; perhaps the build of llama.cpp or environment variables differ"
# Without what GitHub links by itself: www. and GH-1.
_PLAIN = re.compile(r"(?!.*(?:www\.|gh-))[a-z0-9 ,.%()+±→❌-]*", re.IGNORECASE)
# What XML 1.0 has no way to write.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def causes(outcome: CaseResult) -> tuple[str, ...]:
    """List the changes that may explain the case's differences; one line that says so if none is known."""
    comparison = outcome.comparison
    if comparison is None or (comparison.locked is None and not comparison.causes):
        return ()
    if not comparison.causes and any(not move.is_budget for move in comparison.moves):
        return (_UNKNOWN_CAUSE,)
    return tuple(map(str, comparison.causes))


def exit_status(outcomes: Iterable[CaseResult]) -> int:
    """Return the status of the error if a case could not be measured, else 4 if a case failed.

    Otherwise 2 if a case is only in ``fitter.toml`` or only in the lock.
    """
    results = tuple(outcomes)
    if errors := [outcome.error.exit_code for outcome in results if outcome.error and not outcome.unmatched]:
        return max(errors)
    if any(outcome.status == "failed" for outcome in results):
        return EXIT_REGRESSION
    return EXIT_USAGE if any(outcome.unmatched for outcome in results) else EXIT_FITS


def summary(outcomes: Sequence[CaseResult]) -> str:
    """Write one line with the number of cases for each status."""
    count = {status: sum(outcome.status == status for outcome in outcomes) for status in _WORDS}
    total = "1 case" if len(outcomes) == 1 else f"{len(outcomes)} cases"
    return f"{total}: " + ", ".join(f"{count[status]} {word}" for status, word in _WORDS.items() if count[status])


_WORDS = {
    "failed": "failed",
    "error": "could not be measured",
    "added": "not in the lock",
    "removed": "only in the lock",
    "changed": "changed within the limits",
    "same": "unchanged",
}


def check_table(outcomes: Sequence[CaseResult], *, verbose: bool = False) -> RenderableType:
    """Draw the numbers that changed and the causes, by case; ``verbose``: unchanged cases too.

    Errors are not included: see ``error_lines``.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for outcome in outcomes:
        if outcome.error is not None or (outcome.status == "same" and not verbose):
            continue
        parts.append(Text.assemble((outcome.name, "bold"), " ", (outcome.status, _STYLES[outcome.status])))
        comparison = outcome.comparison
        if comparison is not None and comparison.moves:
            parts.append(moves_table(comparison.moves))
        parts += [Text(f"  changed: {cause}", overflow="fold") for cause in causes(outcome)]
        if comparison is not None and comparison.chosen:
            parts.append(
                Text(f"  fitted differently: {_choices_text(comparison.chosen)}", style="dim", overflow="fold")
            )
    return Group(*parts, Text(summary(outcomes)))


_STYLES = {"failed": "bold red", "changed": "yellow", "same": "green"}


def print_diff(stream: IO[str], diff: PlanDiff) -> None:
    """Write the differences between two plans."""
    from rich.console import Group
    from rich.text import Text

    from fitter.output.tables.plan_table import print_to

    if diff.is_empty:
        stream.write("the plans are the same\n")
        return
    parts: list[RenderableType] = [moves_table(diff.moves, "A", "B")] if diff.moves else []
    print_to(stream, Group(*parts, *(Text(f"  {change}", overflow="fold") for change in diff.changes)))


def moves_table(moves: Sequence[Move], before: str = "locked", after: str = "now") -> RenderableType:
    """Draw a row for each number; those that fail the case begin with ``!``."""
    from fitter.output.tables.narrow import NarrowTable

    table = NarrowTable(spare=(before, "", "change"), names="", shorten=str, fold=24)
    table.add_column("  what", no_wrap=True)
    for column in (before, after, "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for move in moves:
        row = (f"{'!' if move.failure else ' '} {move.what}", *_columns(move), move.detail)
        table.add_row(*row, style="red" if move.failure else "")
    return table


def _columns(move: Move) -> tuple[str, str, str]:
    before = f"at {'least' if move.is_least else 'most'} " if move.is_budget and move.unit else ""
    return before + figure(move.before, move.unit), figure(move.after, move.unit), _change(move)


def _change(move: Move) -> str:
    """The difference, with a percentage if there was something before."""
    text = change(move.before, move.after, move.unit)
    if move.unit == "bytes" and move.before:
        percent = (move.after - move.before) / move.before * 100
        text += f" ({percent:+.{0 if abs(percent) >= 10 else 1}f} %)"
    return text


def figure(value: float | None, unit: Unit) -> str:
    """Write a number for people to read; without a unit ``yes`` or ``no``."""
    if value is None:
        return "-"
    if unit == "bytes":
        return human(int(value))
    if unit in ("tokens", "layers"):
        return str(int(value))
    return speed(value) if unit else ("yes" if value else "no")


def _choices_text(choices: Sequence[Cause]) -> str:
    return ", ".join(f"{choice.what} {choice.before} → {choice.after}" for choice in choices)


def print_check(stream: IO[str], outcomes: Sequence[CaseResult], *, verbose: bool = False) -> None:
    """Write the table; only the summary if nothing changed, which needs no slow imports."""
    if not verbose and all(outcome.status == "same" or outcome.error is not None for outcome in outcomes):
        stream.write(summary(outcomes) + "\n")
        return
    from fitter.output.tables.plan_table import print_to

    print_to(stream, check_table(outcomes, verbose=verbose))


def error_lines(outcomes: Iterable[CaseResult]) -> tuple[str, ...]:
    """Write a line for each case that could not be measured, or is only in ``fitter.toml`` or only in the lock."""
    return tuple(f"error: {printable(outcome.name)}: {outcome.error}" for outcome in outcomes if outcome.error)


def lock_lines(measured: Iterable[Measured]) -> tuple[str, ...]:
    """Write a line for each case that could not be measured, or that does not fit."""
    lines = []
    for each in measured:
        if each.error is not None:
            lines.append(f"error: {each.case.name}: {each.error}")
        elif each.snapshot is not None and not each.snapshot.fits:
            lines.append(f"{each.case.name} does not fit: {missing(each.snapshot)}")
    return tuple(lines)


# --- other forms


def check_to_dict(outcomes: Sequence[CaseResult]) -> dict[str, Any]:
    """Write the document of ``fitter check --json``."""
    return CHECK.write(Check(exit_status(outcomes) == EXIT_FITS, tuple(outcomes)))


def page(outcomes: Sequence[CaseResult]) -> str:
    """Draw the check as a page of HTML. Raises ``LibraryError`` where a package is missing for it."""
    from fitter.output.pages.report_page import check_page

    explained = {outcome.name: causes(outcome) for outcome in outcomes}
    return check_page(check_to_dict(outcomes), explained, summary(outcomes))


def markdown(outcomes: Sequence[CaseResult]) -> str:
    """Write the check as a comment for a pull request: the cases that changed, and why."""
    is_good = exit_status(outcomes) == EXIT_FITS
    lines = [f"### {'✅' if is_good else '❌'} fitter check — {summary(outcomes)}"]
    moved = [outcome for outcome in outcomes if outcome.status != "same"]
    rows = [(outcome.name, move) for outcome in moved if outcome.comparison for move in outcome.comparison.moves]
    if rows:
        lines += ["", "| case | what | locked | now | change | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for name, move in rows:
        cells = (name, move.what, *_columns(move), "❌ " + move.detail if move.failure else move.detail)
        lines.append("| " + " | ".join(map(table_cell, cells)) + " |")
    notes = [f"- **{literal(outcome.name)}**: {literal(cause)}" for outcome in moved for cause in causes(outcome)]
    notes += [f"- **{literal(outcome.name)}**: {literal(str(outcome.error))}" for outcome in moved if outcome.error]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def table_cell(text: str) -> str:
    """Write ``text`` for a cell of a table, where ``|`` must be escaped even in code."""
    return literal(text).replace("|", r"\|")


def literal(text: str) -> str:
    """Write ``text`` without markup: as code if it could contain any, so that it makes no links and notifies nobody."""
    text = " ".join(printable(text).split())
    if _PLAIN.fullmatch(text):
        return text
    # The fence must be longer than any run of backticks inside.
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{room}{text}{room}{fence}"


def junit(outcomes: Sequence[CaseResult]) -> bytes:
    """Write the check as JUnit XML, with a test for each case."""
    from xml.etree import ElementTree

    suite = ElementTree.Element(
        "testsuite",
        name="fitter check",
        tests=str(len(outcomes)),
        failures=str(sum(outcome.status == "failed" for outcome in outcomes)),
        errors=str(sum(outcome.error is not None for outcome in outcomes)),
        skipped="0",
    )
    for outcome in outcomes:
        test = ElementTree.SubElement(suite, "testcase", classname="fitter", name=_xml(outcome.name))
        if outcome.error is not None:
            ElementTree.SubElement(test, "error", message=_xml(str(outcome.error)), type=type(outcome.error).__name__)
        elif outcome.status == "failed":
            failed = ElementTree.SubElement(test, "failure", message=_xml(_sentence(outcome)), type="regression")
            failed.text = _xml("\n".join(_lines(outcome)))
        elif outcome.status == "changed":
            ElementTree.SubElement(test, "system-out").text = _xml("\n".join(_lines(outcome)))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def write_junit(path: Path, outcomes: Sequence[CaseResult]) -> None:
    """Write JUnit XML to ``path``. Raises ``AnswerError`` if it cannot be written."""
    replace_document(path, junit(outcomes))


def github_annotations(outcomes: Sequence[CaseResult], cases_file: Path) -> tuple[str, ...]:
    """Workflow commands for GitHub: an error for each case that failed, a notice for each that changed."""
    lines = []
    for outcome in outcomes:
        if outcome.status != "same":
            level = "notice" if outcome.status == "changed" else "error"
            place = _place(cases_file, outcome.name)
            title = _escaped(f"fitter: {outcome.name}", is_property=True)
            lines.append(f"::{level} {place}title={title}::{_escaped(_sentence(outcome))}")
    return tuple(lines)


def _place(cases_file: Path, name: str) -> str:
    """The file and line of the case, by its path in the repository; empty if ``fitter.toml`` is outside of it."""
    file = cases_file.resolve()
    root = _repository(file)
    try:
        text = cases_file.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return ""
    if root is None:
        return ""
    table = re.escape(name.partition("/")[0])
    match = re.search(rf"^\s*\[\s*cases\s*\.\s*[\"']?{table}[\"']?\s*\]", text, re.MULTILINE)
    line = f"line={text.count(chr(10), 0, match.end()) + 1}," if match else ""
    return f"file={_escaped(file.relative_to(root).as_posix(), is_property=True)},{line}"


def _repository(file: Path) -> Path | None:
    """The directory that GitHub's paths start from: git's top level or the job's workspace, whichever is nearer.

    Without both it is the working directory; ``None`` if the file is not below that either.
    """
    tops = [parent for parent in file.parents if (parent / ".git").exists()]
    if workspace := os.environ.get("GITHUB_WORKSPACE"):
        tops.append(Path(workspace).resolve())
    around = [top for top in tops if file.is_relative_to(top)]
    here = Path.cwd().resolve()
    return max(around, key=lambda top: len(top.parts), default=here if file.is_relative_to(here) else None)


def _sentence(outcome: CaseResult) -> str:
    if outcome.error is not None:
        return str(outcome.error)
    failures = outcome.comparison.failures if outcome.comparison else ()
    why = "; ".join(causes(outcome))
    return ("; ".join(failures) or "changed within its limits") + (f" ({why})" if why else "")


def _lines(outcome: CaseResult) -> list[str]:
    comparison = outcome.comparison
    if comparison is None:
        return []
    lines = [*comparison.failures]
    lines += [" ".join(filter(None, (move.what, *_columns(move), move.detail))) for move in comparison.moves]
    return [*lines, *(f"changed: {cause}" for cause in causes(outcome))]


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _escaped(text: str, *, is_property: bool = False) -> str:
    """``text``, escaped for GitHub's runner."""
    signs = {"%": "%25"} | ({":": "%3A", ",": "%2C"} if is_property else {})
    return "".join(signs.get(sign, sign) for sign in printable(text))
