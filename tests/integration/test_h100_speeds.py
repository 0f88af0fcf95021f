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
    assert len(rows) == 44
    assert h100_speeds.in_order(rows, "generation") == (77, 79)
    assert h100_speeds.in_order([row for row in rows if not row.depth], "prompt") == (37, 38)


def test_how_far_off_generation_is(rows: list[Timed]) -> None:
    """As the page says."""
    off = [abs(row.estimated_generation / row.generation - 1) for row in rows]
    assert round(statistics.median(off), 1) == 0.2 and 0.79 < max(off) < 0.81


def test_prompts_of_mapped_weights(rows: list[Timed]) -> None:
    """Without experts, of which a prompt with random routers does not choose all."""
    off = [row.estimated_prompt / row.prompt for row in rows if row.load_mode == "mmap" and row.model == "llama-3.1-8b"]
    assert len(off) == 4 and all(1 < each < 1.5 for each in off)


def test_the_page_has_the_table_of_today(rows: list[Timed]) -> None:
    page = h100_speeds.PAGE.read_text(encoding="utf-8")
    text = h100_speeds.page_with(h100_speeds.table(rows), page, h100_speeds.BEGIN)
    assert text == page, "run python -m tools.h100_speeds --write"
