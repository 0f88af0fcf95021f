"""The files that are published: a wheel for each system and the source distribution, built from a tree and checked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tools.release.git import git
from tools.release.project import NAME, Project, ReleaseError
from tools.wheel.targets import TARGETS

LARGEST = 15_000_000
"""Most bytes of a file: who tries fitter waits for the download."""


def build(tree: Path, project: Project, output: Path) -> None:
    """Build every distribution of the tree at ``tree`` into ``output``, an empty directory. Raises ``ReleaseError``."""
    for target in TARGETS:
        print(f"building the wheel for {target}", file=sys.stderr, flush=True)
        run(tree, "tools.wheel", "--target", target, "--output", output)
    run(tree, "build", "--sdist", "--no-isolation", "--outdir", output, tree)
    _try_sdist(tree, output / project.sdist)


def check(tree: Path, project: Project, output: Path) -> list[str]:
    """Check the files in ``output`` and describe each in a line. Raises ``ReleaseError`` for the first wrong one."""
    found = sorted(path for path in output.iterdir())
    platforms = {target.platform: name for name, target in TARGETS.items()}
    for path in found:
        if path.suffix == ".whl":
            platforms = _without_its_platforms(path, project, platforms)
            _check_wheel(tree, project, path)
        elif path.name != project.sdist:
            raise ReleaseError(f"{path.name} is no file of {NAME} {project.version}: remove it")
        if path.stat().st_size > LARGEST:
            raise ReleaseError(f"{path.name} has {path.stat().st_size:,} bytes, more than {LARGEST:,}: take some out")
    if platforms:
        raise ReleaseError(f"no wheel for {', '.join(platforms.values())}: see what python -m tools.wheel says of it")
    if output / project.sdist not in found:
        raise ReleaseError(f"{project.sdist} is missing: see what python -m build --sdist says")
    _check_sdist(output / project.sdist)
    run(tree, "twine", "check", "--strict", *found)
    return [f"{path.stat().st_size / 1e6:5.1f} MB  {path.name}" for path in found]


def run(tree: Path, module: str, *words: str | Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a Python module's command in ``tree``; what it says is shown if it fails. Raises ``ReleaseError``."""
    # CMake looks for ninja beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *map(str, words)]
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(variables or {})}
    # In a group of its own, so that an interruption ends the compilers, too.
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            # ninja passes it on to compilers, which are in other groups.
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode != 0:
        print(output, file=sys.stderr)
        said = " ".join(word for word in map(str, words) if not word.startswith(("-", os.sep)))
        how = f"was ended by signal {-process.returncode}" if process.returncode < 0 else "failed: see above"
        raise ReleaseError(f"python -m {module} {said} {how}")


def _without_its_platforms(path: Path, project: Project, platforms: Mapping[str, str]) -> dict[str, str]:
    """Return ``platforms`` without those of the wheel. Raises ``ReleaseError`` if none, or one Python only, is its."""
    _, version, _, tags = parse_wheel_filename(path.name)
    if version != project.version:
        raise ReleaseError(f"{path.name} is not of version {project.version}: remove it")
    if {(tag.interpreter, tag.abi) for tag in tags} != {("py3", "none")}:
        raise ReleaseError(f"{path.name} is not for every Python 3: its tag should be py3-none")
    wanted = {tag.platform for tag in tags} & platforms.keys()
    if not wanted:
        raise ReleaseError(f"{path.name} is for no system that is missing: remove it")
    return {platform: name for platform, name in platforms.items() if platform not in wanted}


def _check_wheel(tree: Path, project: Project, path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        written = HeaderParser().parsestr(archive.read(metadata).decode("utf-8"))
    about = metadata.partition("/")[0]
    if written["Version"] != str(project.version):
        raise ReleaseError(f"{path.name} says that it is {written['Version']}: build it again")
    if lacking := sorted(set(git(tree, "ls-files", "fitter").splitlines()) - names):
        raise ReleaseError(f"{path.name} lacks {lacking[0]}: build it from a clean tree")
    if foreign := sorted(name for name in names if name.partition("/")[0] not in ("fitter", about)):
        raise ReleaseError(f"{path.name} has {foreign[0]}, which is not fitter's: build it from a clean tree")
    if not any(name.startswith(f"{about}/licenses/") for name in names):
        raise ReleaseError(f"{path.name} has no license: see license-files in pyproject.toml")


def _check_sdist(path: Path) -> None:
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if foreign := sorted(name for name in inside if "/source/" in name or name.startswith(("packaging/", "build/"))):
        raise ReleaseError(f"{path.name} has {foreign[0]}: leave it out with sdist.exclude in pyproject.toml")


def _try_sdist(tree: Path, sdist: Path) -> None:
    """Build a wheel from the source distribution, as on a system that has no wheel. Raises ``ReleaseError``."""
    with tempfile.TemporaryDirectory() as directory:
        pip = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", directory)
        # Whether it compiles is asked; the wheels have shown what compilers make of it.
        run(tree, "pip", *pip, sdist, variables={"SKBUILD_CMAKE_BUILD_TYPE": "None"})


def publish(output: Path, destination: Path) -> None:
    """Put the checked files into ``destination``, in place of those of other versions."""
    destination.mkdir(parents=True, exist_ok=True)
    for old in destination.glob(f"{NAME.replace('-', '_')}-*"):
        old.unlink()
    for path in output.iterdir():
        shutil.copy2(path, destination)
