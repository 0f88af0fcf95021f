"""What ``fitter check`` and ``fitter diff`` found, for people, pull requests and machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fitter.errors import EXIT_FITS, EXIT_REGRESSION, EXIT_USAGE, AnswerError
from fitter.model.source import show
from fitter.output.units import human, speed
from fitter.regression.check import Outcome
from fitter.regression.compare import Cause, Move, Unit, change, missing
from fitter.regression.lockfile import replace_file
from fitter.regression.measuring import Measured
from fitter.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.regression.plans import PlanDiff

SCHEMA = 1

_UNKNOWN_CAUSE = "nothing that the lock records; perhaps another build of llama.cpp, or other environment variables"
# Without what GitHub links by itself: www. and GH-1.
_PLAIN = re.compile(r"(?!.*(?:www\.|gh-))[a-z0-9 ,.%()+±→❌-]*", re.IGNORECASE)
# What XML 1.0 has no way to write.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def causes(outcome: Outcome) -> tuple[str, ...]:
    """What changed and may have moved the case's memory; says so where nothing that is known did."""
    found = outcome.comparison
    if found is None or found.locked is None:
        return ()
    if not found.causes and any(not move.is_budget for move in found.moves):
        return (_UNKNOWN_CAUSE,)
    return tuple(map(str, found.causes))


def exit_status(outcomes: Iterable[Outcome]) -> int:
    """4 where a case failed; where one could not be measured, the status of its error.

    2 where nothing is wrong but that a case is not in the lock, or only there.
    """
    found = tuple(outcomes)
    if errors := [outcome.error.exit_code for outcome in found if outcome.error and not outcome.unmatched]:
        return max(errors)
    if any(outcome.status == "failed" for outcome in found):
        return EXIT_REGRESSION
    return EXIT_USAGE if any(outcome.unmatched for outcome in found) else EXIT_FITS


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: how many cases there are, and how they did."""
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


def check_table(outcomes: Sequence[Outcome], *, verbose: bool = False) -> RenderableType:
    """Every number that moved, and below each case what changed; ``verbose``: the cases that did not move as well.

    Errors are left to ``error_lines``.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for outcome in outcomes:
        if outcome.error is not None or (outcome.status == "same" and not verbose):
            continue
        parts.append(Text.assemble((outcome.name, "bold"), " ", (outcome.status, _STYLES[outcome.status])))
        found = outcome.comparison
        if found is not None and found.moves:
            parts.append(_moves_table(found.moves))
        parts += [Text(f"  changed: {cause}", overflow="fold") for cause in causes(outcome)]
        if found is not None and found.chosen:
            parts.append(Text(f"  fitted otherwise: {_chosen(found.chosen)}", style="dim", overflow="fold"))
    return Group(*parts, Text(summary(outcomes)))


_STYLES = {"failed": "bold red", "changed": "yellow", "same": "green"}


def print_diff(stream: IO[str], diff: PlanDiff) -> None:
    """Write what differs between two plans."""
    from rich.console import Group
    from rich.text import Text

    from fitter.output.table import print_to

    if diff.is_empty:
        stream.write("the plans say the same\n")
        return
    parts: list[RenderableType] = [_moves_table(diff.moves, "A", "B")] if diff.moves else []
    print_to(stream, Group(*parts, *(Text(f"  {change}", overflow="fold") for change in diff.changes)))


def _moves_table(moves: Sequence[Move], before: str = "locked", after: str = "now") -> RenderableType:
    """The rows that fail the case begin with ``!``."""
    from fitter.output.narrow import NarrowTable

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
    """By how much, with the percentage where there was something before."""
    said = change(move.before, move.after, move.unit)
    if move.unit == "bytes" and move.before:
        percent = (move.after - move.before) / move.before * 100
        said += f" ({percent:+.{0 if abs(percent) >= 10 else 1}f} %)"
    return said


