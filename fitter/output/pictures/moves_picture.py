"""Changed sizes of a case of a check, as a picture and as rows of a table. Bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
