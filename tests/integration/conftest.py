"""What tests of pages share: a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import chromium, find, is_needed

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; without one the tests are skipped, or fail where they may not be."""
    try:
        find()
    except RuntimeError as error:
        if is_needed():
            pytest.fail(str(error))
        pytest.skip(str(error))
    with chromium() as started:
        yield started
