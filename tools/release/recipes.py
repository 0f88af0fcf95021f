"""Recipes for package managers: a formula for Homebrew and a recipe for conda-forge, both from ``pyproject.toml``.

They build the source distribution with the llama.cpp that wheels bring (``FITTER_BUNDLE_LLAMA``). Their sources are
those of ``vendor/llama.cpp``'s pins, so that a build asks no network for them.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from packaging.requirements import Requirement

from tools.release import distributions
from tools.release.package_index import Source, find_source, resolve
from tools.release.project import NAME, Project, ReleaseError, read_project

FORMULA = Path("packaging/homebrew/llama-fitter.rb")
RECIPE = Path("packaging/conda-forge/recipe.yaml")
PINS = {"pinned": Path("vendor/llama.cpp/pin.toml"), "bundled": Path("vendor/llama.cpp/bundle/pin.toml")}
"""The pins of llama.cpp's sources: what fitter is compiled against, and what it brings."""
PYTHON = "3.13"
_FORMULAE = ("cffi", "numpy")
"""Requirements that Homebrew has formulae of, since they take long to compile."""
_PARTS = ("pycparser",)
"""Requirements of theirs."""


def write(tree: Path, project: Project, sdist: Path) -> list[str]:
    """Write the recipes of that source distribution into ``tree``, with today's versions of what it requires."""
    pins = {name: pinned_source(tree / path) for name, path in PINS.items()}
    resources = resolve(project.requirements, (*_FORMULAE, *_PARTS), "macosx_14_0_arm64", PYTHON)
    for path, text in render(tree, project, published(sdist), pins, resources).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text, encoding="utf-8")
    return [str(FORMULA), str(RECIPE)]


def write_from_tree(tree: Path) -> list[str]:
    """Build the source distribution of ``tree`` and write its recipes."""
    project = read_project(tree)
    with tempfile.TemporaryDirectory() as directory:
        distributions.run(tree, "build", "--sdist", "--no-isolation", "--outdir", directory, tree)
        return write(tree, project, Path(directory) / project.sdist)


def check(tree: Path, project: Project, sdist: Path) -> None:
    """Raise ``ReleaseError`` unless the recipes of ``tree`` are of that source distribution."""
    checksum = published(sdist).sha256
    for path in (FORMULA, RECIPE):
        if checksum not in (tree / path).read_text(encoding="utf-8"):
            raise ReleaseError(f"{path} is not of {project.sdist}, whose sha256 is {checksum}: release it again")


def published(sdist: Path) -> Source:
    """Return what a source distribution is on PyPI, which names the folder of a file by its BLAKE2 digest."""
    content = sdist.read_bytes()
    digest = hashlib.blake2b(content, digest_size=32).hexdigest()
    url = f"https://files.pythonhosted.org/packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{sdist.name}"
    return Source(NAME, url, hashlib.sha256(content).hexdigest())


def pinned_source(pin: Path) -> Source:
    """Return the source distribution that a pin of llama.cpp names."""
    said = dict(re.findall(r'^(\w+) = "([^"]*)"$', pin.read_text(encoding="utf-8"), re.MULTILINE))
    found = find_source(said["package"], said["version"])
    if found.sha256 != said["sha256"]:
        raise ReleaseError(f"{found.url} has sha256 {found.sha256}, and {pin.name} says {said['sha256']}: correct it")
    return found


def render(
    tree: Path, project: Project, sdist: Source, pins: Mapping[str, Source], resources: Sequence[Source]
) -> dict[Path, str]:
    """Return the text of each recipe.

    Args:
        tree: Where the pins are, which say the folder of llama.cpp in each source.
        project: What is packaged.
        sdist: The source distribution.
        pins: The sources of llama.cpp.
        resources: The sources of Python distributions that the formula brings.
    """
    folders = {name: _folder(tree / path) for name, path in PINS.items()}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Braces are conda's own.
        variable_start_string="[[",
        variable_end_string="]]",
    )
    values = {
        "name": NAME,
        "project": project,
        "sdist": sdist,
        "pins": pins,
        "folders": folders,
        "resources": resources,
        "formulae": _FORMULAE,
        "python": PYTHON,
        "requirements": [each for each in project.requirements if each.marker is None],
        "of_older_pythons": _of_older_pythons(project),
    }
    return {path: environment.get_template(f"{path.name}.jinja").render(values) for path in (FORMULA, RECIPE)}


def _of_older_pythons(project: Project) -> list[tuple[Requirement, str]]:
    """Return what Pythons up to a version require in addition, and that version; those of Windows are left out."""
    found = []
    for each in project.requirements:
        older = re.fullmatch(r'python_version < "([\d.]+)"', str(each.marker))
        if older is not None:
            found.append((each, older[1]))
        elif each.marker is not None and each.marker.evaluate({"sys_platform": "linux", "platform_system": "Linux"}):
            raise ReleaseError(f"the recipes know no marker {each.marker}: say it in tools/release/recipes.py")
    return found


def _folder(pin: Path) -> str:
    """Return the folder of llama.cpp in the source that a pin names."""
    found = re.search(r'^folder = "(.+)"$', pin.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, pin
    return found[1]
