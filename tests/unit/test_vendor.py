"""vendor/llama.cpp/fetch.py: what is laid is what was pinned, whole or not at all. Small made-up sdists; no network."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cases import named_cases

ROOT = Path(__file__).resolve().parents[2]
FETCH = ROOT / "vendor" / "llama.cpp" / "fetch.py"

HEADERS = {
    "CMakeLists.txt": "set(LLAMA_VERSION_MAJOR 1)\n",
    "ggml/CMakeLists.txt": "set(GGML_VERSION_MAJOR 1)\n",
    "include/llama.h": "// llama\n",
    "ggml/include/ggml.h": "// ggml\n",
    "ggml/src/ggml-backend-impl.h": "// impl\n",
    "src/llama-ext.h": "// ext\n",
    "src/llama-context.h": "// context\n",
    "tools/mtmd/mtmd.h": "// mtmd\n",
}
SOURCES = {"src/llama.cpp": "int main;\n", "src/unicode.h": "// private\n", "ggml/src/ggml-cuda/a.cuh": "// cuda\n"}

# Enough for pip to accept the archive as an sdist without asking anyone for a build backend.
BACKEND = """
import os
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name = "pinned-1.0.dist-info"
    os.mkdir(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: pinned\\nVersion: 1.0\\n")
    return name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@dataclass(frozen=True)
class Vendor:
    """A directory as vendor/llama.cpp is: a pin, and room for the source."""

    directory: Path

    @property
    def source(self) -> Path:
        return self.directory / "source"

    def pin(self, sdist: Path, sha256: str | None = None, folder: str = "vendor/llama.cpp") -> None:
        values = {
            "package": "pinned",
            "version": "1.0",
            "sdist": sdist.name,
            "folder": folder,
            "sha256": sha256 or hashlib.sha256(sdist.read_bytes()).hexdigest(),
            "commit": "0123456789abcdef",
            "llama": "1.0.0",
            "ggml": "1.0.0",
        }
        text = "".join(f'{key} = "{value}"\n' for key, value in values.items())
        (self.directory / "pin.toml").write_text(text)

    def fetch(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, python: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [sys.executable, *python, FETCH]
        command += ["--pin", self.directory / "pin.toml", "--dest", self.source, *arguments]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "LLAMA_CPP_"))}
        clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **(env or {})}
        return subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=120)

    def laid(self) -> set[str]:
        """The files of the source, without the stamp."""
        files = {path.relative_to(self.source).as_posix() for path in self.source.rglob("*") if path.is_file()}
        return files - {".fitter-stamp"}


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    directory = tmp_path / "vendor"
    directory.mkdir()
    return Vendor(directory)


def write_sdist(path: Path, files: Mapping[str, str], inside: str = "pinned-1.0/vendor/llama.cpp/") -> Path:
    contents = {inside + name: text for name, text in files.items()}
    contents |= {"pinned-1.0/pyproject.toml": PYPROJECT, "pinned-1.0/backend.py": BACKEND}
    contents["pinned-1.0/PKG-INFO"] = "Metadata-Version: 2.1\nName: pinned\nVersion: 1.0\n"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            member.mtime = 1_000_000_000
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    (tmp_path / "links").mkdir()
    return write_sdist(tmp_path / "links" / "pinned-1.0.tar.gz", HEADERS | SOURCES)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failed run."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("fetching ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fetch.py: ")
    return lines[0]


@named_cases(("everything", (), HEADERS | SOURCES), ("headers only", ("--headers-only",), HEADERS))
def test_lays_what_is_asked(options: tuple[str, ...], expected: Mapping[str, str], vendor: Vendor, sdist: Path) -> None:
    vendor.pin(sdist)
    done = vendor.fetch("--sdist", sdist, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(vendor.source)
    assert vendor.laid() == set(expected)
    assert {name: (vendor.source / name).read_text() for name in expected} == expected
    assert sorted(path.name for path in vendor.directory.iterdir()) == ["pin.toml", "source"]


def test_files_keep_their_time_and_whether_they_run(vendor: Vendor, tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / "pinned-1.0.tar.gz", {**HEADERS, "run.sh": "true\n"})
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist).returncode == 0
    assert os.access(vendor.source / "run.sh", os.X_OK)
    assert not os.access(vendor.source / "include/llama.h", os.X_OK)
    assert (vendor.source / "include/llama.h").stat().st_mtime == 1_000_000_000


