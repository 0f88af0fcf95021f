"""Pages in a browser, for the tests of reports: each may complain of nothing, and ask no one for anything."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.patience import SECONDS, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

WIDE, PHONE = 1200, 390
MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&amp;{{ 7*7 }}<!--"
"""A name that would do harm if it were not text."""


class Pages(http.server.BaseHTTPRequestHandler):
    pages: Mapping[str, bytes] = {}
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.path in self.pages else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.pages.get(self.path, b""))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(pages: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The pages at a port of this machine: the address, and every path that is asked for."""
    asked: list[str] = []
    handler = type(
        "Handler", (Pages,), {"pages": {path: page.encode() for path, page in pages.items()}, "asked": asked}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@contextmanager
def opened(browser: Browser, url: str, width: int = WIDE, scheme: Any = "light", **settings: Any) -> Iterator[Page]:
    """The page, which may not complain."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **settings)
    context.set_default_timeout(1000 * SECONDS)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.goto(url)
    yield page
    assert said == []
    context.close()


NOTES = """() => {
  window.heard = [];
  const said = document.getElementById("said");
  const note = () => {
    if (said.textContent) heard.push([said.textContent, document.activeElement.textContent, getSelection().toString()]);
  };
  new MutationObserver(note).observe(said, { childList: true });
}"""


def heard(page: Page) -> Callable[[str], list[str]]:
    """Note what the page says from now on, with the texts of what has the focus and of what is selected.

    The function waits for the next time that it says ``text``. It is noted since the page says it for seconds only; and
    the notes are asked for from outside, since a page without `unsafe-eval` takes no condition of a test's own to poll.
    """
    page.evaluate(NOTES)
    seen = 0

    def wait(text: str) -> list[str]:
        nonlocal seen
        notes: list[list[str]] = []

        def is_said() -> bool:
            notes[:] = page.evaluate("heard")
            return any(note[0] == text for note in notes[seen:])

        until(is_said, f"it never says {text!r}")
        seen += [note[0] for note in notes[seen:]].index(text) + 1
        return notes[seen - 1]

    return wait


def pasted(page: Page) -> str:
    """What the clipboard has, as someone pastes it who gave no permission to read it."""
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), { id: 'pasted' }))")
    field = page.locator("#pasted")
    field.focus()
    page.keyboard.press("Control+V")
    text = field.input_value()
    field.evaluate("field => field.remove()")
    return text


def words_of(line: str, folder: Path) -> list[str]:
    """The program and the words that it gets, where ``line`` is pasted into bash."""
    for name in ("llama-server", "llama-cli"):
        program = folder / name
        program.write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@"\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", line], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\0")[:-1]


def reads(locator: Locator, text: str) -> None:
    """Wait until it reads so. From outside: a page without `unsafe-eval` takes no condition of a test's own to poll."""
    from playwright.sync_api import expect

    expect(locator).to_have_text(text, timeout=1000 * SECONDS)
