"""The bars of a plan and the map of its layers in letters, for a terminal of any width; colours only help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fitter.output.pictures.plan_pictures import PARTS, parts_of, shown
from fitter.output.tables.narrow import short_name
from fitter.planning.plan.layer_map import HOST_NAME, LayerMap
from fitter.text import human, printable

_SIGNS = {
    "model": ("w", "blue"),
    "context": ("k", "yellow"),
    "compute": ("c", "green"),
    "shared": ("s", "magenta"),
    "later": ("l", "cyan"),
    "margin": ("-", "dim"),
    "left": (".", "dim"),
    "taken": ("x", "dim"),
}
"""Letter and colour of each part of a bar."""

_DEVICES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_HOST, _SEVERAL, _NOTHING = "h", "+", " "
_WIDEST = 120
_NAMES_BESIDE = 64
"""From this width on, in columns, names stand beside a row instead of above."""
_NAME = 22


@dataclass(frozen=True)
class PlanPicture:
    """The picture of a plan's JSON document, with its layer map if known."""

    plan: Mapping[str, Any]
    layers: LayerMap | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        lines = [Text(), *_bars(self.plan, width)]
        if self.layers is not None:
            lines += [Text(), *_layers(self.layers, width)]
        yield Text("\n").join(lines)


def _bars(plan: Mapping[str, Any], width: int) -> Iterator[Text]:
    lacking = {problem["device"]: problem["missing"] for problem in plan["problems"]}
    used: set[str] = set()
    for use in shown(plan):
        total = "" if use["total"] is None else f" of {human(use['total'])}"
        words = [use["name"], short_name(use["description"]), f"{human(use['used'])}{total}"]
        line = Text(printable(" ".join(filter(None, words))), overflow="ellipsis", no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        yield line
        if missing := lacking.get(use["name"]):
            yield Text(f"lacks {human(missing)}", style="bold red")
        parts = [(part, size) for part, size in parts_of(use) if size]
        used |= {part for part, _ in parts}
        bar = Text("|")
        for (part, _), count in zip(parts, _shares([size for _, size in parts], width - 2), strict=True):
            sign, style = _SIGNS[part]
            bar.append(sign * count, style)
        yield bar.append("|")
    yield from _wrapped([(*_SIGNS[part], words) for part, words in PARTS.items() if part in used], width)


def _shares(sizes: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` columns in proportion to ``sizes``; nothing present gets less than one."""
    total = sum(sizes)
    if not total:
        return []
    counts = [max(round(width * size / total), 1) for size in sizes]
    # the largest one gets the rest of the rounding
    counts[counts.index(max(counts))] += width - sum(counts)
    return counts


def _layers(layer_map: LayerMap, width: int) -> Iterator[Text]:
    is_beside = width >= _NAMES_BESIDE
    room = width - (_NAME + 1 if is_beside else 0)
    columns = layer_map.n_layer + 2
    each = -(-columns // room)
    yield Text("where each layer is" + (f" ({each} layers for each letter)" if each > 1 else ""), style="bold")
    places_of = {(cell.group, cell.layer): {name for name, _ in cell.bytes} for cell in layer_map.cells}
    has_several = False
    for group in layer_map.groups:
        row = Text(f"{group:>{_NAME}} " if is_beside else f"{group}\n")
        for first in range(-1, layer_map.n_layer + 1, each):
            there = [places_of.get((group, layer), set()) for layer in range(first, min(first + each, columns - 1))]
            sign, style = _letter(set().union(*there), layer_map.places)
            has_several = has_several or sign == _SEVERAL
            row.append(sign, style)
        yield row
    used = [place for place in layer_map.places if layer_map.on(place)]
    signs = [(*_letter({place}, layer_map.places), place) for place in used]
    if has_several:
        signs.append((_SEVERAL, "", "several"))
    yield from _wrapped(signs, width)


def _letter(names: set[str], all_places: Sequence[str]) -> tuple[str, str]:
    """Return letter and colour of a cell."""
    if len(names) != 1:
        return (_SEVERAL, "bold") if names else (_NOTHING, "")
    (name,) = names
    if name == HOST_NAME:
        return _HOST, "dim"
    index = all_places.index(name)
    return _DEVICES[index % len(_DEVICES)], _COLOURS[index % len(_COLOURS)]


def _wrapped(entries: Sequence[tuple[str, str, str]], width: int) -> Iterator[Text]:
    """Write a legend in as many lines as it needs: letter, colour, words."""
    line = Text()
    for sign, style, words in entries:
        entry = Text.assemble((sign, style), f" {printable(words)}")
        if line and len(line) + 3 + len(entry) > width:
            yield line
            line = Text()
        line = Text.assemble(line, "   " if line else "", entry)
    if line:
        yield line
