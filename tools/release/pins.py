"""Pin what the Action and the workflows install: ``python -m tools.release.pins`` writes today's versions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import tomli
from packaging.utils import canonicalize_name

from tools.release.project import ReleaseError
from tools.release.recipes import PINS

FOLDER = Path("packaging/pins")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
_PLATFORMS = ("x86_64", "aarch64")
_HEAD = "# Written by python -m tools.release.pins; do not edit.\n"

_Files = dict[tuple[str, str], dict[str, set[str]]]
"""Versions of Python and hashes, by name and version."""


def write(root: Path) -> list[Path]:
    """Write the files, and return their paths. Raises ``ReleaseError`` where pip finds no version."""
    project = tomli.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    pin = tomli.loads((root / PINS["pinned"]).read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    # those of llama-cpp-python, which is built; and those of Python 3.10, whose markers pip reads as its own Python's
    needed += ["numpy", "typing-extensions", "diskcache", "jinja2", "tomli", "exceptiongroup"]
    action = _lines(_found(needed, PYTHONS))
    action += [f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}"]
    notes = _lines(_found(["jinja2", "packaging", "tomli"], PYTHONS))
    extras = project["project"]["optional-dependencies"]
    own = (each for name in extras if name not in ("python", "all") for each in extras[name])
    # an extra of fitter's own is among them
    tools = _found([*needed, *(each for each in own if "[" not in each)], ("3.13",), ("x86_64",))
    versions = [f"{name}=={version}" for name, version in sorted(tools)]
    texts = {"action.txt": action, "notes.txt": notes, "tools.txt": versions}
    for name, lines in texts.items():
        (root / FOLDER).mkdir(parents=True, exist_ok=True)
        (root / FOLDER / name).write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return [FOLDER / name for name in texts]


def _found(needed: Iterable[str], pythons: Iterable[str], machines: Iterable[str] = _PLATFORMS) -> _Files:
    """Ask pip what it would install."""
    found: _Files = defaultdict(lambda: defaultdict(set))
    for python in pythons:
        for machine in machines:
            tags = [f"--platform={each}_{machine}" for each in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
            command += ["--only-binary=:all:", "--target=unused", "--report=-", f"--python-version={python}", *tags]
            done = subprocess.run([*command, *needed], capture_output=True, text=True, check=False)
            if done.returncode:
                raise ReleaseError(f"pip finds no versions for Python {python}: {done.stderr.strip().splitlines()[-1]}")
            for each in json.loads(done.stdout)["install"]:
                key = canonicalize_name(each["metadata"]["name"]), each["metadata"]["version"]
                found[key][python].add(each["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def _lines(found: _Files) -> list[str]:
    lines = []
    for (name, version), hashes in sorted(found.items()):
        others = [each for each in found if each[0] == name and each[1] != version]
        everywhere = {python for by_python in found.values() for python in by_python}
        marker = "" if not others and hashes.keys() == everywhere else f' ; python_version in "{" ".join(hashes)}"'
        every = sorted({each for some in hashes.values() for each in some})
        lines.append(f"{name}=={version}{marker} " + " ".join(f"--hash=sha256:{each}" for each in every))
    return lines


if __name__ == "__main__":
    print(*write(Path(__file__).resolve().parents[2]), sep="\n")
