"""A picture of the places of layers: layers from left to right, a row for each group of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fitter.output.pictures.drawing import (
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
from fitter.planning.plan.layer_map import HOST_NAME, LayerMap, MapCell
from fitter.text import human

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
    entries = [(_shape(place, layer_map.places), place) for place in used]
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


def _shape(place: str, places: Sequence[str]) -> str:
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
            f'<rect {_shape(name, layer_map.places)} x="{x:.1f}" y="{y:.1f}" '
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