@named_cases(
    ("full, full", (), (), False),
    ("headers, headers", ("--headers-only",), ("--headers-only",), False),
    ("full serves headers", (), ("--headers-only",), False),
    ("headers do not serve full", ("--headers-only",), (), True),
)
def test_a_second_run_lays_only_what_is_missing(
    first: tuple[str, ...], second: tuple[str, ...], again: bool, vendor: Vendor, sdist: Path
) -> None:
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist, *first).returncode == 0
    inode = vendor.source.stat().st_ino
    done = vendor.fetch("--sdist", sdist, *second)
    assert done.returncode == 0
    assert done.stdout.strip() == str(vendor.source)
    assert (vendor.source.stat().st_ino != inode) is again
    assert vendor.laid() == set(HEADERS if first and second else HEADERS | SOURCES)


def test_headers_that_an_earlier_one_did_not_want_are_laid(vendor: Vendor, sdist: Path) -> None:
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist, "--headers-only").returncode == 0
    (vendor.source / "tools/mtmd/mtmd.h").unlink()
    assert vendor.fetch("--sdist", sdist, "--headers-only").returncode == 0
    assert vendor.laid() == set(HEADERS)


def test_a_second_run_needs_no_sdist_and_no_pip(vendor: Vendor, sdist: Path) -> None:
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist).returncode == 0
    sdist.unlink()
    assert vendor.fetch(python=("-S",)).returncode == 0


def test_another_pin_replaces_the_source_if_its_checksum_is_right(vendor: Vendor, sdist: Path, tmp_path: Path) -> None:
    """An empty LLAMA_CPP_SOURCE_DIR is as if it were unset."""
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist, env={"LLAMA_CPP_SOURCE_DIR": ""}).returncode == 0
    before = vendor.laid()
    other = write_sdist(tmp_path / "pinned-1.0.tar.gz", HEADERS | {"src/new.cpp": "\n"})
    vendor.pin(other, sha256="0" * 64)
    line = said(vendor.fetch("--sdist", other))
    assert "checksum mismatch: pinned-1.0.tar.gz" in line and "0" * 64 in line
    assert vendor.laid() == before
    vendor.pin(other)
    assert vendor.fetch("--sdist", other).returncode == 0
    assert vendor.laid() == {*HEADERS, "src/new.cpp"}


