"""The result of ``fitter tune`` as a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.model.files.source import show
from fitter.output.tables.narrow import table_of
from fitter.output.units import duration, speed
from fitter.planning.checked.tuning import is_quicker
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.checked.tuning import Tuning, TuningRun


def tuning_table(tuning: Tuning) -> RenderableType:
    """Draw all runs with estimated and measured times, and what won."""
    table = table_of(
        "s a turn", "± s", "estimated", "t/s prompt", "t/s each", spare=("± s", "estimated"), names="tried"
    )
    table.add_column("tried", overflow="fold")
    table.add_column("", style="dim", overflow="fold")
    for run in tuning.runs:
        numbers = ["-"] * 5
        if not run.problem:
            numbers = [f"{run.seconds:.3g}", f"{run.spread:.2g}", f"{run.estimated:.3g}"]
            numbers += [speed(1 / each) if each else "-" for each in (run.prompt, run.step)]
        table.add_row(*numbers, printable(run.text), _note(run, tuning))
    return Group(table, *(Text(line, overflow="fold") for line in _lines(tuning)))


def _note(run: TuningRun, tuning: Tuning) -> str:
    notes = [printable(run.problem)] if run.problem else []
    if run is tuning.best:
        notes.append("best")
    elif not run.problem and not is_quicker(tuning.best, run):
        notes.append("as quick as the best, within noise")
    if run.doubt:
        notes.append(run.doubt)
    if run.hit_rate is not None:
        notes.append(f"experts found: {run.hit_rate:.0%}")
    if run.acceptance is not None:
        notes.append(f"drafts accepted: {run.acceptance:.0%}")
    return ", ".join(notes)


def _lines(tuning: Tuning) -> list[str]:
    first, best = tuning.runs[0], tuning.best
    if best is first:
        lines = ["nothing that was tried is quicker than the plan beyond noise"]
    else:
        lines = [f"{printable(best.text)}: {1 - best.seconds / first.seconds:.0%} less time than the plan"]
    if tuning.left:
        lines.append(f"not tried, for want of time (--minutes): {printable(', '.join(tuning.left))}")
    if tuning.cut:
        lines.append(f"measured with {tuning.cut}")
    if doubted := [run for run in tuning.runs if not run.problem and run.doubt]:
        whose = "none" if len(doubted) == len(tuning.runs) else f"{len(doubted)} of {len(tuning.runs)} runs not"
        why = f"since something else decided the times ({doubted[0].doubt}): tune again on an idle machine"
        lines.append(f"{whose} stored, {why}")
    if tuning.stored and tuning.tuned and not math.isinf(best.seconds):
        lines.append(
            f"stored in {show(Path(tuning.stored))}: later plans estimate {duration(tuning.tuned)} for the best"
        )
    return lines
