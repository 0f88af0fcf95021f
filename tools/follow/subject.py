"""What is followed: a directory, an archive or a package, with a source, a header or libraries of llama.cpp in it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.builds import older_c_library
from tools.builds.llama_builds import ROOT

PLACE = ROOT / "build" / "follow"
_BUILD_NUMBER = re.compile(r"(?<!\d)(\d{5})(?!\d)")
_HEADERS = ("include/llama.h", "llama.h", "_cffi_bindings.py")
"""Files that declare the structs; the last is of the package llama-cpp-py-sync."""


class FollowError(Exception):
    """Why a build cannot be followed, in one line."""


@dataclass(frozen=True)
class Package:
    """A file of the package index, as ``tools/builds/llama_builds.json`` names it."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Subject:
    """A build to follow.

    ``name`` is llama.cpp's own, such as b11739. ``source``, ``header`` and ``library`` are where it has these, and
    ``None`` where not; ``root`` is the directory that was searched.
    """

    name: str
    root: Path
    source: Path | None
    header: Path | None
    library: Path | None
    package: Package | None


def subject_of(what: str, library: Path | None = None, name: str = "") -> Subject:
    """Find a build in ``what``: a directory, an archive, or ``PACKAGE==VERSION``, which is fetched.

    ``library`` is where its libraries are if not there; ``name`` its name if no number of five digits is one. Raises
    ``FollowError``.
    """
    path, package = Path(what), None
    if not path.exists():
        path, package = _fetched(what)
    if path.is_file():
        path = _unpacked(path)
    number = _BUILD_NUMBER.search(what)
    if not name and number is None:
        raise FollowError(f"{what} says no number of a build: name it with --name, such as b11739")
    source = next((each.parents[1] for each in sorted(path.rglob("common/arg.cpp"))), None)
    library = library or next((each.parent for each in sorted(path.rglob("libllama*.so*"))), None)
    inside = path if source is None else source
    header = next((each for file in _HEADERS for each in sorted(inside.rglob(file)) if _declares(each)), None)
    if source is None and library is None and header is None:
        raise FollowError(f"there is neither a source, nor a llama.h, nor a libllama.so in {path}")
    return Subject(name or f"b{number[1] if number else ''}", path, source, header, library, package)


def _fetched(what: str) -> tuple[Path, Package]:
    name, is_exact, version = what.partition("==")
    if not is_exact:
        raise FollowError(f"{what} is neither a file, nor a directory, nor PACKAGE==VERSION")
    into = PLACE / what
    into.mkdir(parents=True, exist_ok=True)
    if not (files := sorted(into.iterdir())):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--no-build-isolation", "--dest", str(into), what], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FollowError(f"{what} cannot be fetched: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
        files = sorted(into.iterdir())
    (file,) = files
    return file, Package(name, version, file.name, hashlib.sha256(file.read_bytes()).hexdigest())


def _unpacked(archive: Path) -> Path:
    into = PLACE / f"{archive.name}.d"
    if not into.is_dir():
        fresh = into.with_suffix(".part")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            if archive.suffix in (".whl", ".zip"):
                shutil.unpack_archive(archive, fresh, "zip")
            else:
                shutil.unpack_archive(archive, fresh, filter="data")
            for folder in {each.parent for each in fresh.rglob("libllama*.so*")}:
                older_c_library.adapt(folder)
        except (OSError, ValueError, shutil.ReadError, subprocess.CalledProcessError) as error:
            raise FollowError(f"{archive} cannot be unpacked: {error}") from None
        fresh.rename(into)
    return into


def _declares(path: Path) -> bool:
    return "struct llama_context_params {" in path.read_text(encoding="utf-8", errors="replace")
