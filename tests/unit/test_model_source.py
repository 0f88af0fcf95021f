"""From a path to the files of a model, and everything that can be wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fitter.errors import ModelError, UsageError
from fitter.model import location
from fitter.model.files.source import model_files, split_name, split_path
from tests.support.cases import cases, named_cases

HEAD = b"GGUF\x03\x00\x00\x00"


def _files(directory: Path, *names: str) -> list[Path]:
    paths = [directory / name for name in names]
    for path in paths:
        path.write_bytes(HEAD + bytes(16))
    return paths


def _refused(path: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        model_files(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_a_single_file(tmp_path: Path) -> None:
    (path,) = _files(tmp_path, "a.gguf")
    assert model_files(path) == model_files(str(path)) == (path,)
    path.write_bytes(b"GGUF\x02\x00\x00\x00")
    assert model_files(path) == (path,), "version 2"


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (path,) = _files(tmp_path, "a.gguf")
    assert model_files("~/a.gguf") == (path,)
    assert "no such user" in _refused("~nobody-has-this-name/a.gguf")


@named_cases(
    ("empty", b"", "is empty"),
    ("less than the magic", b"GG", "is not a GGUF file"),
    ("something else", b'{"metadata": 1}', "is not a GGUF file; convert"),
    (
        "Git LFS",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a",
        "is a pointer of Git LFS, not the model; get the file itself with 'git lfs pull'",
    ),
    ("a web page", b"<!DOCTYPE html>", "is a web page, not the model; download the file itself"),
    ("another", b"<HTML><head>", "is a web page, not the model; download the file itself"),
    ("before GGUF", b"ggjt\x03\x00\x00\x00", "is not a GGUF file"),
    ("truncated", b"GGUF\x03", "is truncated after 5 bytes"),
    ("big endian", b"GGUF\x00\x00\x00\x03", "is a big-endian GGUF"),
    ("version 1", b"GGUF\x01\x00\x00\x00", "is GGUF version 1,"),
    ("version 4", b"GGUF\x04\x00\x00\x00", "is GGUF version 4; this llama.cpp reads up to version 3"),
)
def test_no_model(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    message = _refused(path)
    assert says in message
    assert message.startswith(str(path))


@named_cases(
    ("a shape", "llama-3.1-8b", "shape://llama-3.1-8b"),
    ("a shape with a type", "Llama-3.1-8B:q8_0", "shape://llama-3.1-8b:Q8_0"),
    ("a type as people write it", "gpt-oss-20b:q4km", "shape://gpt-oss-20b:Q4_K_M"),
    ("as Ollama writes it", "Gemma3:27b", "shape://gemma-3-27b"),
    ("without hyphens", "phi4", "shape://phi-4"),
    ("a shape with more words", "llama-3.1-8b-instruct", None),
    ("a path", "./llama-3.1-8b", None),
    ("a file's name", "llama-3.1-8b.gguf", None),
)
def test_the_name_of_a_shape_is_its_address_where_no_such_file_is(
    name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert location.is_address(name) == (meant is not None)
    assert location.called(name) == (meant or name)
    _files(tmp_path, name)
    assert not location.is_address(name)
    assert location.model_files(name) == (Path(name),)


@named_cases(
    ("more words", "llama-3.1-8b-instruct", "llama-3.1-8b-instruct: no such file or shape; did you mean llama-3.1-8b"),
    ("another size", "llama3.1:80b", "did you mean llama-3.1-8b"),
    ("nothing like a shape", "my-model", None),
    ("a file", "llama-3.1-8b.gguf", None),
    ("a path", "./llama-3.1-8b", None),
)
def test_a_missing_file_is_told_which_shapes_are_called_so(
    name: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError if says is None else UsageError, match="no such file") as caught:
        location.model_files(name)
    assert (says or "") in str(caught.value)
    assert (says is None) == ("did you mean" not in str(caught.value))


@cases(
    ("a.gguf", "no such file"),
    ("a\0b.gguf", "cannot be read: "),
    ("a" * 300 + ".gguf", "cannot be read: "),
    ("a" * 300 + "-00001-of-00002.gguf", "cannot be read: "),
    ("a\nb.gguf", r"a\nb.gguf': no such file"),
    ("pipe", "is not a regular file"),
)
def test_a_name_that_no_file_has(name: str, says: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert says in _refused(tmp_path / name)


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory; give the GGUF file (there is no GGUF file in it)" in _refused(tmp_path)
    _files(tmp_path, "b.gguf", "a.gguf")
    assert "is a directory; give the GGUF file in it, such as a.gguf" in _refused(tmp_path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = _files(tmp_path, "a.gguf")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert _refused(path) == f"{path} cannot be read: Permission denied"


def test_a_file_without_permission(tmp_path: Path) -> None:
    (path,) = _files(tmp_path, "a.gguf")
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        # root reads everything, so be somebody else for a moment
        os.seteuid(65534)
    try:
        assert "cannot be read: Permission denied" in _refused(path)
    finally:
        os.seteuid(user)


SPLIT = ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")


@pytest.mark.parametrize("given", SPLIT)
def test_any_file_of_a_split_stands_for_all(tmp_path: Path, given: str) -> None:
    paths = _files(tmp_path, *SPLIT)
    assert model_files(tmp_path / given) == tuple(paths)


@cases(
    (SPLIT[:2], "1 of 3 split files are missing, download them: m-00003-of-00003.gguf"),
    (SPLIT[1:], "1 of 3 split files are missing, download them: m-00001-of-00003.gguf"),
    (SPLIT[1:2], "2 of 3 split files are missing, download them: m-00001-of-00003.gguf, m-00003-of-00003.gguf"),
    ((), "no such file"),
)
def test_missing_split_files(there: tuple[str, ...], says: str, tmp_path: Path) -> None:
    _files(tmp_path, *there)
    assert says in _refused(tmp_path / SPLIT[1])


def test_many_missing_split_files_are_counted(tmp_path: Path) -> None:
    _files(tmp_path, "m-00001-of-00009.gguf")
    message = _refused(tmp_path / "m-00001-of-00009.gguf")
    assert message.endswith("m-00002-of-00009.gguf, m-00003-of-00009.gguf, m-00004-of-00009.gguf and 5 more")


def test_a_split_file_that_is_none(tmp_path: Path) -> None:
    _files(tmp_path, *SPLIT)
    (tmp_path / SPLIT[2]).write_bytes(b"")
    assert f"{SPLIT[2]} is empty" in _refused(tmp_path / SPLIT[0])


@cases(
    ("m-00001-of-00003.gguf", ("m", 1, 3)),
    ("a-b-00003-of-00003.gguf", ("a-b", 3, 3)),
    ("m-00001-of-00001.gguf", ("m", 1, 1)),
    ("m-00004-of-00003.gguf", None),
    ("m-00000-of-00003.gguf", None),
    ("m-1-of-3.gguf", None),
    ("m.gguf", None),
)
def test_split_names(name: str, split: tuple[str, int, int] | None) -> None:
    assert split_name(Path("models") / name) == split
    assert split is None or split_path(*split) == name