def figure(value: float | None, unit: Unit) -> str:
    """A number as people read it; ``yes`` or ``no`` without a unit."""
    if value is None:
        return "-"
    if unit == "bytes":
        return human(int(value))
    if unit == "tokens":
        return str(int(value))
    return speed(value) if unit else ("yes" if value else "no")


def _chosen(choices: Sequence[Cause]) -> str:
    return ", ".join(f"{choice.what} {choice.before} → {choice.after}" for choice in choices)


def print_check(stream: IO[str], outcomes: Sequence[Outcome], *, verbose: bool = False) -> None:
    """Write the table; one line where there is nothing else to say, for which nothing need be imported."""
    if not verbose and all(outcome.status == "same" or outcome.error is not None for outcome in outcomes):
        stream.write(summary(outcomes) + "\n")
        return
    from fitter.output.table import print_to

    print_to(stream, check_table(outcomes, verbose=verbose))


def error_lines(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """A line for each case that could not be measured, or that is on one side only."""
    return tuple(f"error: {printable(outcome.name)}: {outcome.error}" for outcome in outcomes if outcome.error)


def lock_lines(measured: Iterable[Measured]) -> tuple[str, ...]:
    """A line for each case that could not be measured, or that does not fit."""
    lines = []
    for each in measured:
        if each.error is not None:
            lines.append(f"error: {each.case.name}: {each.error}")
        elif each.snapshot is not None and not each.snapshot.fits:
            lines.append(f"{each.case.name} does not fit: {missing(each.snapshot)}")
    return tuple(lines)


# --- other forms


def check_to_dict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What ``fitter check --json`` prints: stable keys, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "passed": exit_status(outcomes) == EXIT_FITS,
        "cases": [_case_to_dict(outcome) for outcome in outcomes],
    }


def _case_to_dict(outcome: Outcome) -> dict[str, Any]:
    found = outcome.comparison
    return {
        "name": outcome.name,
        "status": outcome.status,
        "error": None if outcome.error is None else str(outcome.error),
        "fits": None if found is None else found.measured.fits,
        "failures": [] if found is None else list(found.failures),
        "moves": [] if found is None else list(map(move_to_dict, found.moves)),
        "causes": [] if found is None else list(map(_cause_to_dict, found.causes)),
        "fitted": [] if found is None else list(map(_cause_to_dict, found.chosen)),
    }


def move_to_dict(move: Move) -> dict[str, Any]:
    """One number that moved; ``unit`` is ``null`` where 1 is yes and 0 is no."""
    return {
        "what": move.what,
        "before": move.before,
        "after": move.after,
        "unit": move.unit or None,
        "detail": move.detail,
        "failure": move.failure,
        "budget": move.is_budget,
    }


def diff_to_dict(diff: PlanDiff) -> dict[str, Any]:
    """What ``fitter diff --json`` prints."""
    return {
        "schema": SCHEMA,
        "equal": diff.is_empty,
        "moves": list(map(move_to_dict, diff.moves)),
        "changes": list(map(_cause_to_dict, diff.changes)),
    }


def _cause_to_dict(cause: Cause) -> dict[str, str]:
    return {"kind": cause.kind, "what": cause.what, "before": cause.before, "after": cause.after}


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The check as a comment for a pull request: the cases that moved, and what changed."""
    is_good = exit_status(outcomes) == EXIT_FITS
    lines = [f"### {'✅' if is_good else '❌'} fitter check — {summary(outcomes)}"]
    moved = [outcome for outcome in outcomes if outcome.status != "same"]
    rows = [(outcome.name, move) for outcome in moved if outcome.comparison for move in outcome.comparison.moves]
    if rows:
        lines += ["", "| case | what | locked | now | change | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for name, move in rows:
        cells = (name, move.what, *_columns(move), "❌ " + move.detail if move.failure else move.detail)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    said = [f"- **{_literal(outcome.name)}**: {_literal(cause)}" for outcome in moved for cause in causes(outcome)]
    said += [f"- **{_literal(outcome.name)}**: {_literal(str(outcome.error))}" for outcome in moved if outcome.error]
    return "\n".join([*lines, *(["", *said] if said else [])]) + "\n"


def _cell(text: str) -> str:
    """``text`` in a table, where a ``|`` ends a cell even in code."""
    return _literal(text).replace("|", r"\|")


def _literal(text: str) -> str:
    """``text`` as it is, in code where a sign of it could be markup: nothing is a link there, and nobody is told."""
    text = " ".join(printable(text).split())
    if _PLAIN.fullmatch(text):
        return text
    # A fence is longer than any run of backticks inside.
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{room}{text}{room}{fence}"


def junit(outcomes: Sequence[Outcome]) -> bytes:
    """The check as JUnit's XML, a test for each case."""
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


