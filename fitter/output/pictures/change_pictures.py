"""Pictures of sizes that changed: bars of one case of a check, and line charts over builds in small panels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.output.pictures.drawing import BOLD, EDGE, Part, fitting, svg, text
from fitter.text import human, speed

_BAR = 12


def row_of(move: Mapping[str, Any]) -> dict[str, Any]:
    """Write a number that changed, given as in the check's JSON, with its words."""
    before, after, unit = move["before"], move["after"], move["unit"]
    difference = "" if before is None or not unit else _figure(after - before, unit)
    if difference and after > before:
        difference = f"+{difference}"
    share = f"{100 * (after - before) / before:+.1f} %" if before and unit else ""
    return {
        **move,
        "before_text": _figure(before, unit),
        "after_text": _figure(after, unit),
        "change": difference,
        "share": share,
    }


def _figure(value: float | None, unit: str | None) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return human(int(value))
    if unit in ("tokens", "layers"):
        return f"{int(value):,}"
    if not unit:
        return "yes" if value else "no"
    return f"{'-' if value < 0 else ''}{speed(abs(value)) if value else 0} t/s"


def moves_svg(moves: Sequence[Mapping[str, Any]], width: int) -> str:
    """Draw two bars for each place whose bytes changed: before, and now; empty where no bytes did."""
    shown = [move for move in moves if move["unit"] == "bytes" and move["before"] is not None]
    if not shown:
        return ""
    largest = max(max(move["before"], move["after"]) for move in shown) or 1
    scale = (width - 2 * EDGE - 110) / largest
    rows = [_row(move, width, scale) for move in shown]
    label = "; ".join(f"{move['what']}: {human(move['before'])}, now {human(move['after'])}" for move in shown)
    return svg(rows, label, width=width, is_alone=False)


def _row(move: Mapping[str, Any], width: int, scale: float) -> Part:
    """Draw two bars below their name, which may be long."""
    top = 18
    lines = [f'<text class="name" x="{EDGE}" y="11">{fitting(move["what"], width - 2 * EDGE, BOLD)}</text>']
    for i, (kind, size) in enumerate((("taken", move["before"]), (_colour(move), move["after"]))):
        y = top + 1 + i * (_BAR + 4)
        wide = max(size * scale, 0.5)
        lines.append(f'<rect class="{kind}" x="{EDGE}" y="{y}" width="{wide:.1f}" height="{_BAR}"/>')
        words = f"{'budget' if move['budget'] and not i else ('before', 'now')[i]} {human(size)}"
        lines.append(f'<text class="small" x="{EDGE + wide + 6:.1f}" y="{y + 10}">{text(words)}</text>')
    return Part(tuple(lines), top + 2 * (_BAR + 4) + 12)


def _colour(move: Mapping[str, Any]) -> str:
    return "p5" if move["failure"] else "context" if move["after"] > move["before"] else "compute"