@named_cases(
    ("cut short", "cut.tar.gz", "cut.tar.gz is not a readable sdist"),
    ("without llama.cpp", "elsewhere.tar.gz", "does not contain vendor/llama.cpp"),
    ("no such file", "nowhere.tar.gz", "nowhere.tar.gz: No such file"),
)
def test_an_unreadable_sdist_is_refused_and_leaves_nothing(
    name: str, message: str, vendor: Vendor, sdist: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut.tar.gz").write_bytes(sdist.read_bytes()[:-200])
    write_sdist(tmp_path / "elsewhere.tar.gz", HEADERS, inside="pinned-1.0/elsewhere/")
    asked = tmp_path / name
    vendor.pin(asked if asked.exists() else sdist)
    assert message in said(vendor.fetch("--sdist", asked))
    assert [path.name for path in vendor.directory.iterdir()] == ["pin.toml"]


def test_a_pin_that_lacks_a_key_is_named(vendor: Vendor, sdist: Path) -> None:
    (vendor.directory / "pin.toml").write_text('package = "pinned"\nversion = "1.0"\n')
    assert "has no sdist, folder, sha256, commit, llama, ggml" in said(vendor.fetch("--sdist", sdist))


def test_members_that_would_land_elsewhere_are_left_out(vendor: Vendor, tmp_path: Path) -> None:
    files = {**HEADERS, "../../../escaped.h": "x", ".git": "gitdir: elsewhere"}
    sdist = write_sdist(tmp_path / "pinned-1.0.tar.gz", files)
    vendor.pin(sdist)
    assert vendor.fetch("--sdist", sdist).returncode == 0
    assert vendor.laid() == set(HEADERS)
    assert not list(tmp_path.rglob("escaped.h"))


# --- pip


def test_pip_fetches_the_sdist(vendor: Vendor, sdist: Path) -> None:
    vendor.pin(sdist)
    done = vendor.fetch(env={"PIP_FIND_LINKS": str(sdist.parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(vendor.source)
    assert vendor.laid() == set(HEADERS | SOURCES)


def test_what_pip_fetched_is_checked(vendor: Vendor, sdist: Path) -> None:
    vendor.pin(sdist, sha256="0" * 64)
    assert "checksum mismatch" in said(vendor.fetch(env={"PIP_FIND_LINKS": str(sdist.parent)}))
    assert [path.name for path in vendor.directory.iterdir()] == ["pin.toml"]


@named_cases(
    ("no such package", {}, (), "No matching distribution found for pinned==1.0"),
    (
        "no network",
        {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"},
        (),
        "no connection to the package index",
    ),
    ("no pip", {}, ("-S",), "no pip in "),
)
def test_why_pip_could_not_is_one_line(
    env: dict[str, str], python: tuple[str, ...], reason: str, vendor: Vendor, sdist: Path
) -> None:
    vendor.pin(sdist)
    line = said(vendor.fetch(env=env, python=python))
    assert reason in line
    assert "LLAMA_CPP_SOURCE_DIR" in line
    assert [path.name for path in vendor.directory.iterdir()] == ["pin.toml"]


# --- LLAMA_CPP_SOURCE_DIR


def own_tree(directory: Path, without: str | None = None) -> Path:
    for name, text in HEADERS.items():
        if name != without:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
    return directory


def test_a_tree_of_the_users_own_is_used_and_nothing_fetched(vendor: Vendor, tmp_path: Path) -> None:
    tree = own_tree(tmp_path / "own")
    done = vendor.fetch(env={"LLAMA_CPP_SOURCE_DIR": str(tree)})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tree), "")
    assert not vendor.source.exists()


@pytest.mark.parametrize("missing", sorted(HEADERS.keys() - {"ggml/include/ggml.h"}))
def test_a_tree_that_is_no_llama_cpp_is_refused(vendor: Vendor, tmp_path: Path, missing: str) -> None:
    tree = own_tree(tmp_path / "own", without=missing)
    line = said(vendor.fetch(env={"LLAMA_CPP_SOURCE_DIR": str(tree)}))
    assert f"{tree} has no {missing}" in line


def test_a_tree_that_is_not_there_is_refused(vendor: Vendor, tmp_path: Path) -> None:
    line = said(vendor.fetch(env={"LLAMA_CPP_SOURCE_DIR": str(tmp_path / "nowhere")}))
    assert f"LLAMA_CPP_SOURCE_DIR is not a directory: {tmp_path / 'nowhere'}" in line


def test_llama_cpp_in_another_folder_of_the_sdist(vendor: Vendor, tmp_path: Path) -> None:
    inside = {**HEADERS, "run.sh": "true\n"}
    sdist = write_sdist(tmp_path / "pinned-1.0.tar.gz", inside, "pinned-1.0/third/llama.cpp/")
    vendor.pin(sdist, folder="third/llama.cpp")
    assert vendor.fetch("--sdist", sdist).returncode == 0
    assert {path for path in inside if (vendor.source / path).is_file()} == inside.keys()


# --- the pins themselves


def test_the_pin_is_a_release_that_the_dependency_allows() -> None:
    pin = dict(re.findall(r'^(\w+) = "([^"]*)"$', (FETCH.parent / "pin.toml").read_text(), re.MULTILINE))
    least = re.search(rf'"{pin["package"]}>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert least is not None
    assert [int(part) for part in least[1].split(".")] <= [int(part) for part in pin["version"].split(".")]
    assert pin["sdist"] == f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    assert re.fullmatch(r"[0-9a-f]{64}", pin["sha256"])
    assert re.fullmatch(r"[0-9a-f]{40}", pin["commit"])
