"""The picture of a plan: the numbers of its JSON, to scale, with nothing that is not text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tools.docs.picture import picture

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"
CARD = {
    "name": "CUDA0",
    "description": "a card",
    "total": 24 * GIB,
    "free": 23 * GIB,
    "margin": GIB,
    "model": 12 * GIB,
    "context": 4 * GIB,
    "compute": 2 * GIB,
    "shared": 0,
    "used": 18 * GIB,
    "left": 5 * GIB,
}
HOST = {**CARD, "total": 48 * GIB, "free": 48 * GIB, "context": 0, "compute": 0, "used": 12 * GIB, "left": 36 * GIB}
UNLIMITED = {**HOST, "total": None, "free": None, "margin": None, "left": None}
LATER = {**HOST, "later": 6 * GIB, "used": 18 * GIB, "left": 30 * GIB}
TOO_LARGE = {**CARD, "model": 30 * GIB, "used": 36 * GIB, "left": -13 * GIB}


def bars(devices: list[dict[str, Any]], host: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """The parts of each bar, in pixels, as the SVG has them."""
    root = ElementTree.fromstring(picture({"devices": devices, "host": host}, "A plan"))
    rows: dict[str, list[tuple[str, float]]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.find(f"{SVG}title") is not None:
            rows.setdefault(rect.attrib["y"], []).append((rect.attrib["class"], float(rect.attrib["width"])))
    return list(rows.values())


@pytest.mark.parametrize(
    ("card", "host", "expected"),
    [
        pytest.param(
            CARD,
            HOST,
            [
                {"model": 12, "context": 4, "compute": 2, "margin": 1, "left": 4, "taken": 1},
                {"model": 12, "margin": 1, "left": 35},
            ],
            id="a card and the host, by the larger one's scale",
        ),
        pytest.param(
            {**CARD, "shared": 2 * GIB, "used": 20 * GIB, "left": 3 * GIB},
            UNLIMITED,
            [{"model": 12, "context": 4, "compute": 2, "shared": 2, "margin": 1, "left": 2, "taken": 1}, {"model": 12}],
            id="a host without a limit ends with what is used",
        ),
        pytest.param(
            CARD,
            LATER,
            [
                {"model": 12, "context": 4, "compute": 2, "margin": 1, "left": 4, "taken": 1},
                {"model": 12, "later": 6, "margin": 1, "left": 29},
            ],
            id="what is taken later",
        ),
        pytest.param(
            {**CARD, "left": GIB // 2},
            UNLIMITED,
            [{"model": 12, "context": 4, "compute": 2, "margin": 0.5, "taken": 1}, {"model": 12}],
            id="less left than the margin is all of it margin",
        ),
    ],
)
def test_bars(card: dict[str, Any], host: dict[str, Any], expected: list[dict[str, float]]) -> None:
    drawn = bars([card], host)
    pixels = sum(width for _, width in drawn[-1]) / sum(expected[-1].values())
    assert [[name for name, _ in row] for row in drawn] == [list(row) for row in expected]
    for row, parts in zip(drawn, expected, strict=True):
        assert [width for _, width in row] == pytest.approx([part * pixels for part in parts.values()], abs=0.2)


def test_what_does_not_fit_stays_in_the_picture() -> None:
    root = ElementTree.fromstring(picture({"devices": [TOO_LARGE], "host": UNLIMITED}, "A plan"))
    width = float(root.attrib["viewBox"].split()[2])
    parts = [rect.attrib for rect in root.iter(f"{SVG}rect") if "x" in rect.attrib]
    ends = [float(bar["x"]) + float(bar["width"]) for bar in parts]
    assert ends and max(ends) <= width


def test_names_are_text() -> None:
    name = '<script>alert("x")</script>'
    drawn = picture({"devices": [{**CARD, "name": name, "description": name}], "host": HOST}, name)
    root = ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    assert root.attrib["aria-label"] == name
    assert sum(name in (text.text or "") for text in root.iter(f"{SVG}text")) == 3
