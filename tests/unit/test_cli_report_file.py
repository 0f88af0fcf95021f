"""Where a report may go, and what is said of every other place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fitter.cli.answers import STDOUT, check_files, write_file
from fitter.errors import AnswerError, FitterError, UsageError
from tests.support.cases import cases

LONG = "x" * 300

WRONG: dict[str, tuple[str, type[FitterError], str]] = {
    "a directory": ("folder", AnswerError, "it is a directory: name a file in it"),
    "in no directory": ("gone/report.html", AnswerError, "there is no directory {}/gone"),
    "in a file": ("kept.txt/report.html", AnswerError, "Not a directory: name another file"),
    "a name that is too long": (LONG, AnswerError, "File name too long: name another file"),
    "a directory whose name is too long": (f"{LONG}/a", AnswerError, "File name too long: name another file"),
    "a link to nowhere": ("link", AnswerError, "there is no directory {}/gone"),
    "a link to itself": ("loop", AnswerError, "Too many levels of symbolic links: name another file"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept.txt").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "report.html")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_where_it_cannot_go(name: str, place: Path) -> None:
    file, kind, message = WRONG[name]
    with pytest.raises(kind) as caught:
        check_files({"--svg": place / file})
    assert str(caught.value) == f"--svg {place / file} cannot be written: {message.format(place)}"


@cases("new.html", "kept.txt", "pipe", "folder/new.html")
def test_where_it_can(file: str, place: Path) -> None:
    before = sorted(place.rglob("*"))
    check_files({"--report": place / file, "--svg": None}, place / "model.gguf", None, "hf://org/repo/model.gguf")
    assert sorted(place.rglob("*")) == before and (place / "kept.txt").read_text() == "kept"


@cases(
    ("kept.txt", "kept.txt", "would replace what is read: name another file"),
    ("folder/../kept.txt", "kept.txt", "would replace what is read: name another file"),
    ("model.gguf", "kept.txt", "is a GGUF file, which a report would replace: name another file"),
)
def test_what_it_may_not_replace(file: str, source: str, message: str, place: Path) -> None:
    with pytest.raises(UsageError) as caught:
        check_files({"-o": place / file}, place / source)
    assert str(caught.value) == f"-o {place / file} {message}"


def test_a_file_is_written_once(place: Path) -> None:
    one, other = place / "one.html", place / "folder" / ".." / "one.html"
    with pytest.raises(UsageError) as caught:
        check_files({"--report": one}, others={"--junit": other, "--csv": None})
    assert str(caught.value) == f"--report and --junit both name {other}: give each a file of its own"


def test_stdout() -> None:
    check_files({"-o": STDOUT}, may_print=True)
    for files, may_print in (({"--report": STDOUT}, False), ({"--svg": STDOUT}, True)):
        with pytest.raises(UsageError, match="-: stdout has what the command prints otherwise: name a file"):
            check_files(files, may_print=may_print)


def test_a_directory_that_does_not_let_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place / "folder")
    with pytest.raises(AnswerError, match=r"new\.html cannot be written: Permission denied: name another file"):
        check_files({"--report": place / "folder" / "new.html"})
    check_files({"--report": place / "new.html"})


def test_it_is_written_whole_or_not_at_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(place / "kept.txt", "new ä")
    assert (place / "kept.txt").read_text(encoding="utf-8") == "new ä"
    write_file(STDOUT, "page\n")
    assert capsys.readouterr().out == "page\n"
    before = sorted(place.rglob("*"))
    with pytest.raises(AnswerError, match="No space left on device"):
        write_file(Path("/dev/full"), "page")
    assert sorted(place.rglob("*")) == before
