"""``python -m tools.release VERSION``: check, build, commit and tag a release; the workflow publishes what is tagged.

The release is made in a work tree of its own (tools/release/draft.py): whatever fails or is interrupted leaves the
repository as it was. The exit status is 1 if it fails.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from tools.release import distributions, recipes
from tools.release.draft import adopt, check_repository, open_draft
from tools.release.git import GitError, git
from tools.release.project import (
    ReleaseError,
    parse_version,
    read_project,
    release_notes,
    set_owner,
    set_version,
    unreleased,
)

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "OWNER"
"""The owner until there is one."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the options say in the repository at ``root``."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", help="the version to release, such as 0.2.0")
    tests = parser.add_mutually_exclusive_group()
    tests.add_argument("--tested", action="store_true", help="this commit has passed make test")
    tests.add_argument("--check", action="store_true", help="run make lint and make test-unit first")
    parser.add_argument("--output", type=Path, default=root / "dist", help="where the files go (dist)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--dry-run", action="store_true", help="build and check, and show what a release would change")
    other.add_argument("--build", action="store_true", help="build and check the files of this tree, of this version")
    other.add_argument("--notes", action="store_true", help="print the changelog's entries of this version")
    other.add_argument("--recipes", action="store_true", help="write packaging/ for this tree's source distribution")
    other.add_argument("--owner", metavar="NAME", help="write the owner of the repository wherever it is named")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.owner:
            print("\n".join(set_owner(root, options.owner)))
        elif options.recipes:
            print("\n".join(recipes.write_from_tree(root)))
        elif options.build:
            build_tree(root, options.version, options.output)
        elif not options.version:
            raise ReleaseError("no version: give the one to release, such as 0.2.0")
        elif options.notes:
            print(release_notes(root, parse_version(options.version)))
        else:
            release(root, parse_version(options.version), options)
    except (ReleaseError, GitError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("release: interrupted: the repository is as it was", file=sys.stderr)
        return 130
    return 0


def release(root: Path, version: Version, options: argparse.Namespace) -> None:
    """Make the release. Raises ``ReleaseError``, ``GitError``."""
    tag = f"v{version}"
    wrong = check(root, version, tag)
    if not (options.tested or options.check or options.dry_run):
        wrong.append("nobody says that this commit is tested: add --tested if it passed make test, or --check")
    if wrong and not options.dry_run:
        raise ReleaseError(wrong[0])
    for line in wrong:
        print(f"would refuse: {line}")
    if options.check:
        _make(root, "lint", "test-unit")
    tree = open_draft(root)
    set_version(tree, version, datetime.date.today().isoformat())
    project = read_project(tree)
    files = _fresh(tree / "build" / "release" / "files")
    distributions.build(tree, project, files)
    said = distributions.check(tree, project, files)
    recipes.write(tree, project, files / project.sdist)
    distributions.publish(files, options.output)
    print("\n".join([*said, git(tree, "diff", "--stat", "HEAD")]))
    if options.dry_run:
        print(f"would commit and tag {tag}; its files are in {options.output}")
        if wrong:
            raise ReleaseError(wrong[0])
        return
    adopt(root, tree, tag, f"Release {version}")
    print(f"tagged {tag}: git push --atomic origin main {tag} has the workflow publish it")


def check(root: Path, version: Version, tag: str) -> list[str]:
    """Return why this version cannot be released, a line each; empty if it can."""
    wrong = check_repository(root, tag)
    project = read_project(root)
    if project.owner == PLACEHOLDER:
        wrong.append("the repository has no owner: python -m tools.release --owner NAME, and commit it")
    released = git(root, "tag", "--list", "v[0-9]*").replace("v", "").splitlines()
    newest = max([project.version, *map(Version, released)])
    # The first release is of the version that is declared.
    if version < newest or (version == newest and released):
        wrong.append(f"{version} is not newer than {newest}: give a newer version")
    try:
        unreleased(root)
    except ReleaseError as error:
        wrong.append(str(error))
    return wrong


def build_tree(root: Path, version: str | None, output: Path) -> None:
    """Build and check the files of the tree at ``root`` as it stands. Raises ``ReleaseError``."""
    project = read_project(root)
    if version is not None and parse_version(version) != project.version:
        raise ReleaseError(f"this tree is {project.version}, not {version}: tag the commit that made the release")
    files = _fresh(root / "build" / "release" / "files")
    distributions.build(root, project, files)
    print("\n".join(distributions.check(root, project, files)))
    if version is not None:
        recipes.check(root, project, files / project.sdist)
    distributions.publish(files, output)


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _make(root: Path, *targets: str) -> None:
    if subprocess.run(["make", "-C", str(root), *targets], check=False).returncode != 0:
        raise ReleaseError(f"make {' '.join(targets)} failed: see above")


if __name__ == "__main__":
    sys.exit(main())
