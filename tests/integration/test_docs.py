"""Every page of the documentation, and README.md: each command and each line of Python prints what the page says."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.cases import cases, stored
from tests.support.patience import SECONDS
from tools.builds.llama_builds import FetchError
from tools.docs.examples import difference, run_page
from tools.docs.pages import ROOT, Kind, blocks, pages

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WITH_EXAMPLES = [
    page for page in pages() if any(block.kind is not Kind.NOT_RUN for block in blocks((ROOT / page).read_text()))
]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=str)
def test_a_page_says_what_is_printed(page: Path) -> None:
    try:
        outcome = run_page(ROOT / page)
    except FetchError as error:
        pytest.skip(str(error))
    said = difference(ROOT / page, outcome)
    assert not said, (
        f"{page} is not what is printed: look, then 'python -m tools.docs.examples --update {page}'\n{said}"
    )


# --- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_copy_button_takes_the_commands_alone(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<div data-copy="fitter [^"]*" class="language-console highlight">', home)


@pytest.fixture
def visited(site: Path, browser: Browser) -> Iterator[tuple[Page, str, list[str]]]:
    """A page of the browser, the site's address, and the addresses that were asked for."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.new_context() as context:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked: list[str] = []
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        yield page, f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_no_page_names_another_host_to_ask(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 50
    asked = re.compile(r'<link[^>]* rel="(?!canonical|prev|next)[^>]*>|<[^>]* (?:src|srcset|poster|data|ping)="[^"]*"')
    found = {found for page in pages.values() for found in asked.findall(page)}
    assert found
    assert [tag for tag in found if "//" in tag] == []


# A page of each kind; the others have the same template.
VISITED = ("index.html", "404.html", "guides/reports.html", "reference/options-devices.html", "explanation/limits.html")


@pytest.mark.parametrize("name", VISITED)
def test_a_page_asks_no_other_host(name: str, visited: tuple[Page, str, list[str]]) -> None:
    page, address, asked = visited
    # What scripts ask for, too.
    page.goto(f"{address}/{name}", wait_until="networkidle")
    assert f"{address}/{name}" in asked
    assert [url for url in asked if not url.startswith((f"{address}/", "data:"))] == []


OPTIONS_SEARCHED = {
    "--host-memory": "reference/options-devices.html#host-memory",
    "--host-mem": "reference/options-devices.html#host-memory",
    "--n-gpu-layers": "reference/options-placement.html#n-gpu-layers",
    "--mtp": "reference/options-draft.html#mtp",
}


def test_the_search_finds_an_option_by_its_dashes(visited: tuple[Page, str, list[str]]) -> None:
    from playwright.sync_api import expect

    page, address, asked = visited
    page.goto(f"{address}/index.html")
    box, results = page.locator(".md-search__input"), page.locator(".md-search-result__item:first-child a")
    for words, expected in OPTIONS_SEARCHED.items():
        box.fill("")
        box.press_sequentially(words)
        found = re.compile(rf"^{address}/{expected.replace('#', '.*#')}$")
        # the first of a page's parts that match
        expect(results.nth(1)).to_have_attribute("href", found, timeout=1000 * SECONDS)
    assert [url for url in asked if not url.startswith(f"{address}/")] == []


# --- the runner


def outcome(tmp_path: Path, text: str) -> tuple[str, str]:
    """Run a page with this text, and return the new text and the reported difference."""
    page = tmp_path / "page.md"
    page.write_text(text)
    result = run_page(page)
    return result.text, difference(page, result)


@cases(stored("docs", "what_is_right"))
def test_what_is_right(text: str, tmp_path: Path) -> None:
    assert outcome(tmp_path, text) == (text, "")


@cases(stored("docs", "what_is_wrong_is_said"))
def test_what_is_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    assert re.search(said, outcome(tmp_path, text)[1])


def test_what_is_printed_is_written(tmp_path: Path) -> None:
    text = (
        "- one:\n\n    ```console\n    $ echo a\n    b\n    $ echo 2 s\n    1 s\n    ```\n\n```python\nprint(1)\n```\n"
    )
    new, _ = outcome(tmp_path, text)
    # Seconds stay: they would differ every time.
    assert new == text.replace("    b\n", "    a\n").replace("print(1)\n", "print(1)\n#> 1\n")


def test_models_are_there_and_ports_are_free_ones(tmp_path: Path) -> None:
    text = "```console\n$ ls *.gguf\ndraft.gguf\n$ echo 50052\n50052\n$ [ 50052 = 5005''2 ] || echo free\nfree\n```\n"
    assert outcome(tmp_path, text) == (text, "")
