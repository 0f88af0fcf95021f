"""Fixtures that several files share: a browser, a worker, and a small model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fitter
from fitter.cli import main
from fitter.llama.client import Worker
from fitter.llama.processes import interpreter
from tests.formats import upstream
from tests.support.browser import chromium, find, is_needed
from tests.support.command import Command, Said
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
        patch.setattr(fitter, "fit", partial(fitter.fit, worker=worker))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with experts that takes milliseconds to load."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the file of tests calls ``MODEL``: a shape without its words, or a small model that runs."""
    return _written(getattr(request.module, "MODEL", TINY_MOE), tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, directory: Path) -> dict[str, Path]:
    """Write what the file of tests calls ``MODELS``, by its names: shapes without their words, or small models."""
    wanted = request.module.MODELS
    items = wanted.items() if isinstance(wanted, Mapping) else zip(wanted, wanted, strict=True)
    return {name: _written(each, directory / f"{name}.gguf") for name, each in items}


def _written(wanted: Any, path: Path) -> Path:
    """Write a shape, which may have a name, a small model that runs, or what a function writes to a path."""
    if isinstance(wanted, str):
        return shapes.write(wanted, path.parent, vocab=False)
    if isinstance(wanted, shapes.Shape):
        shapes.write_shape(wanted, path, vocab=False)
        return path
    written: Path = wanted(path) if callable(wanted) else write_tiny(path, wanted)
    return written


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``fitter`` in this process, which is quicker than one of its own; all that it says is returned."""

    def run(*words: object) -> Said:
        capsys.readouterr()
        status = main(list(map(str, words)))
        return Said(status, *capsys.readouterr())

    return run


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
