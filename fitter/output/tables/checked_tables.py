"""The results of ``fitter verify``, ``calibrate`` and ``tune`` as tables: what ran for real."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fitter.machine.gpu_catalogue import capability_text
from fitter.model.files.source import show
from fitter.output.tables.narrow import NarrowTable, table_of
from fitter.planning.checked.tuning import is_quicker
from fitter.text import MIB, duration, human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.planning.checked.calibration import Calibration, Comparison
    from fitter.planning.checked.tuning import Tuning, TuningRun
    from fitter.planning.plan.verified import Kind, ServerUse, Verification, VerifiedRow


def verification_table(verification: Verification) -> RenderableType:
    """Draw the result of ``fitter verify``: predicted and real bytes, the memory of each device, the verdict."""
    model = verification.model
    by = "" if verification.server is None else f" by\n{_program(verification.server)}"
    weights = f" ({model.architecture}, {human(model.bytes)} of weights), loaded{by}"
    title = Text.assemble((model.name, "bold"), weights, overflow="fold")
    sizes = table_of("buffer type", "bytes: predicted", "real", "difference", spare=("bytes: predicted",))
    exceeding = set(verification.exceeding)
    for row in verification.rows:
        differing = {difference.kind: difference for difference in row.differences}
        for kind in ("model", "context", "compute"):
            predicted, real = getattr(row.predicted, kind), getattr(row.real, kind)
            difference = differing.get(kind)
            style = "bold red" if difference in exceeding else ""
            if predicted or real:
                more = Text(f"{difference.more:+,}" if difference else "", style=style)
                sizes.add_row(f"{row.real.buffer_type} {kind}", f"{predicted:,}", taken_text(row, kind), more)
    memory = table_of("MiB", "free before", "after", "counted", "unaccounted", spare=("after", "free before"))
    for use in verification.memory:
        memory.add_row(use.name, mib(use.before), mib(use.after), mib(use.counted), mib(use.unaccounted))
    parts: list[RenderableType] = [title, sizes, Text(), memory]
    parts.append(
        Text(
            "unaccounted: memory taken beyond llama.cpp's count; negative if other programs freed memory, or if\n"
            "counted memory is not in use yet; - if the device always reports the same free memory"
        )
    )
    if verification.server is not None:
        parts += [Text(), *_served(verification.server)]
    for shared in verification.shared if verification.server is None else ():
        parts.append(Text(f"not loaded here: {shared.kind} {printable(shared.name)}", overflow="fold"))
    return Group(*parts, Text(), verdict(verification))


def taken_text(row: VerifiedRow, kind: Kind) -> str:
    """Write the real size of a kind; a llama-server rounds it, leaves it out, or maps a part of the file."""
    real, rounding = getattr(row.real, kind), 0 if row.rounding is None else getattr(row.rounding, kind)
    if kind not in row.unsaid:
        return f"{real:,}" if not rounding else f"{real:,} ± {rounding:,}"
    return f"{real:,} of the file" if real else "not said"


LATER = {
    "checkpoint": "a context checkpoint",
    "prompt": "a prompt in the prompt cache",
    "prompt cache": "the prompt cache",
}
"""Kinds of memory that a llama-server takes after the load."""


def _program(use: ServerUse) -> str:
    return f"{printable(use.path)} {use.version}".rstrip()


def _served(use: ServerUse) -> Iterator[RenderableType]:
    """Draw the memory that a llama-server took after the load."""
    yield Text(f"{use.answered} of {use.prompts} prompts answered, {use.tokens:,} tokens, {use.slots} at a time")
    if use.refused:
        yield Text(f"the first that was not: {use.refused}", overflow="fold")
    later = table_of("then", "bytes: predicted", "real", "at most", spare=("at most",))
    for each in use.later:
        tokens = "" if each.tokens is None else f" of {each.tokens:,} tokens"
        name = f"{LATER[each.kind]}{tokens}" + (f" ({each.count} prompts)" if each.kind == "prompt cache" else "")
        real = "none said" if each.real is None else f"{each.real:,} ± {each.rounding:,}"
        most = "no limit" if each.most is None else f"{each.most:,}"
        style = "bold red" if each.more else ""
        later.add_row(name, "-" if each.predicted is None else f"{each.predicted:,}", Text(real, style=style), most)
    if use.later:
        yield later
    if use.expert_hit_rate is not None:
        used = use.expert_hits + use.expert_misses
        yield Text(f"{use.expert_hit_rate:.1%} of {used:,} used experts were in the cache of experts")
    if use.reallocations:
        yield Text(f"{use.reallocations} graphs took other memory than was reserved", style="bold red")
    yield from _growth(use)
    if use.own is None or use.resident is None:
        yield Text("memory of its process: this system does not say it")
        return
    process = table_of("MiB of its process", "resident", "of files", "its own", "counted", "more", "planned", "margin")
    style = "" if use.is_within else "bold red"
    sizes = (use.resident, use.of_files, use.own, use.counted, use.unaccounted)
    planned = "no limit" if use.planned is None else mib(use.planned)
    process.add_row("at most", *(Text(mib(each), style=style) for each in sizes), planned, mib(use.margin))
    yield Text()
    yield process
    yield Text(
        "counted: what the plan counts without mapped files, and what was kept of the prompts; more: code,\n"
        "vocabulary and threads; planned: with all that may be kept of prompts"
    )


def _growth(use: ServerUse) -> Iterator[RenderableType]:
    """Draw the memory that grew while the server answered and waited."""
    if not use.growth:
        return
    grown = table_of("grew, MiB", "first half of the prompts", "second half", "by a prompt", "by a minute without one")
    for each in use.growth:
        sizes = (each.first, each.second, each.per_request, each.per_minute)
        grown.add_row(each.name, *(f"{size / MIB:+.1f}" for size in sizes))
    yield Text()
    yield grown
    yield Text(
        "of a device: with other programs; of the host: this process without what it keeps of prompts; memory that\n"
        "still grows in the second half may go on growing: plan a larger margin, or restart the server in time"
    )


def verdict(verification: Verification) -> Text:
    """Say in a line whether the load takes the predicted bytes."""
    exceeding, differences = verification.exceeding, verification.differences
    if verification.exceeding_later:
        words = (f"{LATER[use.kind]} {use.more:+,} bytes" for use in verification.exceeding_later)
        return Text.assemble(("more than predicted", "bold red"), ": ", ", ".join(words), overflow="fold")
    if verification.server is not None and not verification.server.is_within:
        return Text("more than planned: the memory of its process", style="bold red")
    if not differences:
        text = "every byte as predicted"
        if verification.server is not None:
            text = "as predicted, as far as its log says it"
        return Text(text, style="bold green")
    if exceeding:
        text, style = "more than predicted", "bold red"
    elif any(each.more > 0 for each in differences):
        text, style = f"within the tolerance of {human(verification.tolerance)}", "bold green"
    else:
        text, style = "less than predicted", "bold green"
    words = (f"{each.buffer_type} {each.kind} {each.more:+,} bytes" for each in exceeding or differences)
    return Text.assemble((text, style), ": ", ", ".join(words), overflow="fold")


_NAMES = "description"


def calibration_table(calibration: Calibration) -> RenderableType:
    """Draw the result of ``fitter calibrate``: the devices, the comparisons, every number that differs."""
    spare = ("free", "MiB: total", _NAMES, "twin")
    columns = ("MiB: total", "free", "context", "outside", "margin")
    devices = table_of("device", *columns, spare=spare, names=_NAMES)
    devices.add_column("twin")
    devices.add_column(_NAMES, overflow="fold")
    for device in calibration.devices:
        info, twin = device.info, device.twin
        sizes = (info.total, info.free, device.context, device.outside, device.margin)
        profile = "-" if twin is None else twin.profile
        if twin is not None and twin.compute_capability:
            profile += f" {capability_text(twin.compute_capability)}"
        devices.add_row(info.name, *map(mib, sizes), profile, info.description)
    parts: list[RenderableType] = [
        devices,
        Text(
            "context: memory that a process takes just by using the device. outside: memory that a loaded model takes\n"
            "beyond that and beyond llama.cpp's own count. margin: memory that a fit leaves free by default."
        ),
        Text(),
    ]
    parts += [Text(_comparison(comparison)) for comparison in calibration.comparisons]
    if not calibration.is_exact:
        parts += [Text(), _differences(calibration)]
    if calibration.stored is not None:
        parts += [Text(), Text(f"stored in {show(calibration.stored)}", overflow="fold")]
    return Group(*parts)


def _comparison(comparison: Comparison) -> str:
    names = ",".join(comparison.devices)
    sides = {
        "twin": f"{names} and virtual twin{'s' * (len(comparison.devices) > 1)}",
        "real load": f"{names}, loaded for real and as a dummy",
    }
    differing = {(difference.model, difference.configuration) for difference in comparison.differences}
    loads = "1 load" if comparison.loads == 1 else f"{comparison.loads} loads"
    verdict = f"bytes differ in {len(differing)}" if differing else "no byte differs"
    return f"{sides[comparison.between]}: {loads}, {verdict}"


def _differences(calibration: Calibration) -> Table:
    table = NarrowTable(spare=("against", "devices", "other", "model", "configuration"), fold=16)
    for column in ("devices", "against", "model", "configuration", "what"):
        table.add_column(column, overflow="fold")
    for column in ("bytes: real", "other", "difference"):
        table.add_column(column, justify="right", overflow="fold")
    for comparison in calibration.comparisons:
        for each in comparison.differences:
            more = f"{each.other - each.real:+d}" if isinstance(each.real, int) and isinstance(each.other, int) else ""
            where = (",".join(comparison.devices), comparison.between, each.model, each.configuration, each.what)
            table.add_row(*where, str(each.real), str(each.other), more)
    return table


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
