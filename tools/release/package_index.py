"""Source distributions on PyPI: the address and the checksum of each that a recipe names."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from tools.release.project import ReleaseError

_INDEX = "https://pypi.org/simple"
_SECONDS = 60


@dataclass(frozen=True)
class Source:
    """A source distribution: the distribution's name, the file's address, and the file's checksum."""

    name: str
    url: str
    sha256: str


def resolve(requirements: Iterable[Requirement], without: Iterable[str], platform: str, python: str) -> list[Source]:
    """Return the sources of what pip would install for ``requirements``, by their names.

    Args:
        requirements: What is asked for.
        without: Names of distributions that come from elsewhere.
        platform: The wheel's tag of the system, such as ``macosx_14_0_arm64``.
        python: The version of Python, such as ``3.13``.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--platform", platform, "--python-version", python, "--only-binary", ":all:", "--target", "unused"]
    command += map(str, requirements)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"pip finds no versions for the recipes: {done.stderr.strip().splitlines()[-1]}")
    installed = {
        canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"]
        for each in json.loads(done.stdout)["install"]
    }
    return [find_source(name, installed[name]) for name in sorted(installed.keys() - set(without))]


def find_source(name: str, version: str) -> Source:
    """Return the source distribution of that version on PyPI. Raises ``ReleaseError``."""
    address = f"{_INDEX}/{name}/"
    request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            files = json.load(answer)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise ReleaseError(f"{address} does not answer: {error}; try again") from None
    for file in files:
        try:
            found = parse_sdist_filename(file["filename"])
        except InvalidSdistFilename:
            continue
        if found == (canonicalize_name(name), Version(version)) and not file.get("yanked"):
            return Source(name, file["url"], file["hashes"]["sha256"])
    raise ReleaseError(f"{name} {version} has no source distribution on PyPI: leave it out in tools/release/recipes.py")
