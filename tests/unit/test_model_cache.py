"""What is kept of headers has a limit: what was used longest ago goes, and never what may still be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fitter.model import cache

KIB = 1024
HOUR = 3600.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def entry(kind: str, name: str, size: int, hours: float, apparent: int = 0) -> Path:
    """An entry with a file of ``size`` bytes that was used ``hours`` ago; ``apparent``: how long the file seems."""
    folder = cache.folder(kind) / name
    (folder / "content").mkdir(parents=True)
    with (folder / "content" / "x.gguf").open("wb") as file:
        file.write(b"\1" * size)
        file.truncate(max(size, apparent))
        file.flush()
        os.fsync(file.fileno())
    used(folder, hours)
    return folder


def used(folder: Path, hours: float) -> None:
    os.utime(folder, (time.time() - hours * HOUR,) * 2)


def left() -> set[str]:
    return {each.name for name in (cache.HEADERS, cache.SHAPES) for each in cache.folder(name).glob("*")}


def test_what_was_used_longest_ago_goes_first() -> None:
    entry(cache.SHAPES, "oldest", 64 * KIB, 100)
    entry(cache.HEADERS, "older", 64 * KIB, 90)
    entry(cache.SHAPES, "old", 64 * KIB, 80)
    cache.look_after(most=192 * KIB)
    assert left() == {"oldest", "older", "old"}
    forget()
    cache.look_after(most=192 * KIB - 1)
    assert left() == {"older", "old"}
    forget()
    cache.look_after(most=100 * KIB)
    assert left() == {"old"}


def forget() -> None:
    """An hour later."""
    used(cache.folder(cache.HEADERS).with_name(".looked-after"), 1.1)


def test_what_may_still_be_read_stays() -> None:
    entry(cache.SHAPES, "yesterday", 64 * KIB, 24.1)
    entry(cache.HEADERS, "today", 64 * KIB, 23.9)
    cache.look_after(most=0)
    assert left() == {"today"}


def test_what_is_used_again_stays() -> None:
    cache.use(entry(cache.SHAPES, "again", 64 * KIB, 100))
    entry(cache.SHAPES, "not", 64 * KIB, 90)
    cache.look_after(most=64 * KIB)
    assert left() == {"again"}


def test_a_sparse_file_is_as_large_as_what_is_in_it() -> None:
    entry(cache.SHAPES, "sparse", 4 * KIB, 100, apparent=1 << 40)
    cache.look_after(most=64 * KIB)
    assert left() == {"sparse"}


def test_it_looks_once_an_hour() -> None:
    cache.folder(cache.HEADERS).mkdir(parents=True)
    cache.look_after(most=0)
    entry(cache.SHAPES, "old", 64 * KIB, 100)
    cache.look_after(most=0)
    assert left() == {"old"}
    forget()
    cache.look_after(most=0)
    assert left() == set()


def test_no_folder_is_no_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.look_after()
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    cache.look_after()
    cache.use(cache.folder(cache.SHAPES) / "none")
