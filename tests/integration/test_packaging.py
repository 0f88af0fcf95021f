"""The wheel, the sdist, and the build against llama.cpp's source."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import fitter
from tests.support.cases import named_cases

DISTRIBUTION = f"llama_fitter-{fitter.__version__}"
ROOT = Path(__file__).resolve().parents[2]
PIN = dict(re.findall(r'^(\w+) = "([^"]*)"$', (ROOT / "vendor/llama.cpp/pin.toml").read_text(), re.MULTILINE))


def run(
    *command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {key: value for key, value in os.environ.items() if key not in ("LLAMA_CPP_SOURCE_DIR", "CMAKE_ARGS")}
    clean |= {"PATH": bin_first, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def source() -> Path:
    """The pinned llama.cpp, whole."""
    return Path(run(sys.executable, "vendor/llama.cpp/fetch.py").stdout.strip())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree as a fresh clone has it: what git tracks and nothing that was built."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def wheel(checkout: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    # `make install` has compiled the same sources with all optimizations
    run(*pip, checkout, env={"LLAMA_CPP_SOURCE_DIR": str(source), "SKBUILD_CMAKE_BUILD_TYPE": "None"})
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_its_libraries(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{DISTRIBUTION}.dist-info/METADATA").decode()
        scripts = archive.read(f"{DISTRIBUTION}.dist-info/entry_points.txt").decode()
    assert {"fitter/py.typed", "fitter/llama/_declarations.py"} <= names
    assert {"fitter/llama/libfitter.so", "fitter/llama/libggml-fitter.so"} <= names
    package = run("git", "ls-files", "fitter").stdout.splitlines()
    assert {name for name in package if (ROOT / name).is_file()} <= names
    # Nothing of llama.cpp, of the tests or of the build is shipped.
    assert {name.partition("/")[0] for name in names} == {"fitter", f"{DISTRIBUTION}.dist-info"}
    assert {name for name in names if name.endswith(".so")} == {
        "fitter/llama/libfitter.so",
        "fitter/llama/libggml-fitter.so",
        "fitter/llama/libfitter-cudart.so",
        "fitter/llama/libfitter-cells.so",
        "fitter/llama/libfitter-preload.so",
    }
    # No Python ABI in the libraries: one wheel for every Python.
    assert wheel.name.startswith(f"{DISTRIBUTION}-py3-none-")
    # The one requirement that is compiled while it is installed is the one that is asked for.
    assert 'Requires-Dist: llama-cpp-python>=0.3.25; extra == "python"' in metadata
    assert metadata.count("Requires-Dist: llama-cpp-python") == 1
    points = configparser.ConfigParser()
    points.read_string(scripts)
    assert dict(points["console_scripts"]) == dict.fromkeys(("fitter", "llama-fitter"), "fitter.__main__:main")
    assert dict(points["pytest11"]) == {"fitter": "fitter.regression.pytest_plugin"}


def test_installed_wheel_finds_and_loads_its_libraries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # An editable install of this tree would be found first.
    code = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fitter.llama.build import library\n"
        "library.libraries()\n"
        "print(library.backend_path())\n"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout.strip() == str(
        tmp_path / "fitter/llama/libggml-fitter.so"
    )


def test_sdist_holds_what_a_build_needs_and_no_llama_cpp(checkout: Path, tmp_path: Path) -> None:
    laid = checkout / "vendor/llama.cpp/source/include/llama.h"
    laid.parent.mkdir(parents=True, exist_ok=True)
    laid.write_text("// upstream's\n")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=checkout)
    shutil.rmtree(laid.parents[1])
    with tarfile.open(tmp_path / f"{DISTRIBUTION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        *("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "bindings/CMakeLists.txt"),
        *("bindings/fitter.h", "bindings/declarations.py", "bindings/measuring/breakdown.cpp"),
        *("bindings/virtual/rules/types.h", "bindings/cuda_runtime/cudart_traps.inc"),
    }
    assert needed | {f"vendor/llama.cpp/{name}" for name in ("pin.toml", "fetch.py", "CMakeLists.txt")} <= names
    assert not {name for name in names if name.startswith("vendor/llama.cpp/source")}


@named_cases(("CMake variable", True, False), ("environment", False, True))
def test_wrong_source_directory_is_one_clear_error(variable: bool, environment: bool, tmp_path: Path) -> None:
    wrong = tmp_path / "nowhere"
    options = [f"-DLLAMA_CPP_SOURCE_DIR={wrong}"] if variable else []
    env = {"LLAMA_CPP_SOURCE_DIR": str(wrong)} if environment else {}
    done = run("cmake", "-S", ROOT, "-B", tmp_path / "build", *options, env=env, check=False)
    assert done.returncode != 0
    assert done.stderr.count("CMake Error") == 1
    message = " ".join(done.stderr.split())
    assert f"LLAMA_CPP_SOURCE_DIR is not a directory: {wrong}; point it to a llama.cpp source or unset it" in message


def test_the_pin_says_what_the_source_is(source: Path) -> None:
    def version(path: str, prefix: str) -> str:
        text = (source / path).read_text()
        return ".".join(re.findall(rf"set\({prefix}_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text))

    assert version("CMakeLists.txt", "LLAMA") == PIN["llama"]
    assert version("ggml/CMakeLists.txt", "GGML") == PIN["ggml"]


def test_building_llama_passes_its_options_through(source: Path, tmp_path: Path) -> None:
    options = ("-DFITTER_BUILD_LLAMA=ON", "-DGGML_RPC=OFF", f"-DPython3_EXECUTABLE={sys.executable}")
    run("cmake", "-S", ROOT, "-B", tmp_path, *options)
    targets = set(re.findall(r"[\w-]+", run("cmake", "--build", tmp_path, "--target", "help").stdout))
    assert {"fitter-llama", "llama", "llama-fit-params"} <= targets
    assert not {"ggml-rpc", "ggml-rpc-server"} & targets
    # Upstream's tests have no place here; its server is built where it is asked for by name.
    assert "llama-server" in targets and "test-llama-archs" not in targets
