"""Hints name an install that works from where this one came (PEP 610)."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fitter.installation import install_command
from tests.support.cases import cases

GIT = "https://git.example.org/llama-fitter"

ORIGINS: dict[str, tuple[Any, str]] = {
    "an index": (None, "'llama-fitter[web]'"),
    "a clone that can be edited": (
        {"url": "file://{here}/a%20clone", "dir_info": {"editable": True}},
        "-e '{here}/a clone[web]'",
    ),
    "a clone": ({"url": "file://{here}/a%20clone", "dir_info": {}}, "'{here}/a clone[web]'"),
    "a wheel": ({"url": "file://{here}/f.whl", "archive_info": {}}, "'{here}/f.whl[web]'"),
    "a clone that is gone": ({"url": "file://{here}/gone", "dir_info": {"editable": True}}, "'llama-fitter[web]'"),
    "a repository": ({"url": GIT, "vcs_info": {"vcs": "git", "commit_id": "abc"}}, f"'llama-fitter[web] @ git+{GIT}'"),
    "a revision": (
        {"url": GIT, "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "v0.1.0"}},
        f"'llama-fitter[web] @ git+{GIT}@v0.1.0'",
    ),
    "a folder of a repository here": (
        {"url": "file://{here}/a%20clone", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "sub"},
        "'llama-fitter[web] @ git+file://{here}/a%20clone#subdirectory=sub'",
    ),
    "an archive": ({"url": "https://host/f.zip", "archive_info": {}}, "'llama-fitter[web] @ https://host/f.zip'"),
    "a damaged record": ("no JSON", "'llama-fitter[web]'"),
    "another record": ([1], "'llama-fitter[web]'"),
}


@cases(ORIGINS)
def test_the_install_comes_from_the_same_place(
    origin: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a clone").mkdir()
    (tmp_path / "f.whl").touch()
    record = tmp_path / "llama_fitter-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: llama-fitter\nVersion: 0.1.0\n")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (record / "direct_url.json").write_text(text.replace("{here}", str(tmp_path)))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: importlib.metadata.PathDistribution(record))
    command = install_command("web")
    assert command == f"pip install {words.replace('{here}', str(tmp_path))}"
    assert len(shlex.split(command)) == (4 if " -e " in command else 3)


def test_no_extra_and_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command() == "pip install llama-fitter"


def test_every_hint_asks_for_the_command() -> None:
    written = "pip install 'llama-" + "fitter"
    folder = Path(__file__).resolve().parents[2] / "fitter"
    code = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert [path.name for path, text in code.items() if written in text.replace("``" + written, "")] == []
