"""The distribution's own Chromium, without a window, for tests of pages: ``with chromium() as browser``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str:
    """The path of Chromium. Raises ``RuntimeError`` where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise RuntimeError("there is no Chromium to test pages with: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, started for as long as this lasts."""
    from playwright.sync_api import sync_playwright

    # what is tested is a page of ours, and root has no sandbox; a container may have little shared memory
    words = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=words)
        try:
            yield browser
        finally:
            browser.close()
