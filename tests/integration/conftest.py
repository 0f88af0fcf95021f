"""Fixtures that several files share: a browser, a worker, and a small model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.llama.processes import interpreter
from tests.formats import upstream
from tests.support.browser import chromium, find, is_needed
from tests.support.ranges import in_clean_environment
from tools.models import shapes
from tools.models.tiny import TINY_MOE, write_tiny

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
def one_worker(worker: Worker) -> Iterator[None]:
    """Have every ``fitter.fit`` of a file ask the same worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitter, "fit", functools.partial(fitter.fit, worker=worker))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with experts that takes milliseconds to load."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the file of tests calls ``MODEL``: a shape without its words, or a small model that runs."""
    wanted, folder = getattr(request.module, "MODEL", TINY_MOE), tmp_path_factory.mktemp("model")
    if isinstance(wanted, str):
        return shapes.write(wanted, folder, vocab=False)
    return write_tiny(folder / "model.gguf", wanted)


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, directory: Path) -> dict[str, Path]:
    """Write the shapes that the file of tests calls ``MODELS``, without their words."""
    return {name: shapes.write(name, directory, vocab=False) for name in request.module.MODELS}


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build llama-server's own reader of arguments, environments and presets."""
    return upstream.build(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty directory for the models of a file."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def clean_environment() -> Iterator[None]:
    """No proxies and no tokens of whoever runs the tests."""
    with in_clean_environment():
        yield


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command ``host`` of a worker do what the variable ``SABOTAGE`` says first."""
    prelude = (
        "import os, time, ctypes; from fitter.llama.worker.worker import Commands; host = Commands.host; "
        "Commands.host = lambda self: (exec(os.environ.get('SABOTAGE', '')), host(self))[1]; "
    )
    start, _, rest = interpreter.BOOT.partition("from {module}")
    monkeypatch.setattr(interpreter, "BOOT", start + prelude + "\nfrom {module}" + rest)
