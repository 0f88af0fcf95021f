"""A CUDA toolkit to build with: which one is taken, for which cards, and what CMake is told."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.cases import cases, named_cases
from tools.cuda.toolkit import Toolkit, ToolkitError, architectures_of, capabilities_here, find, lay_out, quoted, reason


def program(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


@cases(
    ("89", "89"),
    ("86;89", "86;89"),
    ("86, 89", "86;89"),
    ("75-virtual;120a-real", "75-virtual;120a-real"),
    ("121f", "121f"),
)
def test_architectures(text: str, expected: str) -> None:
    assert architectures_of(text) == expected


@cases(
    ("8.9", "CUDA_ARCHITECTURES: '8.9' is no compute capability without its dot, such as 89"),
    ("89;rtx-4090", "CUDA_ARCHITECTURES: 'rtx-4090' is no compute capability without its dot, such as 89"),
    ("89$(id)", "CUDA_ARCHITECTURES: '89$(id)' is no compute capability without its dot, such as 89"),
    (
        " ",
        "no NVIDIA card is here to build for: name the compute capabilities of yours, such as "
        "CUDA_ARCHITECTURES=89 for an RTX 4090, or 86;89 for two kinds of cards",
    ),
)
def test_no_architectures(text: str, says: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        architectures_of(text)
    assert str(caught.value) == says


@named_cases(
    ("two kinds", "printf '8.9\\n8.6\\n8.9\\n'", ["86", "89"]),
    ("in order of their numbers", "printf '12.0\\n9.0\\n'", ["90", "120"]),
    ("no driver", "printf '8.9\\n'; exit 9", []),
    ("another answer", "echo 'Failed to initialize NVML'", []),
    ("no nvidia-smi", None, []),
)
def test_cards_here(code: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if code is not None:
        program(tmp_path / "nvidia-smi", code)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capabilities_here() == expected


def test_links_for_the_linker(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in ("libcudart.so.13", "libcublas.so.13", "libnvvm.so.4", "libcudart_static.a", "libo.so", "libo.so.1"):
        (lib / name).write_text(name)
    (lib / "libcublas.so").symlink_to("libcublas.so.12")
    for _ in range(2):
        lay_out(tmp_path)
        assert {path.name: path.read_text() for path in lib.iterdir() if path.suffix == ".so"} == {
            "libcudart.so": "libcudart.so.13",
            "libcublas.so": "libcublas.so.13",
            "libnvvm.so": "libnvvm.so.4",
            "libo.so": "libo.so",
        }
        assert (tmp_path / "lib64" / "libcudart.so").samefile(lib / "libcudart.so.13")


@named_cases(
    (
        "packages: no library of the driver's",
        Toolkit(Path("/c/bin/nvcc"), Path("/c"), frozenset({"cudart", "cublas"}), "/c/lib"),
        ["-DCUDAToolkit_ROOT=/c", "-DGGML_CUDA_NO_VMM=ON", "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,/c/lib"],
    ),
    ("on PATH", Toolkit(Path("/c/bin/nvcc"), None, frozenset({"cudart", "cublas", "cuda_driver"})), []),
)
def test_what_cmake_is_told(toolkit: Toolkit, options: list[str]) -> None:
    assert toolkit.options() == ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_COMPILER=/c/bin/nvcc", *options]


def test_options_mean_the_same_in_a_shell_and_in_cmake_args() -> None:
    words = ["-DA=/a/b", "-DCMAKE_CUDA_ARCHITECTURES=86;89", "-DB=/with a blank/x", "-DC=-Wl,-rpath,/x"]
    line = " ".join(map(quoted, words))
    assert shlex.split(line) == words
    # CMAKE_ARGS='…' in the Makefile
    said = subprocess.run(["sh", "-c", f"printf %s '{line}'"], capture_output=True, text=True, check=True).stdout
    assert shlex.split(said) == words


def test_without_a_toolkit_none_is_found(tmp_path: Path) -> None:
    assert find({"PATH": str(tmp_path)}) is None


def test_the_toolkit_that_is_named_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as caught:
        find({"PATH": "/bin", "CUDAToolkit_ROOT": str(tmp_path)})
    assert str(caught.value) == (
        f"CUDAToolkit_ROOT={tmp_path} has no bin/nvcc: complete it, or unset the variable to use packages"
    )


@named_cases(
    (
        "of the compiler",
        "CMake Error at /x (message):\n  The CUDA compiler\n\n    nvcc error: unsupported GNU version! gcc 20\n",
        "nvcc error: unsupported GNU version! gcc 20",
    ),
    ("of CMake", "CMake Error: no such thing\n", "CMake Error: no such thing"),
    ("nothing", "", "CMake says nothing"),
)
def test_the_line_that_says_why(said: str, expected: str) -> None:
    assert reason(said) == expected
