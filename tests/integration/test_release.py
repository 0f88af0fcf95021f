"""A release of a small project with its own ``tools.wheel``: what it makes, and that a failure leaves no trace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.support.cases import cases, named_cases
from tests.support.patience import is_running, until
from tools.release import recipes
from tools.release.__main__ import PLACEHOLDER, main
from tools.release.git import git
from tools.release.package_index import Source
from tools.release.project import NAME, ReleaseError, read_project

pytest.importorskip("build")
pytest.importorskip("twine")

PROJECT = f"""\
[build-system]
requires = ["scikit-build-core>=0.10"]
build-backend = "scikit_build_core.build"
[project]
name = "llama-fitter"
dynamic = ["version"]
description = "A small one"
readme = "README.md"
license = "MIT"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["click>=8.1", "tomli>=2; python_version < '3.11'"]
[project.urls]
Documentation = "https://somebody.github.io/{NAME}/"
Source = "https://github.com/somebody/{NAME}"
[tool.scikit-build]
wheel.cmake = false
wheel.packages = ["fitter"]
wheel.py-api = "py3"
sdist.exclude = ["/packaging"]
metadata.version.provider = "scikit_build_core.metadata.regex"
metadata.version.input = "fitter/version.py"
"""
WHEEL = """\
import shutil, sys
from pathlib import Path
from scikit_build_core.build import build_wheel
from tools.wheel.targets import TARGETS
target, output = sys.argv[2], sys.argv[4]
built = Path("build") / "one"
name = next((path.name for path in built.glob("*.whl")), "") or build_wheel(str(built))
shutil.copy(built / name, Path(output, name.replace("none-any", "none-" + TARGETS[target].platform)))
"""
"""Stands for zig: the same file for every system, which is built once."""
PIN = 'package = "{0}"\nversion = "1.0"\nsha256 = "{0}"\nfolder = "vendor/llama.cpp"\n'
FILES = {
    "pyproject.toml": PROJECT,
    ".gitignore": "/build/\n/dist/\n__pycache__/\n",
    "LICENSE": "MIT\n",
    "README.md": f'Write `uses: somebody/{NAME}@v0.1.0` or `pip install "{NAME}[web]==0.1.0"`.\n',
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- It is there.\n",
    "Makefile": "lint test-unit:\n\t@echo $@ >>build/made\n",
    "fitter/__init__.py": "",
    "fitter/version.py": 'VERSION = "0.1.0"\n',
    "tools/__init__.py": "",
    "tools/wheel/__init__.py": "",
    "tools/wheel/__main__.py": WHEEL,
    "tools/wheel/targets.py": (Path(__file__).parents[2] / "tools/wheel/targets.py").read_text(),
    "vendor/llama.cpp/pin.toml": PIN.format("pinned"),
    "vendor/llama.cpp/bundle/pin.toml": PIN.format("bundled"),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository on ``main`` with one commit; the package index is not asked."""
    root = tmp_path / "a project"
    for name, text in FILES.items():
        write(root, name, text)
    (root / "build").mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main", root], check=True)
    for key, value in {"user.name": "Somebody", "user.email": "somebody@example.org"}.items():
        git(root, "config", key, value)
    commit(root)
    monkeypatch.setattr(
        "tools.release.recipes.find_source", lambda name, version: Source(name, f"https://{name}", name)
    )
    monkeypatch.setattr("tools.release.recipes.resolve", lambda *_: [Source("click", "https://click", "c1")])
    return root


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Change it")


def state(root: Path) -> dict[str, str]:
    """What a failure must not change: commits, tags, the branch, and the files that git does not ignore."""
    asked = ("rev-parse HEAD", "branch --show-current", "tag", "status --porcelain", "for-each-ref", "diff HEAD")
    return {words: git(root, *words.split()) for words in asked}


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("building")]


