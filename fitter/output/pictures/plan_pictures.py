"""Pictures of a plan: a bar of memory for each device and the host, and a map of the places of its layers.

A page has them as SVG, a terminal of any width in letters, where colours only help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fitter.output.pictures.drawing import (
    BOLD,
    EDGE,
    N_COLOURS,
    NAMES,
    NARROW,
    SMALL,
    WIDE,
    Part,
    fitting,
    hatch,
    legend,
    svg,
    text,
)
from fitter.output.tables.narrow import short_name
from fitter.planning.plan.layer_map import HOST_NAME, LayerMap, MapCell
from fitter.text import human, printable

PARTS = {
    "model": "weights",
    "context": "KV cache",
    "compute": "compute buffers",
    "shared": "beside the model",
    "later": "later",
    "margin": "margin, stays free",
    "left": "left",
    "taken": "not free",
}
"""Parts of a bar from left to right: name of the colour, words of the legend."""

_TAKEN = ("model", "context", "compute", "shared", "later")
_BAR = 22
_BOLD = 9.8
"""Width of a wide letter of a name."""
_FAR = 3
"""A host that is larger than the largest device by this factor gets its own scale."""


def shown(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries with a bar, from a plan's JSON document: devices, host, and memory that they share."""
    uses = [_loaded(use) for use in (*plan["devices"], {"name": "host", "description": "", **plan["host"]})]
    return [*uses, *(_pool(pool, uses) for pool in plan.get("pools", ()))]


