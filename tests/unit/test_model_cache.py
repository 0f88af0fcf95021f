"""What is kept of headers has one limit, which holds after every write: what was used longest ago goes, and nothing
that is in use."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fitter.errors import ModelError
from fitter.model.files import header_cache
from fitter.storage import cache_folder
from fitter.text import human
from tests.support.cases import cases

KIB = 1024
HOUR = 3600.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def entry(kind: str, name: str, hours: float, size: int = 64 * KIB, apparent: int = 0) -> Path:
    """An entry with a file of ``size`` bytes that was used ``hours`` ago; ``apparent``: how long the file seems."""
    folder = cache_folder(kind) / name
    folder.mkdir(parents=True)
    with (folder / "x.gguf").open("wb") as file:
        file.write(b"\1" * size)
        file.truncate(max(size, apparent))
        file.flush()
        os.fsync(file.fileno())
    os.utime(folder, (time.time() - hours * HOUR,) * 2)
    return folder


def put(name: str, size: int = 64 * KIB) -> Path:
    folder = cache_folder(header_cache.HEADERS) / name

    def fill(partial: Path) -> None:
        (partial / "x.gguf").write_bytes(b"\1" * size)

    header_cache.put(folder, fill, (folder / "x.gguf").exists)
    return folder


def left() -> set[str]:
    return {each.name for name in (header_cache.HEADERS, header_cache.SHAPES) for each in cache_folder(name).glob("*")}


def taken(place: Path) -> int:
    """Bytes on the disk."""
    return 512 * sum(path.lstat().st_blocks for path in (place, *place.rglob("*")))


def look_after(monkeypatch: pytest.MonkeyPatch, most: int) -> bool:
    monkeypatch.setattr(header_cache, "MOST", most)
    return header_cache.look_after()


@contextmanager
def read_by_another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys; from pathlib import Path; from fitter.model.files import header_cache as cache\n"
        "with cache.reading():\n"
        "    print(cache.use(Path(sys.argv[1])), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        yield process


def test_what_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    size = taken(entry(header_cache.SHAPES, "oldest", 100))
    entry(header_cache.HEADERS, "older", 90)
    entry(header_cache.SHAPES, "old", 80)
    assert look_after(monkeypatch, 3 * size) and left() == {"oldest", "older", "old"}
    assert look_after(monkeypatch, 3 * size - 1) and left() == {"older", "old"}
    assert look_after(monkeypatch, size) and left() == {"old"}


def test_every_write_looks_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    size = taken(entry(header_cache.SHAPES, "old", 1))
    monkeypatch.setattr(header_cache, "MOST", 3 * size)
    for number in range(6):
        put(str(number))
        assert (
            taken(cache_folder(header_cache.HEADERS)) + taken(cache_folder(header_cache.SHAPES))
            <= 3 * size + 2 * 4 * KIB
        )
    assert left() == {"3", "4", "5"}


def test_there_are_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_cache, "MOST_ENTRIES", 2)
    for number in range(4):
        entry(header_cache.HEADERS, str(number), 10 - number)
    assert header_cache.look_after() and left() == {"2", "3"}


@cases("ends", "is killed")
def test_what_another_process_reads_stays(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = entry(header_cache.SHAPES, "read", 100)
    entry(header_cache.HEADERS, "not", 1)
    with read_by_another_process(read) as process:
        assert not look_after(monkeypatch, 0) and left() == {"read"}
        assert not header_cache.remove(read)
        process.kill() if how == "is killed" else process.communicate()
    assert header_cache.look_after() and left() == set()


def test_what_is_read_here_stays_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = entry(header_cache.SHAPES, "one", 100), entry(header_cache.HEADERS, "other", 90)
    with header_cache.reading():
        assert header_cache.use(one)
        with header_cache.reading():
            assert header_cache.use(other) and header_cache.use(one)
            assert not look_after(monkeypatch, 0) and left() == {"one", "other"}
        assert not look_after(monkeypatch, 0) and left() == {"one"}
    assert look_after(monkeypatch, 0) and left() == set()
    assert not header_cache.use(one), "it is gone"
    with header_cache.reading():
        assert not header_cache.use(one)


def test_what_is_used_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    header_cache.use(entry(header_cache.SHAPES, "again", 100))
    size = taken(entry(header_cache.SHAPES, "not", 90))
    assert look_after(monkeypatch, size) and left() == {"again"}


def test_what_another_process_is_removing_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are still there when they are counted, behind a lock that says that somebody has it."""
    leaving = entry(header_cache.HEADERS, "leaving", 100)
    lock = os.open(leaving, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    gone = threading.Timer(0.05, shutil.rmtree, (leaving,))
    gone.start()
    assert look_after(monkeypatch, 0)
    gone.join()
    os.close(lock)


def test_an_entry_that_another_process_reads_is_not_replaced() -> None:
    """It may have become whole since it was found damaged."""
    one = entry(header_cache.HEADERS, "one", 0, size=KIB)

    def fill(partial: Path) -> None:
        (partial / "new").write_bytes(b"")

    with read_by_another_process(one), pytest.raises(OSError, match="one"):
        header_cache.put(one, fill, lambda: False)
    assert (one / "x.gguf").exists()
    with header_cache.reading():
        assert header_cache.use(one), "one's own reading is in no way"
        header_cache.put(one, fill, (one / "new").exists)
    assert os.listdir(one) == ["new"]


def test_what_has_no_room_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read = entry(header_cache.SHAPES, "read", 100)
    monkeypatch.setattr(header_cache, "MOST", 100 * KIB)
    with header_cache.reading():
        header_cache.use(read)
        with pytest.raises(ModelError) as caught:
            put("new", size=60 * KIB)
    assert left() == {"read"}
    size = human(taken(entry(header_cache.SHAPES, ".like-it", 0, size=60 * KIB)))
    assert str(caught.value) == (
        f"the header of {size} cannot be kept: those in use take the rest of 100.0 KiB, which is all that may be kept; "
        "ask again later"
    )
    put("new", size=60 * KIB)
    assert left() == {"new"}, "nobody reads the other one any more"
    with pytest.raises(ModelError, match=r"the header of .* cannot be kept"):
        put("larger than all", size=101 * KIB)


def test_a_sparse_file_is_as_large_as_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry(header_cache.SHAPES, "sparse", 100, size=4 * KIB, apparent=1 << 40)
    assert look_after(monkeypatch, 64 * KIB) and left() == {"sparse"}


def test_what_a_killed_process_has_left_goes_at_once() -> None:
    for name in (".partial-x", ".leaving-x", "kept"):
        entry(header_cache.HEADERS, name, 0)
    assert header_cache.look_after() and left() == {"kept"}


WRITERS, WRITES = 4, 25
WRITING = f"""\
import sys
from fitter.model.files import header_cache as cache
from fitter.storage import cache_folder
cache.MOST = {WRITERS + 2} * 72 * 1024
for number in range({WRITES}):
    entry = cache_folder(cache.HEADERS) / (sys.argv[1] + str(number) if number % 3 else f"of all {{number}}")
    with cache.reading():
        if not cache.use(entry):
            cache.put(entry, lambda place: (place / "x").write_bytes(b"1" * 65536), (entry / "x").exists)
        assert (entry / "x").read_bytes() == b"1" * 65536
        assert cache.look_after()
        assert (entry / "x").read_bytes() == b"1" * 65536
"""


def test_processes_that_write_and_read_at_once_keep_the_limit() -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", WRITING, str(number)], stderr=subprocess.PIPE, text=True)
        for number in range(WRITERS)
    ]
    assert [(process.communicate()[1], process.returncode) for process in started] == [("", 0)] * WRITERS
    assert taken(cache_folder(header_cache.HEADERS)) <= (WRITERS + 3) * 72 * KIB
    assert not [name for name in left() if name.startswith(".")]


def test_no_folder_is_no_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert header_cache.look_after()
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    assert header_cache.look_after()
    assert not header_cache.use(cache_folder(header_cache.SHAPES) / "none")
