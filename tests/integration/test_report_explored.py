"""The report of an exploration in a browser: the page is its JSON, sorts, and asks nothing of anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fitter.api.explore.explore_grid import Exploration, explore
from fitter.cli import main
from fitter.output.pages.exploration_page import exploration_page
from tests.support.cases import cases
from tests.support.pages import MARKUP, PHONE, WIDE, heard, opened, serving, words_of
from tools.models.shapes import write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SPEED = "generation, t/s"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write("llama-3.1-8b", folder, vocab=False).rename(folder / MARKUP.replace("/", "|"))


@pytest.fixture(scope="module")
def explored(model: Path) -> Exploration:
    machines = ["rtx-4090", "rtx-3060", "1GiB", "none"]
    prices = {"rtx-3060": 280.0, "rtx-4090": 1600.0, "1GiB": 20.0}
    return explore(
        model, machines, n_ctx=[8192, 32768], host_memory="2GiB", prices=prices, answer="32k context at 20 t/s"
    )


@pytest.fixture(scope="module")
def site(explored: Exploration) -> Iterator[tuple[str, list[str]]]:
    page = exploration_page(explored.to_dict())
    with serving({"/page.html": page, "/empty.html": "<!doctype html><link rel=icon href=data:,>"}) as (address, asked):
        yield address, asked


def column(page: Page, title: str) -> list[str]:
    """The values of a column as they are sorted, from the top."""
    titles = page.locator(".fitter-grid thead th").all_text_contents()
    cells = page.locator(f".fitter-grid tbody tr > :nth-child({titles.index(title) + 1})")
    return [cell.get_attribute("data-value") or "" for cell in cells.all()]


def test_the_page_is_the_exploration(explored: Exploration, site: Any, tmp_path: Path, browser: Browser) -> None:
    address, asked = site
    del asked[:]
    document = explored.to_dict()
    allowed = {"permissions": ["clipboard-read", "clipboard-write"]}
    with opened(browser, f"{address}/page.html", **allowed) as page:
        assert json.loads(page.locator("script#exploration").text_content() or "") == document
        for title, key in (
            (SPEED, "tokens_per_second"),
            ("on devices", "used"),
            ("price", "cost"),
            ("context", "n_ctx"),
        ):
            assert column(page, title) == ["" if cell[key] is None else str(cell[key]) for cell in document["cells"]]
        best = [cell["is_best"] for cell in document["cells"]]
        assert any(best) and column(page, "best trade-off") == ["best" if each else "" for each in best]
        assert page.locator("h1").inner_text() == MARKUP.replace("/", "|")
        says = heard(page)
        page.get_by_role("button", name="Copy").first.click()
        says("Copied")
        (answer,) = explored.answers
        assert answer.plan is not None
        line = page.evaluate("navigator.clipboard.readText()")
    assert words_of(line, tmp_path) == ["llama-server", "-m", answer.model, *answer.plan.arguments()]
    assert asked == ["/page.html"]


def test_it_sorts_with_the_keyboard(explored: Exploration, site: Any, browser: Browser) -> None:
    known = [cell.tokens_per_second for cell in explored.cells if cell.tokens_per_second is not None]
    unknown = [""] * (len(explored.cells) - len(known))
    assert unknown and sorted(known) != known, "there is nothing to sort"
    with opened(browser, f"{site[0]}/page.html") as page:
        before = column(page, SPEED)
        head = page.get_by_role("columnheader", name=SPEED)
        button = head.get_by_role("button")
        button.focus()
        for order, reverse in (("ascending", False), ("descending", True)):
            page.keyboard.press("Enter")
            assert head.get_attribute("aria-sort") == order
            assert page.locator("#said").inner_text() == f"{SPEED}, {order}"
            # what is not known comes last in both
            sorted_values = [f"{each:.4g}" for each in sorted(known, reverse=reverse)]
            values = column(page, SPEED)
            assert [f"{float(each):.4g}" for each in values[: len(known)]] == sorted_values
            assert values[len(known) :] == unknown
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") is None and column(page, SPEED) == before
        page.get_by_role("button", name="machine").click()
        assert column(page, "machine") == sorted(column(page, "machine"), key=str.lower)
        assert page.locator("[aria-sort]").count() == 1


@cases((WIDE, "light"), (PHONE, "dark"))
def test_everyone_can_use_it(width: int, scheme: str, site: Any, browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, f"{site[0]}/page.html", width, scheme, bypass_csp=True) as page:
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["impact"], each["nodes"][0]["target"]) for each in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_paper_and_no_scripts(site: Any, browser: Browser) -> None:
    with opened(browser, f"{site[0]}/page.html", 703, java_script_enabled=False) as page:
        assert page.locator(".fitter-grid tbody tr").count() == 8
        assert page.locator("thead button").count() == 0
    with opened(browser, f"{site[0]}/page.html", 703) as page:
        page.emulate_media(media="print")
        assert page.get_by_role("columnheader", name=SPEED).get_by_role("button").is_visible()
        assert not page.locator("button.copy").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 703


IN_A_NOTEBOOK = """html => {
  // as a notebook puts HTML in: a script runs where it is made anew
  const cell = document.createElement("div");
  cell.innerHTML = html;
  for (const old of cell.querySelectorAll("script")) {
    const script = document.createElement("script");
    script.textContent = old.textContent;
    old.replaceWith(script);
  }
  document.body.append(cell);
}"""


def test_a_notebook_has_a_table_that_sorts(explored: Exploration, site: Any, browser: Browser) -> None:
    fragment = explored._repr_html_()
    with opened(browser, f"{site[0]}/empty.html") as page:
        for _ in range(2):
            page.evaluate(IN_A_NOTEBOOK, fragment)
        assert page.locator(".fitter-grid").count() == 2
        assert (
            page.locator(".fitter-grid thead button").count()
            == 2 * page.locator(".fitter-grid").first.locator("th[scope=col]").count()
        )
        before = page.locator(".fitter-grid").first.inner_text()
        last = page.locator(".fitter-grid").last
        last.get_by_role("button", name="machine").click()
        assert [row.get_attribute("data-value") for row in last.locator("tbody th").all()] == [
            *("1GiB", "1GiB", "none", "none", "rtx-3060", "rtx-3060", "rtx-4090", "rtx-4090")
        ]
        assert page.locator(".fitter-grid").first.inner_text() == before


def test_the_command_writes_the_page(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Browser
) -> None:
    file = tmp_path / "grid.html"
    kept = tmp_path / "cells.jsonl"
    words = ["explore", str(model), "--gpu", "rtx-3060", "-c", "8192,1048576", "--json", "--report", str(file)]
    assert main([*words, "--resume", str(kept)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.jsonl", "grid.html"]
    with opened(browser, file.as_uri()) as page:
        assert json.loads(page.locator("script#exploration").text_content() or "") == document
