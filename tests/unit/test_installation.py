"""Hints name an install that works from where this one came (PEP 610)."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fitter.installation import install_command
from tests.support.cases import cases, stored

GIT = "https://git.example.org/llama-fitter"


@cases(
    stored("installation", "origins")
    | {
        "an index": (None, "'llama-fitter[web]'"),
    }
)
def test_it_is_installed_from_where_it_is(
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
