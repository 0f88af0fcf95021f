"""Fixtures that several files share: a browser, a worker, and a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fitter.llama.client import Worker
from tests.formats import upstream
from tests.support.browser import chromium, find, is_needed
from tools.tiny import write_tiny

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


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Start a worker that sees the devices of this machine."""
    with Worker() as started:
        yield started


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with experts that takes milliseconds to load."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build llama-server's own reader of arguments, environments and presets."""
    return upstream.build(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty directory for the models of a file."""
    return tmp_path_factory.mktemp("models")
