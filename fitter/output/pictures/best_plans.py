"""Best trade-offs of an explored grid as small charts: the cost of each machine against its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.output.pictures.curves import drawn, labelled_ticks, new_chart
from fitter.text import human, printable, speed

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
