"""The page and the table of an exploration: what they say, before they are opened in a browser."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from fitter.api.explore.explore_grid import Exploration, ExploredAnswer, ExploredCell
from fitter.output.documents.document import dumps
from fitter.output.pages.exploration_page import exploration_page
from fitter.planning.tables.exploration import marked
from fitter.text import printable
from tests.support.cases import cases, named_cases

GIB = 2**30
HOSTILE = "</script><script>alert(1)</script>\"'&\u202e\x1b"


def cell(machine: str, rate: float | None, memory: int, **more: Any) -> ExploredCell:
    asked = ExploredCell("a/model.gguf", None, machine, None, None, None, None)
    used = None if rate is None else memory * GIB - 12345
    return replace(
        asked, fits=rate is not None, n_ctx=8192, tokens_per_second=rate, memory=memory * GIB, used=used, **more
    )


CELLS = (
    cell(
        "a card",
        40.5,
        24,
        host_weights=5 * GIB + 1,
        prompt_tokens_per_second=1234.5,
        full_context_tokens_per_second=33.25,
        arguments=("-c", "8192"),
    ),
    cell("a slower card", 10.0, 24),
    cell("a small card", None, 4, problem="CUDA0 lacks 3072 MiB: use less"),
    replace(cell("a lost card", None, 8), fits=None, n_ctx=None, problem="llama.cpp did not answer in 60 s"),
)


def explored(*cells: ExploredCell, cost: str = "memory", **more: Any) -> Exploration:
    return Exploration(marked(cells or CELLS, cost), cost, **more)


def rows(page: str) -> list[dict[str, str]]:
    """The table: for each row the values that it is sorted by, by the title of the column."""
    (table,) = re.findall(r'<table class="fitter-grid stacked">.*?</table>', page, re.DOTALL)
    titles = [re.sub("<.*?>", "", each) for each in re.findall(r"<th scope=.col.*?</th>", table)]
    found = re.findall(r"<tr[^>]*>(<th scope=.row.*?)</tr>", table, re.DOTALL)
    values = ([unescape(value) for value in re.findall(r'data-value="([^"]*)"', row)] for row in found)
    return [dict(zip(titles, row, strict=True)) for row in values]


def test_every_figure_is_that_of_json() -> None:
    found = explored()
    cells = found.to_dict()["cells"]
    keys = {
        "machine": "machine",
        "context": "n_ctx",
        "on devices": "used",
        "weights on the host": "host_weights",
        "prompt, t/s": "prompt_tokens_per_second",
        "generation, t/s": "tokens_per_second",
        "with a full context, t/s": "full_context_tokens_per_second",
        "memory of the devices": "memory",
    }
    shown = rows(exploration_page(found.to_dict()))
    for row, expected in zip(shown, cells, strict=True):
        values = {title: expected[key] for title, key in keys.items()}
        assert {title: row[title] for title in keys} == {
            title: "" if value is None else str(value) for title, value in values.items()
        }
    assert [(r["fits"], r["best trade-off"]) for r in shown] == [("yes", "best"), ("yes", ""), ("no", ""), ("", "")]
    assert [row["note"] for row in shown] == [each["problem"] or "" for each in cells]


def test_there_is_no_column_for_full_contexts_where_their_speed_is_unknown() -> None:
    older = [replace(each, full_context_tokens_per_second=None) for each in CELLS]
    assert "with a full context, t/s" not in rows(exploration_page(explored(*older).to_dict()))[0]


def test_the_document_is_in_the_page() -> None:
    found = explored(cell(HOSTILE, 1.0, 8))
    page = exploration_page(found.to_dict())
    (text,) = re.findall(r'<script type="application/json" id="exploration">(.*?)</script>', page, re.DOTALL)
    assert text.replace(r"\u003c", "<") == dumps(found.to_dict())
    assert json.loads(text)["cells"][0]["machine"] == HOSTILE


def test_names_are_text() -> None:
    asked = ExploredAnswer(HOSTILE, replace(cell(HOSTILE, 5.0, 8), arguments=(HOSTILE,)))
    found = explored(
        *(
            replace(each, model=HOSTILE, file_type=HOSTILE, problem=HOSTILE, fits=fits)
            for each in CELLS
            for fits in (True, None)
        ),
        asked=HOSTILE,
        answers=(asked,),
    )
    page = exploration_page(found.to_dict())
    assert page.count("<script") == 3
    for drawn in (page, found._repr_html_()):
        assert not re.findall("<script>alert", drawn)
        assert not [char for char in drawn if char != "\n" and printable(char) != char]


def test_what_is_unknown_is_said_as_such() -> None:
    page = exploration_page(explored().to_dict())
    (section,) = re.findall(r'<section aria-labelledby="unknown">.*?</section>', page, re.DOTALL)
    assert "llama.cpp did not answer in 60 s" in section and "a lost card" in section and "small" not in section
    assert ">Unknown<" not in exploration_page(explored(*CELLS[:3]).to_dict())


def test_models_of_one_file_name_are_told_apart() -> None:
    cells = [replace(CELLS[0], model=model) for model in ("a/model.gguf", "b/model.gguf", "c/other.gguf")]
    found = explored(*cells, asked="fits", answers=tuple(ExploredAnswer(each.model, each) for each in cells))
    page = exploration_page(found.to_dict())
    names = ["a/model.gguf", "b/model.gguf", "other.gguf"]
    assert [row["model"] for row in rows(page)] == names == [row["model"] for row in rows(found._repr_html_())]
    assert re.findall(r'<h3 id="answer-\d">(.*?): a card</h3>', page) == names
    assert "<h1>a/model.gguf and 2 more</h1>" in page


ANSWER = replace(CELLS[0], cost=300.0)

CONFIRMED = "Confirmed on the model itself."


def answer(cell: ExploredCell | None, **more: Any) -> ExploredAnswer:
    return ExploredAnswer("a/model.gguf", cell, **more)


ANSWERS: dict[str, tuple[str, ExploredAnswer, list[str]]] = {
    "the cheapest": ("price", answer(ANSWER), ["It is the cheapest that does it.", CONFIRMED]),
    "the least memory": ("memory", answer(CELLS[0]), ["It is the one with the least memory that does it.", CONFIRMED]),
    "of a header, after others": (
        "watts",
        answer(replace(ANSWER, needs_imatrix=True), is_of_header=True, refused=2),
        [
            "2 did it by their header, but not when the model itself was measured.",
            "It is the one with the fewest watts that does it.",
            "Confirmed on the header that llama-quantize would write.",
            "A file of that type is only made with an importance matrix.",
        ],
    ),
    "an unknown price": (
        *("price", answer(CELLS[0])),
        ["Its price is unknown, and no machine with a known one does it.", CONFIRMED],
    ),
    "none": ("price", answer(None), []),
}


@cases(ANSWERS)
def test_answers(cost: str, answer: ExploredAnswer, notes: list[str]) -> None:
    found = explored(cost=cost, answers=(answer,), asked="8k context at 20 t/s")
    page = exploration_page(found.to_dict())
    (section,) = re.findall(r'<section aria-labelledby="answer">.*?</section>', page, re.DOTALL)
    assert re.findall(r'<p class="quiet">(.*?)</p>', section) == notes
    assert ("No machine of the grid does it." in section) == (answer.cell is None)
    assert ('data-from="command-1"' in section) == (answer.cell is not None)
    does = "no machine does it" if answer.cell is None else "a machine does it"
    assert f"8k context at 20 t/s: {does}</p>" in page


@named_cases(
    ("two points", CELLS, 1),
    ("one point is no front", CELLS[:1], 0),
    ("twelve models", [replace(each, model=f"{i}") for i in range(12) for each in CELLS], 12),
    ("thirteen are too many", [replace(each, model=f"{i}") for i in range(13) for each in CELLS], 0),
    ("machines without a GPU", [replace(each, memory=0) for each in CELLS], 1),
)
def test_charts_of_the_front(cells: list[ExploredCell], charts: int) -> None:
    page = exploration_page(explored(*cells).to_dict())
    assert page.count("pygal-chart") - page.split("</style>")[0].count("pygal-chart") == charts
    assert len(re.findall(r'r="6"', page)) == charts
    if charts:
        assert "<title>a card, context 8,192, 40.5 tokens/s</title>" in page


def test_a_price_that_is_unknown_has_no_dot() -> None:
    known = replace(CELLS[1], host_weights=0, prompt_tokens_per_second=1.0, full_context_tokens_per_second=9.0)
    cells = [replace(CELLS[0], cost=100.0), replace(known, cost=50.0), replace(CELLS[0], machine="unpriced")]
    page = exploration_page(explored(*cells, cost="price").to_dict())
    assert "<title>a card" in page and "<title>unpriced" not in page
    assert [row["price"] for row in rows(page)] == ["100.0", "50.0", ""]
    assert "The price of 1 plan that fits is unknown" in page
    assert page.count('data-value="">unknown<') == 1
    # there is nothing to note
    assert "note" not in rows(page)[0]


def test_what_does_not_fit_has_an_unknown_price_all_the_same() -> None:
    page = exploration_page(explored(CELLS[2], cost="price").to_dict())
    assert page.count('data-value="">unknown<') == 1


def test_the_table_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explored()
    page = exploration_page(found.to_dict())
    # of the packages for pages it needs none
    for package in ("jinja2", "markupsafe", "pygal"):
        monkeypatch.setitem(sys.modules, package, None)
    fragment = found._repr_html_()
    assert rows(fragment) == rows(page)
    assert fragment.count("<script>") == 1 and not re.findall("src=|href=|on[a-z]+=", fragment)
    assert "2 of 4 plans fit; model.gguf" in fragment
