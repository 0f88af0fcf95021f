"""Headers of real models with something wrong in them, as a file and over HTTP: one line each, and little memory."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

import fitter
from fitter.errors import FitterError, LlamaCppCrashError
from fitter.llama.client import Worker
from fitter.model.files import remote_files
from tests.support.cases import cases
from tests.support.ranges import clean_environment, serving
from tools.models import shapes
from tools.models.tiny import write_tiny
from tools.mutated_headers.fields import Walk

_T = TypeVar("_T")

COUNT = 200
SOON = 5.0
"""Seconds for one of them."""
LITTLE = 500 * 10**6


NUMBERS = {
    "version": (0, 1, 4, 0x03000000),
    "count": (-1, 1, 2**27, 2**29, 2**31, 2**40, 2**61, 2**63, 2**64 - 1),
    "key length": (-1, 1, 2**16, 2**29, 2**33, 2**63, 2**64 - 1),
    "length": (2**27, 2**29, 2**31, 2**33, 2**40, 2**62, 2**63, 2**64 - 1),
    "name length": (-1, 1, 64, 2**31, 2**63, 2**64 - 1),
    "type": (13, 255, 2**31, 2**32 - 1),
    "dimensions": (5, 255, 2**31, 2**32 - 1),
    "dimension": (0, 7, 2**32, 2**62, 2**63, 2**64 - 1),
    "tensor type": (4, 5, 99, 2**31, 2**32 - 1),
    "offset": (7, 32, 2**40, 2**63, 2**64 - 32),
}
"""Values that replace each kind of field; -1 and 1 are added to the value that is there."""


def malformed(data: bytes, walk: Walk, draw: random.Random) -> bytes:
    """``data`` with one field that cannot be so."""
    kind = draw.choice([*NUMBERS, "name"])
    field = draw.choice([field for field in walk.fields if field.kind == kind])
    old = data[field.at : field.at + field.size]
    if kind == "name":
        new = draw.choice([b"\xff" * field.size, b"x" * field.size, b"\0" * field.size])
    else:
        value = draw.choice([n for n in NUMBERS[kind] if n.bit_length() <= 8 * field.size])
        if value in (-1, 1) and kind not in ("version",):
            value += int.from_bytes(old, "little")
        new = value.to_bytes(field.size, "little")
    if new == old:
        return malformed(data, walk, draw)
    return data[: field.at] + new + data[field.at + field.size :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("malformed")


@pytest.fixture(scope="module")
def models(folder: Path) -> list[tuple[bytes, Walk, int]]:
    """Headers to change, and how long their files are: small ones, and some of models of many GiB."""
    paths = [
        write_tiny(folder / "tiny.gguf"),
        shapes.write("llama-3.1-8b", folder, vocab=False),
        shapes.write("deepseek-v3.1", folder),
    ]
    found = []
    for path in paths:
        with path.open("rb") as file:
            data = file.read(8 << 20)
        walk = Walk(data)
        found.append((data[: walk.header_bytes], walk, path.stat().st_size))
    return found


def written(path: Path, models: list[tuple[bytes, Walk, int]], number: int) -> Path:
    """A file with a header that is malformed in the way of ``number``."""
    draw = random.Random(number)
    data, walk, size = models[number % len(models)]
    with path.open("wb") as file:
        file.write(malformed(data, walk, draw))
        file.truncate(size)
    return path


def most_memory() -> int:
    """The most that this process and its children have had in memory at once, each for itself."""
    every = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = []
    for process in every:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        match = re.search(r"VmHWM:\s+(\d+) kB", text)
        found.append(int(match[1]) * 1024 if match else 0)
    return max(found)


def soon(what: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result and the least seconds of three calls: a busy machine makes a call longer."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        found.append((what(), time.monotonic() - began))
        if found[-1][1] < SOON:
            break
    return min(found, key=lambda each: each[1])


def failures(
    folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker, where: str, numbers: range
) -> list[str]:
    """Return the numbers of headers that do not end as they should, with the reason."""
    found = []
    for number in numbers:
        path = written(folder / f"{number}.gguf", models, number)
        address = str(path) if where == str(folder) else f"{where}/{path.name}"

        def measure(address: str = address) -> FitterError | None:
            try:
                fitter.measure(address, gpus="24GiB", worker=worker)
            except FitterError as refused:
                return refused
            return None

        error, seconds = soon(measure)
        if error is None:
            found.append(f"{number}: it is a model")
        elif error.exit_code != 3 or isinstance(error, LlamaCppCrashError) or not str(error).isprintable():
            found.append(f"{number}: {type(error).__name__}: {error}")
        elif not str(error).startswith(address):
            found.append(f"{number}: of what? {error}")
        if seconds > SOON:
            found.append(f"{number}: {seconds:.1f} s")
        path.unlink()
    return found


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote_files.forget()


@pytest.mark.usefixtures("own_cache")
@cases("file", "HTTP")
def test_a_malformed_header_is_one_line(
    where: str, folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker
) -> None:
    before = most_memory()
    with serving(folder) as server:
        place = str(folder) if where == "file" else server.url
        assert failures(folder, models, worker, place, range(COUNT)) == []
    assert most_memory() < max(LITTLE, before + LITTLE // 2)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_many_more_malformed_headers(folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker) -> None:
    assert failures(folder, models, worker, str(folder), range(COUNT, 5 * COUNT)) == []
