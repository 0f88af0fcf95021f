"""The files of a release, made here: which ones are refused."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from fitter.storage import portable
from tests.support.cases import cases, named_cases
from tools.release.distributions import LARGEST, check
from tools.release.git import git
from tools.release.project import ReleaseError, read_project
from tools.wheel.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = replace(read_project(ROOT), version=Version("0.2.0"))
ABOUT = "llama_fitter-0.2.0.dist-info"
METADATA = (
    "Metadata-Version: 2.4\nName: llama-fitter\nVersion: 0.2.0\nDescription-Content-Type: text/markdown\n\n# It\n"
)
CONTENT = {
    **dict.fromkeys(git(ROOT, "ls-files", "fitter").splitlines(), ""),
    f"{ABOUT}/METADATA": METADATA,
    f"{ABOUT}/WHEEL": "Wheel-Version: 1.0\n",
    f"{ABOUT}/RECORD": "",
    f"{ABOUT}/licenses/LICENSE": "MIT",
}
SDIST = "llama_fitter-0.2.0.tar.gz"
WINDOWS = "llama_fitter-0.2.0-py3-none-win_amd64.whl"


def write_wheel(path: Path, content: Mapping[str, str], padding: int = 0) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            archive.writestr(name, text)
        if padding:
            archive.writestr("fitter/llama/libfitter.so", os.urandom(padding))


def write_sdist(path: Path, names: tuple[str, ...] = ()) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("PKG-INFO", "pyproject.toml", *names):
            data = METADATA.encode()
            member = tarfile.TarInfo(f"llama_fitter-0.2.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for target in TARGETS.values():
        write_wheel(tmp_path / f"llama_fitter-0.2.0-py3-none-{target.platform}.whl", CONTENT)
    write_sdist(tmp_path / SDIST)
    return tmp_path


def test_the_right_files(files: Path) -> None:
    pytest.importorskip("twine")
    lines = check(ROOT, PROJECT, files)
    assert [line.split()[-1] for line in lines] == sorted(path.name for path in files.iterdir())
    assert {line.split()[1] for line in lines} == {"MB"}
    # Without a description PyPI's page would be empty.
    write_wheel(files / WINDOWS, {**CONTENT, f"{ABOUT}/METADATA": METADATA.partition("\n\n")[0] + "\n"})
    with pytest.raises(ReleaseError, match=r"^python -m twine check failed: see above$"):
        check(ROOT, PROJECT, files)


def without(name: str) -> dict[str, str]:
    return {each: text for each, text in CONTENT.items() if each != name}


UNCLEAN = "build it from a clean tree"
WHEELS = {
    "a file is missing": (without("fitter/version.py"), f"lacks fitter/version.py: {UNCLEAN}"),
    "a file of others": (
        *({**CONTENT, "tools/__init__.py": ""}, f"has tools/__init__.py, which is not fitter's: {UNCLEAN}"),
    ),
    "no license": (without(f"{ABOUT}/licenses/LICENSE"), "has no license: see license-files in pyproject.toml"),
    "another version in it": (
        {**CONTENT, f"{ABOUT}/METADATA": METADATA.replace("0.2.0", "0.1.0")},
        "says that it is 0.1.0: build it again",
    ),
}


@cases(WHEELS)
def test_a_wheel_with_other_files(content: dict[str, str], why: str, files: Path) -> None:
    write_wheel(files / WINDOWS, content)
    with pytest.raises(ReleaseError) as raised:
        check(ROOT, PROJECT, files)
    assert str(raised.value) == f"{WINDOWS} {why}"


@named_cases(
    ("no wheel for a system", None, "no wheel for windows-x86_64: see what python -m tools.wheel says of it"),
    ("another version", WINDOWS.replace("0.2.0", "0.1.0"), "{} is not of version 0.2.0: remove it"),
    ("no py3", WINDOWS.replace("py3-none", "cp311-cp311"), "{} is not for every Python 3: its tag should be py3-none"),
    ("another system", WINDOWS.replace("win_amd64", "win32"), "{} is for no system that is missing: remove it"),
    ("two for a system", WINDOWS.replace("none-", "none-any."), "{} is for no system that is missing: remove it"),
    ("another file", "notes.txt", "{} is no file of llama-fitter 0.2.0: remove it"),
)
def test_a_wheel_with_another_name(name: str | None, why: str, files: Path) -> None:
    if name is None:
        (files / WINDOWS).unlink()
    elif "any." in name:
        write_wheel(files / name, CONTENT)
        name = WINDOWS
    else:
        (files / WINDOWS).rename(files / name)
    with pytest.raises(ReleaseError) as raised:
        check(ROOT, PROJECT, files)
    assert str(raised.value) == why.format(name)


def test_windows_takes_every_name_in_a_wheel() -> None:
    names = git(ROOT, "ls-files", "fitter").splitlines()
    assert names and [name for name in names if any(portable(part) != part for part in name.split("/"))] == []
    assert len({name.lower() for name in names}) == len(names), "two names are one on Windows"
    assert max(map(len, names)) < 120, "a folder of Python's may have as many again, of 260"


def test_a_large_wheel(files: Path) -> None:
    write_wheel(files / WINDOWS, CONTENT, padding=LARGEST)
    with pytest.raises(
        ReleaseError, match=rf"^{WINDOWS} has 15,\d\d\d,\d\d\d bytes, more than 15,000,000: take some out$"
    ):
        check(ROOT, PROJECT, files)


def test_the_source_distribution(files: Path) -> None:
    for name in ("packaging/homebrew/llama-fitter.rb", "vendor/llama.cpp/source/LICENSE", "build/x"):
        write_sdist(files / SDIST, (name,))
        with pytest.raises(ReleaseError) as raised:
            check(ROOT, PROJECT, files)
        assert str(raised.value) == f"{SDIST} has {name}: leave it out with sdist.exclude in pyproject.toml"
    (files / SDIST).unlink()
    with pytest.raises(ReleaseError, match=rf"^{SDIST} is missing: "):
        check(ROOT, PROJECT, files)