def _loaded(use: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the memory of a real load, whose compute buffers may be larger."""
    more = use.get("more_in_use", 0)
    left = use["left"]
    loaded = {"used": use["used"] + more, "left": None if left is None else left - more}
    return {**use, **loaded, "compute": use.get("compute", 0) + more, "more_in_use": 0} if more else use


def _pool(pool: Mapping[str, Any], uses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    members = [use for use in uses if use["name"] in pool["members"]]
    sums = {name: sum(use.get(name, 0) for use in members) for name in _TAKEN}
    # pages of the file that both map count once
    return {**_loaded(pool), **sums, "model": sums["model"] - pool["mapped_twice"], "description": "what they share"}


def parts_of(use: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """List the parts of a bar in bytes. Without a limit there is no rest and no margin."""
    for name in _TAKEN:
        yield name, use.get(name, 0)
    if use["total"] is not None and use["free"] is not None:
        left = max(use["left"], 0)
        margin = min(use["margin"] or 0, left)
        yield "margin", margin
        yield "left", left - margin
        yield "taken", max(min(use["total"] - use["free"], use["total"] - use["used"]), 0)


def bars(plan: Mapping[str, Any], width: int = WIDE) -> tuple[Part, ...]:
    """Draw the bars and their legend. A bar without a limit ends with the used bytes; missing bytes exceed memory."""
    rows_of = shown(plan)
    n_devices = len(plan["devices"])
    left = NAMES if width > NARROW else EDGE
    lacking = {problem["device"]: problem["missing"] for problem in plan.get("problems", ())}
    longest = [max(use["total"] or 0, use["used"]) for use in rows_of]
    devices = max(longest[:n_devices], default=0)
    others = max(longest[n_devices:])
    # a host with far more memory would leave nothing to see of the devices
    is_apart = bool(devices) and others > _FAR * devices
    scales = [devices if is_apart else max(devices, others)] * n_devices
    scales += [others if is_apart else max(devices, others)] * (len(rows_of) - n_devices)
    rows = [
        _row(use, left, width, (width - left - EDGE) / (scale or 1), lacking)
        for use, scale in zip(rows_of, scales, strict=True)
    ]
    if is_apart:
        words = "the host has a scale of its own" + (", as what it shares" if plan.get("pools") else "")
        rows.append(Part((f'<text class="small" x="{left}" y="0">{words}</text>',), 16))
    parts = {part for use in rows_of for part, size in parts_of(use) if size}
    entries = [(_part_shape(part), words) for part, words in PARTS.items() if part in parts]
    if lacking:
        entries.append(('class="over"', "no more than this may be used"))
    return (*rows, legend(entries, left, width))


def bars_svg(plan: Mapping[str, Any], title: str = "", *, width: int = WIDE, is_alone: bool = True) -> str:
    """Draw the SVG of a plan's memory, given as its JSON document."""
    label = f"{title}: " if title else ""
    return svg(bars(plan, width), label + said(plan), width=width, title=title, is_alone=is_alone)


def said(plan: Mapping[str, Any]) -> str:
    """Describe the bars in words."""
    return "; ".join(f"{use['name']}: {_used(use)}" for use in shown(plan))


def _used(use: Mapping[str, Any]) -> str:
    total = "" if use["total"] is None else f" of {human(use['total'])}"
    return f"{human(use['used'])}{total} used"


def _part_shape(part: str) -> str:
    return f'class="{part}" {hatch(part)}' if part == "margin" else f'class="{part}"'


def _row(use: Mapping[str, Any], left: float, width: int, scale: float, lacking: Mapping[str, int]) -> Part:
    room = width - left - EDGE
    missing = lacking.get(use["name"], 0)
    lacks = f"lacks {human(missing)}" if missing else ""
    beside = room - (SMALL + 1) * (len(lacks) + 2)
    if width > NARROW:
        name = fitting(use["name"], left - 12 - EDGE, _BOLD)
        # a name that does not fit there stands above the bar
        bar, words = 12, ["" if name == text(use["name"]) else use["name"], use["description"], _used(use)]
        lines = [f'<text class="name" x="{left - 12}" y="{bar + 16}" text-anchor="end">{name}</text>']
        lines.append(f'<text class="small" x="{left}" y="6">{fitting(" · ".join(filter(None, words)), beside)}</text>')
    else:
        bar, words = 24 if use["description"] or missing else 8, [use["name"], _used(use)]
        lines = [f'<text class="name" x="{left}" y="2">{fitting(" · ".join(words), room, BOLD)}</text>']
        lines.append(f'<text class="small" x="{left}" y="18">{fitting(use["description"], beside)}</text>')
    if missing:
        y = 6 if width > NARROW else 18
        lines.append(f'<text class="small missing" x="{width - EDGE}" y="{y}" text-anchor="end">{text(lacks)}</text>')
    x = float(left)
    for name, size in parts_of(use):
        if size:
            wide = max(size * scale, 0.5)
            lines.append(
                f'<rect {_part_shape(name)} x="{x:.1f}" y="{bar}" width="{wide:.1f}" height="{_BAR}">'
                f"<title>{text(PARTS[name])}: {human(size)}</title></rect>"
            )
        x += size * scale
    if missing and use["free"] is not None:
        # the end of the usable memory
        limit = left + max(use["free"] - use["margin"], 0) * scale
        lines.append(f'<path class="limit" d="M{limit:.1f} {bar - 4}v{_BAR + 8}"/>')
    return Part(tuple(lines), bar + _BAR + 24)


_ROW, _GAP = 20, 5
_LABEL = 8.6
"""Width of a letter of a name on its layers."""


@dataclass(frozen=True)
class Run:
    """Neighbouring layers whose tensors of one group are in the same places. ``bytes``: the sum by place."""

    group: str
    first: int
    last: int
    bytes: tuple[tuple[str, int], ...]

    def layers(self, n_layer: int) -> str:
        """Write the layers in words."""
        first, last = (_column_name(layer, n_layer) for layer in (self.first, self.last))
        if self.first == self.last:
            return first if self.first in (-1, n_layer) else f"layer {first}"
        return f"layers {first} to {last}"


def runs(layer_map: LayerMap) -> list[Run]:
    """Join neighbours of the map with the same places."""
    joined = []
    for group in layer_map.groups:
        cells = [cell for cell in layer_map.cells if cell.group == group]
        numbered = list(enumerate(cells))
        for _, members in groupby(numbered, key=lambda each: (each[1].layer - each[0], _places(each[1], layer_map))):
            row = [cell for _, cell in members]
            sums: dict[str, int] = {}
            for name, size in (pair for cell in row for pair in cell.bytes):
                sums[name] = sums.get(name, 0) + size
            joined.append(Run(group, row[0].layer, row[-1].layer, tuple(sums.items())))
    return joined


def _places(cell: MapCell, layer_map: LayerMap) -> tuple[object, ...]:
    # the input and the output are no layers
    kind = cell.layer if cell.layer in (-1, layer_map.n_layer) else None
    total = sum(size for _, size in cell.bytes)
    return (kind, *((name, round(20 * size / total)) for name, size in cell.bytes))


def _column_name(layer: int, n_layer: int) -> str:
    return "before the layers" if layer < 0 else "output" if layer == n_layer else str(layer)


def layer_picture(layer_map: LayerMap, width: int = WIDE) -> tuple[Part, ...]:
    """Draw a row for each group, the numbers of the layers below them, and a legend of the devices."""
    is_wide = width > NARROW
    left = NAMES if is_wide else EDGE
    column = (width - left - EDGE) / (layer_map.n_layer + 2)
    rows = []
    for group, members in by_place(layer_map).items():
        top = 0 if is_wide else 16
        if is_wide:
            lines = [f'<text class="small" x="{left - 8}" y="14" text-anchor="end">{text(group)}</text>']
        else:
            lines = [f'<text class="small" x="{left}" y="11">{text(group)}</text>']
        for run in members:
            lines += _drawn(run, layer_map, left + column * (run.first + 1), top, column)
        rows.append(Part(tuple(lines), top + _ROW + _GAP))
    used = [place for place in layer_map.places if layer_map.on(place)]
    entries = [(_place_shape(place, layer_map.places), place) for place in used]
    return (*rows, _numbers(layer_map.n_layer, left, column), legend(entries, left, width))


def layer_svg(layer_map: LayerMap, *, width: int = WIDE, is_alone: bool = True) -> str:
    """Draw the SVG of the map."""
    return svg(layer_picture(layer_map, width), _description(layer_map), width=width, is_alone=is_alone)


def _description(layer_map: LayerMap) -> str:
    """The map in words."""
    return "Where the layers are: " + "; ".join(
        f"{run.group}, {run.layers(layer_map.n_layer)}: {' and '.join(name for name, _ in run.bytes)}"
        for run in runs(layer_map)
    )


def _place_shape(place: str, places: Sequence[str]) -> str:
    if place == HOST_NAME:
        return f'class="host" {hatch("host")}'
    return f'class="{colour(place, places)}"'


def colour(place: str, places: Sequence[str]) -> str:
    """Return the class of a device's colour."""
    return f"p{places.index(place) % N_COLOURS}"


def _drawn(run: Run, layer_map: LayerMap, x: float, top: float, column: float) -> Iterator[str]:
    wide = column * (run.last - run.first + 1)
    total = sum(size for _, size in run.bytes)
    y = float(top)
    words = f"{run.group}, {run.layers(layer_map.n_layer)}: "
    words += ", ".join(f"{human(size)} on {'the host' if name == HOST_NAME else name}" for name, size in run.bytes)
    labels: list[str] = []
    yield f"<g><title>{text(words, None)}</title>"
    for name, size in run.bytes:
        high = _ROW * size / total
        yield (
            f'<rect {_place_shape(name, layer_map.places)} x="{x:.1f}" y="{y:.1f}" '
            f'width="{max(wide, 0.5):.1f}" height="{high:.1f}"/>'
        )
        if high > 12 and wide > _LABEL * len(name) + 6:
            labels += _label(name, layer_map.places, x + wide / 2, y + high / 2 + 4)
        y += high
    if run.last > run.first and column > 2.5:
        lines = "".join(f"M{x + column * i:.1f} {top}v{_ROW}" for i in range(1, run.last - run.first + 1))
        yield f'<path class="layers" d="{lines}"/>'
    # text lies above the lines between layers
    yield from labels
    yield "</g>"


def _label(name: str, places: Sequence[str], x: float, y: float) -> Iterator[str]:
    if name == HOST_NAME:
        wide = SMALL * len(name) + 8
        yield f'<rect class="taken" x="{x - wide / 2:.1f}" y="{y - 11:.1f}" width="{wide:.1f}" height="14"/>'
        yield f'<text class="on host" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text(name)}</text>'
    else:
        kind = colour(name, places)
        yield f'<text class="on {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{fitting(name, 200)}</text>'


def _numbers(n_layer: int, left: float, column: float) -> Part:
    """Draw every n-th layer's number below its column."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**9) if step * column >= 26)
    lines = [
        f'<text class="small" x="{left + column * (layer + 1.5):.1f}" y="10" text-anchor="middle">{layer}</text>'
        for layer in range(0, n_layer, step)
    ]
    return Part(tuple(lines), 24)


def by_place(layer_map: LayerMap) -> Mapping[str, list[Run]]:
    """List the runs of each group."""
    table: dict[str, list[Run]] = {}
    for run in runs(layer_map):
        table.setdefault(run.group, []).append(run)
    return table


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
