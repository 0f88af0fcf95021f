"""What is declared of the project, each once, and the places that repeat it: its version and its owner.

The version stands in ``fitter/version.py``, the owner in ``project.urls.Source`` of ``pyproject.toml``. Other files
name them where a reader copies a line; ``set_version`` and ``set_owner`` rewrite those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from tools.release.git import git

NAME = "llama-fitter"
CHANGELOG = "CHANGELOG.md"
_VERSION = "fitter/version.py"
_UNRELEASED = "## [Unreleased]\n"
_OWNERS = re.compile(
    rf"(?P<before>github\.com/|ghcr\.io/|uses: )(?P<owner>[A-Za-z0-9-]+)(?=/{NAME}\b)"
    rf"|(?P<scheme>https://)(?P<site>[A-Za-z0-9-]+)(?=\.github\.io/{NAME}\b)"
    rf"|(?P<list>\brecipe-maintainers:\n    - )(?P<maintainer>[A-Za-z0-9-]+)"
)
_VERSIONS = re.compile(rf"(?P<before>{NAME}(?:@v|:|(?:\[[a-z,]+\])?==)|llama_fitter-|\brev: v)(?P<version>\d[\w.]*)")


class ReleaseError(Exception):
    """Why there is no release, in one line: what is wrong and what to do."""


@dataclass(frozen=True)
class Project:
    """What ``pyproject.toml`` and ``fitter/version.py`` declare.

    ``requirements``: of the distribution itself; ``builds_with``: of its build; ``python``: the oldest one.
    """

    version: Version
    owner: str
    summary: str
    documentation: str
    python: str
    requirements: tuple[Requirement, ...]
    builds_with: tuple[Requirement, ...]

    @property
    def sdist(self) -> str:
        """The name of the source distribution's file."""
        return f"{NAME.replace('-', '_')}-{self.version}.tar.gz"


def read_project(root: Path) -> Project:
    """Read the declarations of the tree at ``root``. Raises ``ReleaseError``."""
    text = (root / _VERSION).read_text(encoding="utf-8")
    declared = re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE)
    if declared is None:
        raise ReleaseError(f'{_VERSION} declares no version: write VERSION = "0.1.0"')
    document = tomli.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = document["project"]
    owner = _OWNERS.match(table["urls"]["Source"].removeprefix("https://"))
    if owner is None:
        raise ReleaseError(f"project.urls.Source in pyproject.toml names no owner: write https://github.com/…/{NAME}")
    return Project(
        version=Version(declared[1]),
        owner=owner["owner"],
        summary=table["description"],
        documentation=table["urls"]["Documentation"],
        python=table["requires-python"],
        requirements=tuple(map(Requirement, table["dependencies"])),
        builds_with=tuple(map(Requirement, document["build-system"]["requires"])),
    )


def parse_version(text: str) -> Version:
    """Return the version that ``text`` is. Raises ``ReleaseError`` unless it is one as PEP 440 writes it."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(f"{text} is no version: give one such as 0.2.0 or 1.0.0rc1") from None
    if str(version) != text:
        raise ReleaseError(f"{text} is written {version}: give that")
    return version


def named_owners(text: str) -> set[str]:
    """Return every owner that addresses of this project name in ``text``."""
    return {match["owner"] or match["site"] or match["maintainer"] for match in _OWNERS.finditer(text)}


def named_versions(text: str) -> set[str]:
    """Return every version of this project that lines to copy name in ``text``."""
    return {match["version"] for match in _VERSIONS.finditer(text)}


def set_owner(root: Path, owner: str) -> list[str]:
    """Write ``owner`` into every address of this project. Returns the names of the files that changed."""
    if not re.fullmatch(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}", owner):
        raise ReleaseError(f"{owner} is no name of an account of GitHub's: letters, digits and single dashes make one")

    def renamed(match: re.Match[str]) -> str:
        # The registry of containers takes lower case only.
        name = owner.lower() if match["before"] == "ghcr.io/" else owner
        return f"{match['before'] or match['scheme'] or match['list']}{name}"

    return _rewrite(root, lambda _, text: _OWNERS.sub(renamed, text))


def set_version(root: Path, version: Version, date: str) -> list[str]:
    """Write ``version`` where it is declared and named, and give it the changelog's entries. Returns changed files."""

    def rewritten(name: str, text: str) -> str:
        if name == _VERSION:
            return re.sub(r'(?m)^VERSION = ".+"$', f'VERSION = "{version}"', text)
        if name == CHANGELOG:
            return text.replace(_UNRELEASED, f"{_UNRELEASED}\n## [{version}] - {date}\n", 1)
        return _VERSIONS.sub(rf"\g<before>{version}", text) if name.endswith(".md") else text

    return _rewrite(root, rewritten)


def unreleased(root: Path) -> str:
    """Return the changelog's entries that no version has. Raises ``ReleaseError`` if there are none."""
    _, mark, after = (root / CHANGELOG).read_text(encoding="utf-8").partition(_UNRELEASED)
    entries = re.split(r"^## \[", after, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not mark or not re.search(r"^- ", entries, re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG} has no entry below {_UNRELEASED.strip()}: write what is new there")
    return entries


def release_notes(root: Path, version: Version) -> str:
    """Return the changelog's entries of ``version``. Raises ``ReleaseError`` if there are none."""
    text = (root / CHANGELOG).read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(str(version))}\] - .*\n(?s:(.*?))(?=^## \[|\Z)", text, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{CHANGELOG} has no version {version}: release it with python -m tools.release {version}")
    return found[1].strip()


def tracked_texts(root: Path) -> dict[str, str]:
    """Return the text of every file that git tracks at ``root``, by its name; no pictures and other bytes."""
    texts = {}
    for name in git(root, "ls-files", "-z").split("\0"):
        path = root / name
        if name and path.is_file() and not path.is_symlink():
            try:
                texts[name] = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def _rewrite(root: Path, change: Callable[[str, str], str]) -> list[str]:
    changed = []
    for name, text in tracked_texts(root).items():
        after = change(name, text)
        if after != text:
            (root / name).write_bytes(after.encode("utf-8"))
            changed.append(name)
    return changed
