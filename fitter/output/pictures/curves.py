"""Memory and speed of other contexts, speed for users, and trade-offs of a grid, as small charts.

pygal draws them in the page's colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.planning.plan.turns import Turns
from fitter.planning.tables.parameter_rows import ContextPoint
from fitter.text import human, printable, speed

_WIDTH, _HEIGHT = 380, 230
_SMALL_DOT, _CHOSEN_DOT = 3, 7

STYLE = """
.pygal-chart { width: 100%; height: auto; font-family: inherit; overflow: visible }
.pygal-chart .background { fill: none } .pygal-chart text { font-size: 12px; fill: currentColor; stroke: none }
.pygal-chart .axis .line { stroke: var(--line); fill: none } .pygal-chart .axis.x text { text-anchor: middle }
.pygal-chart .axis.y text { text-anchor: end }
.pygal-chart .axis .guide.line { stroke-dasharray: 3 4 } .pygal-chart .vertical .axis.x .guide.line { opacity: 0 }
.pygal-chart .nofill { fill: none } .pygal-chart .line { stroke-width: 2 } .pygal-chart .title { text-anchor: middle }
.pygal-chart .serie-0 .line, .pygal-chart .serie-0 .dot { stroke: var(--first) }
.pygal-chart .serie-0 .dot { fill: var(--first) }
.pygal-chart .serie-1 .line, .pygal-chart .serie-1 .dot { stroke: var(--second) }
.pygal-chart .serie-1 .dot { fill: var(--second) } .pygal-chart .serie-1 .line { stroke-dasharray: 7 4 }
.pygal-chart .showable { visibility: hidden }
.pygal-chart .text-overlay, .pygal-chart .tooltip-overlay { display: none }
"""
"""Style for all charts of a page, which has ``--line``, ``--first`` and ``--second``."""


@dataclass(frozen=True)
class Chart:
    """A chart. ``lines``: names in the legend, in the order of the colours."""

    title: str
    lines: tuple[str, ...]
    svg: str


def charts(points: Sequence[ContextPoint], chosen: int) -> tuple[Chart, ...]:
    """Draw the charts of ``points``, with a larger dot at the ``chosen`` context; none for fewer than two points."""
    if len(points) < 2:
        return ()
    tested = [point for point in points if point.devices or point.host]
    fits = [point for point in tested if point.fits]
    drawings = []
    if len(tested) > 1:
        memory = {"on devices": [(p.n_ctx, float(p.devices)) for p in tested if any(q.devices for q in tested)]}
        memory["in host memory"] = [(p.n_ctx, float(p.host)) for p in tested]
        drawings.append(_chart("memory", {name: line for name, line in memory.items() if line}, chosen, _bytes))
    generation = {"for the request": _line(fits, "generation_tokens_per_second")}
    if full := _line(fits, "full_context_tokens_per_second"):
        generation["with a full context"] = full
    for kind, lines in (("generation", generation), ("prompt", {"prompt": _line(fits, "prompt_tokens_per_second")})):
        if all(len(line) > 1 for line in lines.values()):
            drawings.append(_chart(f"{kind}, tokens per second (estimated)", lines, chosen, speed))
    return tuple(drawings)


def _line(points: Sequence[ContextPoint], field: str) -> list[tuple[int, float]]:
    """Return the contexts with the values of ``field``, where they are known."""
    values = ((point.n_ctx, getattr(point, field)) for point in points)
    return [(n_ctx, value) for n_ctx, value in values if value is not None]


def users_chart(turns: Turns) -> Chart | None:
    """Draw the speed of each and of all users, for one user up to all; ``None`` for one."""
    if len(turns.points) < 2:
        return None
    lines = {
        "all users": [(point.users, point.together) for point in turns.points],
        "each user": [(point.users, point.each) for point in turns.points],
    }
    return _chart("tokens per second (estimated)", lines, turns.knee, speed, _USERS)


def tokens(n_ctx: int) -> str:
    """Write a context for an axis: ``512``, ``4k``, ``14.8k``, ``1M``."""
    if n_ctx < 1024:
        return str(n_ctx)
    number, unit = (n_ctx / 2**20, "M") if n_ctx >= 2**20 else (n_ctx / 2**10, "k")
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


@dataclass(frozen=True)
class _Axis:
    """The horizontal axis: its name, how a mark is written, and the unit of its numbers."""

    name: str
    write: Callable[[int], str]
    unit: str


_CONTEXTS = _Axis("context", tokens, "tokens")
_USERS = _Axis("users", str, "users")


def _bytes(size: float) -> str:
    return human(int(size))


def _chart(
    title: str,
    lines: dict[str, list[tuple[int, float]]],
    chosen: int,
    write: Callable[[float], str],
    axis: _Axis = _CONTEXTS,
) -> Chart:
    most = max(value for line in lines.values() for _, value in line)
    chart = new_chart(labelled_ticks(most, write))
    contexts = sorted({n_ctx for line in lines.values() for n_ctx, _ in line})
    chart.x_labels = [{"label": axis.write(n_ctx), "value": math.log2(n_ctx)} for n_ctx in _labelled(contexts, chosen)]
    for name, line in lines.items():
        chart.add(
            name,
            [
                {"value": (math.log2(n), value), "node": {"r": _CHOSEN_DOT if n == chosen else _SMALL_DOT}}
                for n, value in line
            ],
        )
    words = "; ".join(
        f"{name}: " + ", ".join(f"{write(value)} at {n_ctx:,} {axis.unit}" for n_ctx, value in line)
        for name, line in lines.items()
    )
    return Chart(title, tuple(lines), drawn(chart, f"{title}, by {axis.name}. {words}"))


def labelled_ticks(most: float, write: Callable[[float], str]) -> list[dict[str, Any]]:
    """Choose the marks of an axis from 0 to ``most`` or a little more, as pygal takes them."""
    step = _step(most or 1.0)
    return [{"label": write(step * i), "value": step * i} for i in range(math.ceil((most or 1.0) / step) + 1)]


def new_chart(marks: Sequence[Mapping[str, Any]]) -> Any:
    """Make a pygal chart without lines, with ``marks`` on its vertical axis; the page sets its colours."""
    from pygal import XY
    from pygal.style import Style

    chart = XY(
        style=Style(colors=("gray",) * 2, font_family="inherit", label_font_size=12),
        width=_WIDTH,
        height=_HEIGHT,
        margin=6,
        # half of the last word below the axis
        margin_right=28,
        show_legend=False,
        js=(),
        dots_size=_SMALL_DOT,
        range=(0, marks[-1]["value"]),
        y_labels=list(marks),
        disable_xml_declaration=True,
    )
    chart.uuid = "context"
    return chart


def _step(most: float) -> float:
    """Choose the distance of about four marks of an axis: 1, 2 or 5 times a power of ten (of GiB for bytes)."""
    unit = float(2**30) if most > 2**31 else 1.0
    exact = most / 4 / unit
    power = 10.0 ** math.floor(math.log10(exact))
    return float(next(unit * power * part for part in (1, 2, 5, 10) if power * part >= exact))


def _labelled(contexts: Sequence[int], chosen: int) -> list[int]:
    """Choose the contexts whose marks have room for a word; the chosen context always has."""
    shown = [chosen] if chosen in contexts else []
    reach = math.log2(contexts[-1] / contexts[0]) / 8
    for n_ctx in contexts:
        if all(abs(math.log2(n_ctx / other)) >= reach for other in shown):
            shown.append(n_ctx)
    return sorted(shown)


def drawn(chart: Any, label: str) -> str:
    """Write the chart without the style and the script of pygal. A dot shows its label when pointed at."""
    from xml.etree import ElementTree

    root = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            name = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else ""
            if name == "desc" and child.get("class") == "label":
                child.tag, child.attrib = "title", {}
            elif name in ("", "defs", "desc", "title"):
                parent.remove(child)
    root.set("role", "img")
    root.set("aria-label", label)
    root.attrib.pop("id", None)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return text.replace("ns0:", "").replace(":ns0=", "=")


_MOST = 12
"""Most charts of a page; a larger grid has only its table."""
_SMALL_DOT, _BEST_DOT = 3, 6


@dataclass(frozen=True)
class Front:
    """A chart of the cells of one model and file type."""

    title: str
    svg: str


def fronts(cells: Sequence[Mapping[str, Any]], cost: str) -> list[Front]:
    """Draw a chart for each model and type with two points or more, from cells of JSON; none for too many."""
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["fits"] and cell["tokens_per_second"] is not None and _price(cell, cost) is not None:
            groups.setdefault((cell["model"], cell["file_type"]), []).append(cell)
    drawable = {key: points for key, points in groups.items() if len(points) > 1}
    if len(drawable) > _MOST:
        return []
    return [_front(model, kind, points, cost) for (model, kind), points in drawable.items()]


def _price(cell: Mapping[str, Any], cost: str) -> float | None:
    value = cell["memory" if cost == "memory" else "cost"]
    return None if value is None else float(value)


def _front(model: str, kind: str | None, cells: Sequence[Mapping[str, Any]], cost: str) -> Front:
    name = printable(model, 60) + (f" as {kind}" if kind else "")
    what = {"price": "price", "watts": "watts", "memory": "memory of the devices"}[cost]
    title = f"{name}: generation in tokens/s against {what}"
    prices = [_price(cell, cost) or 0.0 for cell in cells]
    across = labelled_ticks(max(prices), (lambda size: human(int(size))) if cost == "memory" else "{:g}".format)
    chart = new_chart(labelled_ticks(max(cell["tokens_per_second"] for cell in cells), speed))
    chart.stroke = False
    chart.x_labels = across
    chart.xrange = (0, across[-1]["value"])
    for is_best in (True, False):
        points = [(price, cell) for price, cell in zip(prices, cells, strict=True) if cell["is_best"] == is_best]
        dot = {"r": _BEST_DOT if is_best else _SMALL_DOT}
        chart.add(
            "best" if is_best else "others",
            [
                {"value": (price, cell["tokens_per_second"]), "label": printable(_cell_text(cell)), "node": dot}
                for price, cell in points
            ],
        )
    best = [_cell_text(cell) for cell in cells if cell["is_best"]]
    words = f"{title}. Of {len(cells)} cells {len(best)} are best: {'; '.join(best[:_MOST])}"
    return Front(title, drawn(chart, printable(words)))


def _cell_text(cell: Mapping[str, Any]) -> str:
    return f"{cell['machine']}, context {cell['n_ctx']:,}, {speed(cell['tokens_per_second'])} tokens/s"