def write_junit(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write JUnit's XML to ``path``. Raises ``AnswerError`` where it cannot be written."""
    try:
        replace_file(path, junit(outcomes))
    except OSError as error:
        raise AnswerError(f"{show(path)} cannot be written: {error.strerror or error}") from None


def github_annotations(outcomes: Sequence[Outcome], cases_file: Path) -> tuple[str, ...]:
    """GitHub's workflow commands: an error for each case that failed, a notice for each that changed."""
    lines = []
    for outcome in outcomes:
        if outcome.status != "same":
            level = "notice" if outcome.status == "changed" else "error"
            place = _place(cases_file, outcome.name)
            title = _escaped(f"fitter: {outcome.name}", is_property=True)
            lines.append(f"::{level} {place}title={title}::{_escaped(_sentence(outcome))}")
    return tuple(lines)


def _place(cases_file: Path, name: str) -> str:
    """Where the case stands in ``fitter.toml``, by its path in the repository; nothing where that is none of its."""
    file = cases_file.resolve()
    root = _repository(file)
    try:
        text = cases_file.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return ""
    if root is None:
        return ""
    table = re.escape(name.partition("/")[0])
    found = re.search(rf"^\s*\[\s*cases\s*\.\s*[\"']?{table}[\"']?\s*\]", text, re.MULTILINE)
    line = f"line={text.count(chr(10), 0, found.end()) + 1}," if found else ""
    return f"file={_escaped(file.relative_to(root).as_posix(), is_property=True)},{line}"


def _repository(file: Path) -> Path | None:
    """The directory that GitHub's paths begin at: git's top level, or that of the job, whichever is nearer to a file.

    Without both it is the working directory; ``None`` where the file is not below it either.
    """
    tops = [parent for parent in file.parents if (parent / ".git").exists()]
    if workspace := os.environ.get("GITHUB_WORKSPACE"):
        tops.append(Path(workspace).resolve())
    around = [top for top in tops if file.is_relative_to(top)]
    here = Path.cwd().resolve()
    return max(around, key=lambda top: len(top.parts), default=here if file.is_relative_to(here) else None)


def _sentence(outcome: Outcome) -> str:
    if outcome.error is not None:
        return str(outcome.error)
    failures = outcome.comparison.failures if outcome.comparison else ()
    why = "; ".join(causes(outcome))
    return ("; ".join(failures) or "changed within its limits") + (f" ({why})" if why else "")


def _lines(outcome: Outcome) -> list[str]:
    found = outcome.comparison
    if found is None:
        return []
    lines = [*found.failures]
    lines += [" ".join(filter(None, (move.what, *_columns(move), move.detail))) for move in found.moves]
    return [*lines, *(f"changed: {cause}" for cause in causes(outcome))]


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _escaped(text: str, *, is_property: bool = False) -> str:
    """``text`` as GitHub's runner reads it."""
    signs = {"%": "%25"} | ({":": "%3A", ",": "%2C"} if is_property else {})
    return "".join(signs.get(sign, sign) for sign in printable(text))
