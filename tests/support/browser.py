"""The distribution's own Chromium, without a window, for tests of pages: ``with chromium() as browser``.

``python3 -m tests.support.browser`` prints where it is; without one the status is 1, and what to install is said.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
NEEDED = "FITTER_NEEDS_BROWSER"
"""The environment variable that CI sets: without a browser tests of pages fail then, and are not skipped."""

_MILLISECONDS = 120_000
"""For its start, however busy the machine is."""


def find() -> str:
    """The path of Chromium. Raises ``RuntimeError`` where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise RuntimeError("there is no Chromium, which tests of pages need: apt-get install chromium")


def is_needed() -> bool:
    """Whether tests of pages may not be skipped."""
    return os.environ.get(NEEDED, "") not in ("", "0")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, started for as long as this lasts."""
    from playwright.sync_api import sync_playwright

    # what is tested is a page of ours, and root has no sandbox; a container may have little shared memory
    words = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=words, timeout=_MILLISECONDS)
        try:
            yield browser
        finally:
            browser.close()


def main() -> int:
    """Print the path of Chromium."""
    try:
        print(find())
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
