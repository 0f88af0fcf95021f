"""The version and the owner are declared once, and the release command knows every place that repeats them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tomli

import fitter
from tools.release import recipes
from tools.release.__main__ import PLACEHOLDER
from tools.release.package_index import Source
from tools.release.project import (
    Project,
    named_owners,
    named_versions,
    read_project,
    set_owner,
    set_version,
    tracked_texts,
)
from tools.release.project import parse_version as version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = read_project(ROOT)
ANOTHER = "Some-Body9"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with what this one tracks."""
    copy = tmp_path_factory.mktemp("repository")
    for name in tracked_texts(ROOT):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", copy], check=True)
    subprocess.run(["git", "-C", copy, "add", "--all", "--force"], check=True)
    return copy


def test_the_version_is_declared_once() -> None:
    assert str(PROJECT.version) == fitter.__version__
    assert tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]


def test_the_places_name_the_declared_version_and_owner() -> None:
    texts = tracked_texts(ROOT)
    del texts["CHANGELOG.md"]
    named = {name: named_versions(text) for name, text in texts.items() if name.endswith(".md")}
    assert {name: found for name, found in named.items() if found - {str(PROJECT.version)}} == {}
    assert "docs/guides/ci-systems.md" in [name for name, found in named.items() if found]
    owners = {name: {each.lower() for each in named_owners(text)} for name, text in texts.items()}
    assert {name: found for name, found in owners.items() if found - {PROJECT.owner.lower()}} == {}
    assert {"pyproject.toml", "mkdocs.yml", "fitter/cli/group.py"} <= {name for name, found in owners.items() if found}


def test_no_owner_is_left_where_the_command_does_not_know(copy: Path) -> None:
    before = tracked_texts(copy)
    changed = set_owner(copy, ANOTHER)
    texts = tracked_texts(copy)
    # Somebody's name may be a word of its own; the placeholder is none.
    rest = "" if PROJECT.owner == PLACEHOLDER else r"(?=/llama-fitter|\.github\.io)"
    old = re.compile(rf"(?<![\w.-]){re.escape(PROJECT.owner)}(?![\w-]){rest}")
    assert {name for name, text in texts.items() if old.search(text)} <= {"tools/release/__main__.py"}
    assert read_project(copy).owner == ANOTHER
    assert f'DOCUMENTATION = "https://{ANOTHER}.github.io/llama-fitter/"' in texts["fitter/cli/group.py"]
    assert set().union(*(named_owners(texts[name]) for name in changed)) <= {ANOTHER, ANOTHER.lower()}
    # Registries of containers take lower case only.
    assert not [name for name, text in texts.items() if f"ghcr.io/{ANOTHER}" in text]
    assert set_owner(copy, PROJECT.owner) == changed
    assert tracked_texts(copy) == before


def test_a_version_is_written_where_it_is_named(copy: Path) -> None:
    changed = set_version(copy, version("7.8.9"), "2030-01-02")
    assert {"CHANGELOG.md", "fitter/version.py", "docs/guides/ci-systems.md"} <= set(changed)
    assert read_project(copy).version == version("7.8.9")
    assert "\n## [Unreleased]\n\n## [7.8.9] - 2030-01-02\n" in (copy / "CHANGELOG.md").read_text()
    named = named_versions((copy / "docs/guides/ci-systems.md").read_text())
    assert named == {"7.8.9"}


# --- recipes


def stored(project: Project) -> dict[Path, str]:
    """The recipes as the command writes them with the sources that the stored formula names."""
    formula = (ROOT / recipes.FORMULA).read_text()
    found = re.findall(r'resource "(.+)" do\n    url "(.+)"\n    sha256 "(.+)"\n', formula)
    sources = {name: Source(name, url, sha256) for name, url, sha256 in found}
    sdist = re.search(r'^  url "(.+)"\n  sha256 "(.+)"$', formula, re.MULTILINE)
    assert sdist is not None
    pins = {name: sources.pop(name) for name in recipes.PINS}
    return recipes.render(ROOT, project, Source("llama-fitter", *sdist.groups()), pins, list(sources.values()))


def test_the_recipes_follow_from_the_declarations() -> None:
    for path, text in stored(PROJECT).items():
        assert (ROOT / path).read_text() == text, "python -m tools.release --recipes writes them"


def test_a_file_has_its_address_before_it_is_there(tmp_path: Path) -> None:
    """As PyPI made that of an empty file of its own."""
    (tmp_path / "py.typed").touch()
    found = recipes.published(tmp_path / "py.typed")
    digest = "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    assert found.url == f"https://files.pythonhosted.org/packages/0e/57/{digest[4:]}/py.typed"
    assert found.sha256.startswith("e3b0c44298fc1c14")


def test_the_recipes_have_every_requirement() -> None:
    formula = (ROOT / recipes.FORMULA).read_text()
    brought = set(re.findall(r'(?:resource|depends_on) "(.+?)"', formula))
    unmarked = {each.name for each in PROJECT.requirements if each.marker is None}
    assert unmarked <= brought
    pins = {name: tomli.loads((ROOT / path).read_text()) for name, path in recipes.PINS.items()}
    for pin in pins.values():
        assert f'{pin["sdist"]}"\n    sha256 "{pin["sha256"]}"' in formula


def test_the_recipe_is_one_of_conda() -> None:
    rattler_build = pytest.importorskip("rattler_build")
    variants = {"python": ["3.10", "3.13"], "c_compiler": ["gcc"], "cxx_compiler": ["gxx"], "c_stdlib": ["sysroot"]}
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / recipes.RECIPE)
    for platform in ("linux-64", "osx-arm64"):
        where = rattler_build.PlatformConfig(target_platform=platform, host_platform=platform, build_platform=platform)
        config = rattler_build.RenderConfig(platform=where)
        older, newer = recipe.render(rattler_build.VariantConfig(variants), config)
        run = {str(each).partition(" ")[0] for each in newer.recipe.requirements.run}
        assert run == {"python"} | {each.name for each in PROJECT.requirements if each.marker is None}
        assert {str(each).partition(" ")[0] for each in older.recipe.requirements.run} - run == {"tomli"}
    with pytest.raises(rattler_build.RecipeParseError, match="builds"):
        rattler_build.Stage0Recipe.from_yaml((ROOT / recipes.RECIPE).read_text().replace("build:", "builds:", 1))


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby")
def test_the_formula_is_ruby() -> None:
    done = subprocess.run(["ruby", "-wc", ROOT / recipes.FORMULA], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Syntax OK\n", "")
