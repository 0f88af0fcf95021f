"""The result of ``fitter calibrate`` as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fitter.machine.gpu_catalogue import capability_text
from fitter.model.files.source import show
from fitter.output.tables.narrow import NarrowTable, table_of
from fitter.text import mib

if TYPE_CHECKING:
    from fitter.planning.checked.calibration import Calibration, Comparison

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