WIDTH, COLUMNS = 840, 2
_MARGIN, _TOP, _BOTTOM = 24, 66, 12
_PANEL, _PLOT, _LEFT, _RIGHT = 168, 66, 8, 84
"""Height of a panel and of its plot, and free width at the left and right of the plot (right: last values)."""
_LETTER = 6.2
"""Width of a small letter."""

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 } .name { font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.line { fill: none; stroke-width: 2 } .zero { stroke: #d1d9e0; stroke-width: 1 }
.s0 { stroke: #0072b2; fill: #0072b2 } .s1 { stroke: #e69f00; fill: #e69f00 }
.line.s0, .line.s1 { fill: none } text.s0, text.s1 { stroke: none; font-size: 11px }
.bad { stroke: #cf222e; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b1 } .zero { stroke: #3d444d } .bad { stroke: #ff7b72 }
  .s0 { stroke: #4aa3df; fill: #4aa3df } .s1 { stroke: #f0b429; fill: #f0b429 }
}
"""

_At = Callable[[int, float], tuple[float, float]]
"""Converts a step and its value to a point."""


@dataclass(frozen=True)
class Line:
    """A line of a panel. ``values``: one for each step, ``None`` without one.

    ``last``: words at its end; ``most``: words at the value farthest from 0, if that is not the last.
    """

    values: tuple[float | None, ...]
    last: str
    most: str = ""


@dataclass(frozen=True)
class Panel:
    """One small chart. ``lines``: one for each name of the legend; ``bad``: the steps that get a cross."""

    title: str
    subtitle: str
    lines: tuple[Line, ...]
    bad: tuple[int, ...] = ()


def chart(title: str, legend: Sequence[str], bad: str, steps: Sequence[str], panels: Sequence[Panel]) -> str:
    """Draw the SVG. ``steps``: words below each panel; ``legend``: names of the lines; ``bad``: meaning of a cross."""
    rows = -(-len(panels) // COLUMNS)
    height = _TOP + rows * _PANEL + _BOTTOM
    width = (WIDTH - _MARGIN * (COLUMNS + 1)) / COLUMNS
    drawn = [
        line
        for index, panel in enumerate(panels)
        for line in _panel(
            panel,
            steps,
            _MARGIN + (index % COLUMNS) * (width + _MARGIN),
            _TOP + (index // COLUMNS) * _PANEL,
            width - _LEFT - _RIGHT,
        )
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
            f'aria-label="{text(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="{_MARGIN}" y="26">{text(title)}</text>',
            *_legend(legend, bad),
            *drawn,
            "</svg>\n",
        ]
    )


def _legend(names: Sequence[str], bad: str) -> Iterator[str]:
    x, y = float(_MARGIN), 46
    for index, name in enumerate(names):
        yield f'<path class="line s{index}" d="M{x:.0f} {y - 4}h18"/>'
        yield f'<text class="small" x="{x + 24:.0f}" y="{y}">{text(name)}</text>'
        x += 44 + _LETTER * len(name)
    yield _cross(x + 5, y - 4)
    yield f'<text class="small" x="{x + 16:.0f}" y="{y}">{text(bad)}</text>'


def _panel(panel: Panel, steps: Sequence[str], x: float, y: float, width: float) -> Iterator[str]:
    values = [value for line in panel.lines for value in line.values if value is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    top, left = y + 42, x + _LEFT

    def at(step: int, value: float) -> tuple[float, float]:
        share = (value - low) / (high - low) if high > low else 0.5
        return left + width * step / max(len(steps) - 1, 1), top + _PLOT * (1 - share)

    yield f'<text class="name" x="{x:.0f}" y="{y + 6:.0f}">{text(panel.title)}</text>'
    yield f'<text class="small" x="{x:.0f}" y="{y + 21:.0f}">{text(panel.subtitle)}</text>'
    zero = at(0, 0.0)[1]
    yield f'<path class="zero" d="M{left:.1f} {zero:.1f}h{width:.1f}"/>'
    for index, line in enumerate(panel.lines):
        points = [(step, at(step, value)) for step, value in enumerate(line.values) if value is not None]
        yield f'<path class="line s{index}" d="{_path(points)}"/>'
        for _, (px, py) in points:
            yield f'<circle class="s{index}" cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>'
        yield from _peak(line, index, at)
    yield from _last_values(panel, at, left + width + 8, len(steps))
    for step in panel.bad:
        yield _cross(at(step, 0.0)[0], top - 11)
    yield from _ticks(steps, at, top + _PLOT + 16)


def _peak(line: Line, index: int, at: _At) -> Iterator[str]:
    """Write the words at the value farthest from 0."""
    values = [(abs(value), -step, value) for step, value in enumerate(line.values) if value is not None]
    if line.most and values:
        _, step, value = max(values)
        x, y = at(-step, value)
        place = y - 6 if value > 0 else y + 14
        yield f'<text class="s{index}" x="{x:.1f}" y="{place:.1f}" text-anchor="middle">{text(line.most)}</text>'


def _last_values(panel: Panel, at: _At, x: float, n_steps: int) -> Iterator[str]:
    """Write the words at the ends of the lines, one above the other if the ends are close."""
    ends = []
    for index, line in enumerate(panel.lines):
        values = [value for value in line.values if value is not None]
        if values:
            ends.append((at(n_steps - 1, values[-1])[1], index, line.last))
    above = float("inf")
    for y, index, words in sorted(ends, reverse=True):
        above = min(y + 4, above - 13)
        yield f'<text class="s{index}" x="{x:.1f}" y="{above:.1f}">{text(words)}</text>'


def _ticks(steps: Sequence[str], at: _At, y: float) -> Iterator[str]:
    """Write the names of the steps: all, or the first and the last if there is no room for more."""
    room = at(1, 0.0)[0] - at(0, 0.0)[0]
    every = max(map(len, steps)) * _LETTER < room
    for step, name in enumerate(steps):
        if every or step in (0, len(steps) - 1):
            anchor = "middle" if every else "end" if step else "start"
            x = at(step, 0.0)[0]
            yield f'<text class="small" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(name)}</text>'


def _path(points: Sequence[tuple[int, tuple[float, float]]]) -> str:
    """Draw a line through the points, interrupted at steps without a value."""
    words = []
    before = None
    for step, (x, y) in points:
        words.append(f"{'L' if before == step - 1 else 'M'}{x:.1f} {y:.1f}")
        before = step
    return "".join(words)


def _cross(x: float, y: float) -> str:
    return f'<path class="bad" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'
