"""Placements that an H100 was timed with are estimated in nearly the order of the measured speeds."""

from __future__ import annotations

import statistics

import pytest

from tools import h100_speeds
from tools.h100_speeds import Timed


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Timed]:
    return list(h100_speeds.timed(tmp_path_factory.mktemp("models")))


def test_the_order(rows: list[Timed]) -> None:
    assert len(rows) == 34
    assert h100_speeds.in_order(rows, "generation") == (70, 72)
    assert h100_speeds.in_order([row for row in rows if not row.depth], "prompt") == (33, 34)


def test_how_far_off_generation_is(rows: list[Timed]) -> None:
    """As the page says."""
    off = [abs(row.estimated_generation / row.generation - 1) for row in rows]
    assert round(statistics.median(off), 1) == 0.2 and 0.75 < max(off) < 0.77


def test_the_page_has_the_table_of_today(rows: list[Timed]) -> None:
    page = h100_speeds.PAGE.read_text(encoding="utf-8")
    text = h100_speeds.page_with(h100_speeds.table(rows), page, h100_speeds.BEGIN)
    assert text == page, "run python -m tools.h100_speeds --write"