def test_a_release_is_a_commit_a_tag_and_seven_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = git(root, "rev-parse", "HEAD")
    assert main(["0.2.0", "--check"], root) == 0
    assert said(capsys) == []
    assert (root / "build/made").read_text().split() == ["lint", "test-unit"]
    assert git(root, "rev-parse", "v0.2.0^{commit}", "HEAD^").splitlines() == [git(root, "rev-parse", "HEAD"), before]
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "show", "--name-only", "--format=%s").splitlines() == [
        *("Release 0.2.0", "", "CHANGELOG.md", "README.md", "fitter/version.py"),
        *("packaging/conda-forge/recipe.yaml", "packaging/homebrew/llama-fitter.rb"),
    ]
    assert (root / "README.md").read_text().count("0.2.0") == 2
    assert re.fullmatch(
        r"# Changelog\n\n## \[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n### Added\n\n- It is there\.\n",
        (root / "CHANGELOG.md").read_text(),
    )
    assert sorted(path.name for path in (root / "dist").iterdir()) == [
        *(f"llama_fitter-0.2.0-py3-none-{system}.whl" for system in ("macosx_14_0_arm64", "macosx_14_0_x86_64")),
        *(f"llama_fitter-0.2.0-py3-none-manylinux_2_28_{each}.whl" for each in ("aarch64", "x86_64")),
        *("llama_fitter-0.2.0-py3-none-win_amd64.whl", "llama_fitter-0.2.0.tar.gz"),
    ]
    assert main(["0.2.0", "--notes"], root) == 0
    assert capsys.readouterr().out == "### Added\n\n- It is there.\n"
    # What the workflow builds of the tag is what the recipes name.
    assert main(["0.2.0", "--build"], root) == 0
    assert main(["0.2.1", "--build"], root) == 1
    assert said(capsys) == ["release: this tree is 0.2.0, not 0.2.1: tag the commit that made the release"]
    sdist = root / "dist/llama_fitter-0.2.0.tar.gz"
    sdist.write_bytes(b"another")
    with pytest.raises(ReleaseError, match=r"llama-fitter.rb is not of llama_fitter-0.2.0.tar.gz, "):
        recipes.check(root, read_project(root), sdist)


def test_a_dry_run_builds_and_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(root)
    assert main(["0.2.0", "--dry-run", "--output", str(root / "build/dry")], root) == 0
    assert state(root) == before
    out, err = capsys.readouterr()
    assert len([line for line in out.splitlines() if " MB  llama_fitter-0.2.0" in line]) == 6
    assert "fitter/version.py" in out and "would commit and tag v0.2.0" in out
    assert len(list((root / "build/dry").iterdir())) == 6
    git(root, "switch", "-q", "-c", "other")
    assert main(["0.2.0", "--dry-run"], root) == 1
    out, err = capsys.readouterr()
    assert out.startswith("would refuse: the branch is other: git switch main\n")
    assert err.splitlines()[-1] == "release: the branch is other: git switch main"


NO_ENTRY = "CHANGELOG.md has no entry below ## [Unreleased]: write what is new there"
NO_OWNER = "the repository has no owner: python -m tools.release --owner NAME, and commit it"
NO_GIT = "git status: not a git repository (or any of the parent directories): .git"
NO_NOTES = "CHANGELOG.md has no version 0.2.0: release it with python -m tools.release 0.2.0"
NO_ACCOUNT = "a--b is no name of an account of GitHub's: letters, digits and single dashes make one"


@named_cases(
    ("no version", "", "", "no version: give the one to release, such as 0.2.0"),
    ("no number", "new", "", "new is no version: give one such as 0.2.0 or 1.0.0rc1"),
    ("another spelling", "v0.2.0", "", "v0.2.0 is written 0.2.0: give that"),
    ("an older version", "0.0.9", "", "0.0.9 is not newer than 0.1.0: give a newer version"),
    ("a version that is there", "0.3.0", "git tag v0.3.0", "the tag v0.3.0 is there: give a newer version"),
    ("one older than a tag", "0.2.0", "git tag v0.3.0", "0.2.0 is not newer than 0.3.0: give a newer version"),
    ("a change", "0.2.0", "echo >>LICENSE", "LICENSE is not committed: commit it or take it away"),
    ("a new file", "0.2.0", "touch new", "new is not committed: commit it or take it away"),
    ("another branch", "0.2.0", "git switch -qc other", "the branch is other: git switch main"),
    ("no branch", "0.2.0", "git switch -q --detach", "the branch is none: git switch main"),
    ("no entry", "0.2.0", "sed -i '/^- /d' CHANGELOG.md && git commit -qam x", NO_ENTRY),
    ("no owner", "0.2.0", f"sed -i s/somebody/{PLACEHOLDER}/ pyproject.toml && git commit -qam x", NO_OWNER),
    ("no repository", "0.2.0", "rm -r .git", NO_GIT),
    ("no notes", "0.2.0 --notes", "", NO_NOTES),
    ("a bad owner", "--owner a--b", "", NO_ACCOUNT),
)
def test_what_is_refused(words: str, prepare: str, why: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}

    subprocess.run(["bash", "-c", prepare], cwd=root, check=True)
    before = files()
    assert main([*words.split(), *(["--tested"] if words and words[0] != "-" else [])], root) == 1
    assert said(capsys) == [f"release: {why}"]
    assert files() == before


