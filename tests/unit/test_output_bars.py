"""The picture of a plan: the numbers of its JSON, to scale, with nothing that is not text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from fitter.output.pictures.drawing import NARROW, WIDE
from fitter.output.pictures.plan_pictures import bars_svg
from tests.support.cases import cases, named_cases

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"total": 24, "free": 23, "margin": 1, "model": 12, "context": 4, "compute": 2, "used": 18, "left": 5}
CARD: dict[str, Any] = {"name": "CUDA0", "description": "a card", "shared": 0}
CARD |= {name: size * GIB for name, size in SIZES.items()}
HOST = {**CARD, "total": 48 * GIB, "free": 48 * GIB, "context": 0, "compute": 0, "used": 12 * GIB, "left": 36 * GIB}
UNLIMITED = {**HOST, "total": None, "free": None, "margin": None, "left": None}
LATER = {**HOST, "later": 6 * GIB, "used": 18 * GIB, "left": 30 * GIB}
TOO_LARGE = {**CARD, "model": 30 * GIB, "used": 36 * GIB, "left": -13 * GIB}


def bars(devices: list[dict[str, Any]], host: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """The parts of each bar, in pixels, as the SVG has them."""
    root = ElementTree.fromstring(bars_svg({"devices": devices, "host": host}, "A plan"))
    rows: list[list[tuple[str, float]]] = []
    for group in root.iter(f"{SVG}g"):
        rows.append([])
        for rect in (rect for rect in group.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None):
            rows[-1].append((rect.attrib["class"], float(rect.attrib["width"])))
    return [row for row in rows if row]


OF_A_CARD = {"model": 12, "context": 4, "compute": 2, "margin": 1, "left": 4, "taken": 1}


@named_cases(
    ("by the larger one's scale", CARD, HOST, [OF_A_CARD, {"model": 12, "margin": 1, "left": 35}]),
    (
        "a host without a limit ends with what is used",
        {**CARD, "shared": 2 * GIB, "used": 20 * GIB, "left": 3 * GIB},
        UNLIMITED,
        [{"model": 12, "context": 4, "compute": 2, "shared": 2, "margin": 1, "left": 2, "taken": 1}, {"model": 12}],
    ),
    ("what is taken later", CARD, LATER, [OF_A_CARD, {"model": 12, "later": 6, "margin": 1, "left": 29}]),
    (
        *("less left than the margin is all of it margin", {**CARD, "left": GIB // 2}, UNLIMITED),
        [{"model": 12, "context": 4, "compute": 2, "margin": 0.5, "taken": 1}, {"model": 12}],
    ),
)
def test_bars(card: dict[str, Any], host: dict[str, Any], expected: list[dict[str, float]]) -> None:
    drawn = bars([card], host)
    pixels = sum(width for _, width in drawn[-1]) / sum(expected[-1].values())
    assert [[name for name, _ in row] for row in drawn] == [list(row) for row in expected]
    for row, parts in zip(drawn, expected, strict=True):
        assert [width for _, width in row] == pytest.approx([part * pixels for part in parts.values()], abs=0.2)


FAR_LARGER = {**HOST, "total": 768 * GIB, "free": 768 * GIB, "left": 756 * GIB}


def test_a_far_larger_host_has_a_scale_of_its_own() -> None:
    card, host = bars([CARD], FAR_LARGER)
    assert sum(width for _, width in card) == pytest.approx(sum(width for _, width in host), abs=1)
    assert "a scale of its own" in bars_svg({"devices": [CARD], "host": FAR_LARGER})
    assert "a scale of its own" not in bars_svg({"devices": [CARD], "host": HOST})


@cases((WIDE,), (NARROW,))
def test_what_does_not_fit_stays_in_the_picture(width: int) -> None:
    problems = [{"device": "CUDA0", "missing": 14 * GIB, "message": "CUDA0 lacks 14336 MiB"}]
    plan = {"devices": [TOO_LARGE], "host": {**UNLIMITED, "name": "host"}, "problems": problems}
    root = ElementTree.fromstring(bars_svg(plan, "A plan", width=width))
    assert float(root.attrib["viewBox"].split()[2]) == width
    parts = [rect.attrib for rect in root.iter(f"{SVG}rect") if "x" in rect.attrib]
    ends = [float(bar["x"]) + float(bar["width"]) for bar in parts]
    assert ends and max(ends) <= width
    assert [t.text for t in root.iter(f"{SVG}text") if t.attrib["class"] == "small missing"] == ["lacks 14.0 GiB"]
    assert [path.attrib["class"] for path in root.iter(f"{SVG}path")].count("limit") == 1


def test_names_are_text() -> None:
    name = '<script>alert("x")</script>'
    drawn = bars_svg({"devices": [{**CARD, "name": name, "description": name}], "host": HOST}, name)
    root = ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    assert root.attrib["aria-label"].startswith(f"{name}: {name}: 18.0 GiB of 24.0 GiB used")
    # a name is cut to the room that it has
    assert sum((text.text or "").startswith("<script>") for text in root.iter(f"{SVG}text")) == 3


def test_invisible_characters_are_shown() -> None:
    drawn = bars_svg({"devices": [{**CARD, "name": "a\u202eb\x1b[0m\x00"}], "host": HOST})
    assert not {"\u202e", "\x1b", "\x00"} & set(drawn)
    assert r"a\u202eb\x1b" in drawn


POOL = {
    "name": "CUDA0+host",
    "members": ["CUDA0", "host"],
    "total": 64 * GIB,
    "free": 60 * GIB,
    "margin": GIB,
    "used": 27 * GIB,
    "left": 33 * GIB,
    "mapped_twice": 3 * GIB,
}


def test_what_devices_share_has_a_bar_of_its_own() -> None:
    plan = {"devices": [CARD], "host": HOST, "pools": [POOL]}
    root = ElementTree.fromstring(bars_svg(plan))
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    words = [rect.find(f"{SVG}title") for rect in rects]
    # what both map is counted once
    assert [word.text for word in words if word is not None][-6:] == [
        *("weights: 21.0 GiB", "KV cache: 4.0 GiB", "compute buffers: 2.0 GiB"),
        *("margin, stays free: 1.0 GiB", "left: 32.0 GiB", "not free: 4.0 GiB"),
    ]
    assert root.attrib["aria-label"].endswith("CUDA0+host: 27.0 GiB of 64.0 GiB used")


def test_a_pool_that_is_too_full_says_so() -> None:
    problems = [{"device": "CUDA0+host", "missing": 2 * GIB, "message": ""}]
    full = {**POOL, "free": 26 * GIB, "left": -GIB}
    drawn = bars_svg({"devices": [CARD], "host": HOST, "pools": [full], "problems": problems})
    assert drawn.count("lacks 2.0 GiB") == 1 and drawn.count('class="limit"') == 1


@cases(
    ("ROCm0+host", "ROCm0+host", "a card"),
    ("Vulkan0+host", "Vulkan0+host", "a card"),
    ("RPC0[10.0.0.1]", "RPC0[10.0.0.…", "RPC0[10.0.0.1] · a card"),
)
def test_a_long_name_is_whole_above_its_bar(name: str, beside: str, above: str) -> None:
    root = ElementTree.fromstring(bars_svg({"devices": [{**CARD, "name": name}], "host": HOST}))
    texts = [text.text for text in root.iter(f"{SVG}text")][:2]
    assert texts == [beside, f"{above} · 18.0 GiB of 24.0 GiB used"]
