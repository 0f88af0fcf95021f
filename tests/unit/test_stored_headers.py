"""Headers that are kept: several processes may replace a damaged one at the same time."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from fitter.errors import ModelError
from fitter.model.files import header_cache, remote_files
from fitter.model.files.addresses import Address
from fitter.model.files.remote_files import Entry, StoredHeader, keep, newest
from fitter.storage import portable
from tests.support.cases import cases, named_cases

MODEL = [Address("https://host/m.gguf", "https://host/m.gguf")]
HEADER = StoredHeader("m.gguf", '"1"', 5000, b"GGUF" + b"x" * 1000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "folder", lambda: tmp_path)


def damaged() -> Entry:
    entry = keep(MODEL, [HEADER])
    with entry.paths[0].open("r+b") as file:
        file.write(b"FUGG")
    return entry


@cases(1, 5)
def test_another_one_replaces_it_too(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, remove, left = damaged(), header_cache.remove, [times]

    def removed(path: Path) -> bool:
        is_gone = remove(path)
        if path == entry.folder and left[0]:
            # another process was quicker, and what it left was damaged again
            left[0] -= 1
            path.mkdir()
            (path / "files").mkdir()
            (path / "files" / "m.gguf").touch()
        return is_gone

    monkeypatch.setattr(header_cache, "remove", removed)
    assert keep(MODEL, [HEADER]).is_whole() and left == [0]
    assert [path.name for path in entry.folder.parent.iterdir()] == [entry.folder.name]


@cases("about.json", "files", ".partial-1")
def test_a_file_may_have_any_name(name: str) -> None:
    model = [Address(f"https://host/{name}", f"https://host/{name}")]
    entry = keep(model, [StoredHeader(name, '"1"', 5000, HEADER.data)])
    assert newest(model) == entry and entry.paths[0].name == name
    assert entry.paths[0].read_bytes()[: len(HEADER.data)] == HEADER.data


NAMES = {
    "aux.gguf": "%61ux.gguf",
    "NUL": "%4EUL",
    "com1.tar.gz": "%63om1.tar.gz",
    "Lpt9 .gguf": "%4Cpt9 .gguf",
    "CONOUT$.gguf": "%43ONOUT$.gguf",
    "a:b.gguf": "a%3Ab.gguf",
    "a?b*.gguf": "a%3Fb%2A.gguf",
    'a\\b|<>".gguf': "a%5Cb%7C%3C%3E%22.gguf",
    "a\x01.gguf": "a%01.gguf",
    "a.": "a%2E",
    "a.gguf ": "a.gguf%20",
    "a%3Ab.gguf": "a%253Ab.gguf",
    "console.gguf": "console.gguf",
    "com10.gguf": "com10.gguf",
    "m-00001-of-00002.gguf": "m-00001-of-00002.gguf",
    "modèle 8B.gguf": "modèle 8B.gguf",
    ".gguf": ".gguf",
}


@pytest.mark.parametrize(("name", "stored"), NAMES.items())
def test_a_file_is_stored_by_a_name_that_windows_takes(name: str, stored: str) -> None:
    model = [Address(f"https://host/{name}", f"https://host/{name}")]
    entry = keep(model, [StoredHeader(name, '"1"', 5000, HEADER.data)])
    assert (entry.files[0].name, entry.paths[0].name) == (name, stored)
    assert entry.is_whole() and not portable(stored.replace("%", "")).startswith("%")


def test_a_file_that_is_longer_than_one_may_be_here(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    try:
        with pytest.raises(ModelError) as caught:
            keep(MODEL, [StoredHeader("m.gguf", '"1"', 10**18 - 1, HEADER.data)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        f"the header of https://host/m.gguf cannot be kept in {tmp_path}: File too large; set XDG_CACHE_HOME to a "
        "directory that takes files as long as the model"
    )


@named_cases(
    ("another length", {"file_bytes": 5001}),
    ("another digest", {"digest": "0"}),
    ("a text for a size", {"header_bytes": "1004"}),
    ("no length", {"file_bytes": None}),
    ("a list for a name", {"name": []}),
    ("less than nothing", {"header_bytes": -1}),
    ("more header than file", {"header_bytes": 2**70}),
    ("another field", {"size": 1}),
)
def test_what_is_said_of_it_is_damaged(changed: dict[str, object]) -> None:
    entry = keep(MODEL, [HEADER])
    assert newest(MODEL) == entry
    about = entry.folder / "about.json"
    (found,) = json.loads(about.read_text())
    about.write_text(json.dumps([{**found, **changed}]))
    assert newest(MODEL) is None
    about.write_text("[" * 100_000)
    assert newest(MODEL) is None


def test_what_cannot_be_replaced_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry, remove = damaged(), header_cache.remove
    monkeypatch.setattr(header_cache, "remove", lambda path: path != entry.folder and remove(path))
    with pytest.raises(ModelError) as caught:
        keep(MODEL, [HEADER])
    assert str(caught.value) == (
        f"the header of https://host/m.gguf cannot be kept in {tmp_path}: Directory not empty; set XDG_CACHE_HOME to a "
        "directory that can be written"
    )
    assert [path.name for path in entry.folder.parent.iterdir()] == [entry.folder.name]