def test_an_untested_commit_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0.2.0"], root) == 1
    why = "nobody says that this commit is tested: add --tested if it passed make test, or --check"
    assert said(capsys) == [f"release: {why}"]
    write(root, "Makefile", "lint test-unit:\n\tfalse\n")
    commit(root)
    before = state(root)
    assert main(["0.2.0", "--check"], root) == 1
    assert said(capsys)[-1] == "release: make lint test-unit failed: see above"
    assert state(root) == before


@named_cases(
    ("no wheel", "raise SystemExit('no zig')\n", "python -m tools.wheel linux-x86_64 failed: see above"),
    (
        "a build that is killed",
        "import os; os.kill(os.getpid(), 9)\n",
        "python -m tools.wheel linux-x86_64 was ended by signal 9",
    ),
    (
        "a wheel for another system",
        WHEEL.replace("TARGETS[target].platform", "'freebsd'"),
        "llama_fitter-0.2.0-py3-none-freebsd.whl is for no system that is missing: remove it",
    ),
)
def test_what_fails_leaves_the_repository_as_it_was(
    wheel: str, why: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, "tools/wheel/__main__.py", wheel)
    commit(root)
    before = state(root)
    assert main(["0.2.0", "--tested"], root) == 1
    assert said(capsys)[-1] == f"release: {why}"
    assert state(root) == before
    assert not (root / "dist").exists()


@cases((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9))
def test_an_interrupted_release_leaves_the_repository_as_it_was(number: int, status: int, root: Path) -> None:
    wheel = "import subprocess; compiler = subprocess.Popen(['sleep', '600'])\n"
    wheel += "open('build/began', 'w').write(str(compiler.pid)); compiler.wait()\n"
    write(root, "tools/wheel/__main__.py", wheel)
    commit(root)
    before = state(root)
    code = "from pathlib import Path; from sys import argv; from tools.release.__main__ import PLACEHOLDER, main; "
    code += "raise SystemExit(main(argv[2:], Path(argv[1])))"
    command = [sys.executable, "-c", code, root, "0.2.0", "--tested"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        began = root / "build/release/tree/build/began"
        until(lambda: began.exists() and began.read_text())
        compiler = psutil.Process(int(began.read_text()))
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == status
    if status == 130:
        assert err.splitlines()[-1] == "release: interrupted: the repository is as it was"
        until(lambda: not is_running(compiler))
    else:
        # Nothing can be done after it.
        os.killpg(os.getpgid(compiler.pid), signal.SIGKILL)
    assert state(root) == before
    assert not (root / "dist").exists()


def test_a_commit_meanwhile_is_not_lost(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the next release is not disturbed by what is left of this one."""
    other = "import subprocess; subprocess.run(['git', '-C', '../../..', 'commit', '-q', '--allow-empty', '-m', 'x'])\n"
    write(root, "tools/wheel/__main__.py", other + WHEEL)
    commit(root)
    assert main(["0.2.0", "--tested"], root) == 1
    assert "see whether main has changed meanwhile, and release it again" in said(capsys)[-1]
    assert git(root, "tag") == "" and git(root, "status", "--porcelain") == ""
    assert git(root, "log", "-1", "--format=%s") == "x"
    write(root, "tools/wheel/__main__.py", WHEEL)
    commit(root)
    assert main(["0.2.0", "--tested"], root) == 0


def test_the_first_release_is_of_the_declared_version(root: Path) -> None:
    assert main(["0.1.0", "--tested"], root) == 0
    assert git(root, "tag") == "v0.1.0"
    with zipfile.ZipFile(next((root / "dist").glob("*win_amd64.whl"))) as wheel:
        assert "fitter/version.py" in wheel.namelist()
    with tarfile.open(root / "dist/llama_fitter-0.1.0.tar.gz") as archive:
        assert not [name for name in archive.getnames() if "packaging" in name]
