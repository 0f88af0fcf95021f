"""``make install CUDA=1``: what llama-cpp-python is built with, and which toolkit is taken for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import cases, stored
from tools.cuda.toolkit import find

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.findall(r'^version = "(.*)"$', (ROOT / "vendor/llama.cpp/pin.toml").read_text(), re.MULTILINE)[0]
TOOLKIT = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=86;89"]

# A Python that has built nothing: it prints the toolkit's options, and notes what pip is called with.
PYTHON = """\
case "$*" in
  *tools.cuda.toolkit*)
    echo "$@" >>"{notes}/toolkit"
    [ -n "$4" ] || exit 1
    echo '-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES='$4'"' ;;
  *" pip install "*)
    printf "%s" "$CMAKE_ARGS" >"{notes}/cmake_args"
    echo "$@" >>"{notes}/pip"
    touch "{notes}/there" ;;
  *metadata*)
    [ -e "{notes}/there" ] ;;
esac
"""


def program(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    program(tmp_path / "venv/bin/python", PYTHON.format(notes=tmp_path))
    (tmp_path / "venv/stamps").mkdir()
    (tmp_path / "venv/stamps/venv").touch()
    return tmp_path / "venv"


def make(venv: Path, *variables: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["make", "-C", str(ROOT), "llama-cpp-python", f"VENV={venv}", "JOBS=2", "BROKEN_AMX=", *variables]
    # Not what the make that runs the tests was told.
    outer = ("MAKEFLAGS", "MAKELEVEL", "CUDA", "CUDA_ARCHITECTURES", "CMAKE_ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def calls(venv: Path) -> list[str]:
    notes = venv.parent / "pip"
    return notes.read_text().splitlines() if notes.exists() else []


def test_the_toolkits_options_reach_cmake_and_the_users_come_after_them(venv: Path) -> None:
    done = make(venv, "CUDA=1", "CUDA_ARCHITECTURES=86;89", "CMAKE_ARGS=-DGGML_NATIVE=OFF")
    given = shlex.split((venv.parent / "cmake_args").read_text())
    assert given == [*TOOLKIT, "-DGGML_RPC=ON", "-DGGML_NATIVE=OFF"]
    assert calls(venv) == [
        f"-m pip install -q --no-binary llama-cpp-python --no-cache-dir --force-reinstall llama-cpp-python=={VERSION}"
    ]
    assert "25 more for each compute capability" in done.stdout


def test_what_was_built_with_cuda_is_kept(venv: Path) -> None:
    with_cuda = ("CUDA=1", "CUDA_ARCHITECTURES=89")
    for number, variables in enumerate((with_cuda, with_cuda, (), with_cuda)):
        make(venv, *variables)
        assert len(calls(venv)) == 1, number
    make(venv, "CUDA=1", "CUDA_ARCHITECTURES=90")
    assert len(calls(venv)) == 2


@cases(stored("cuda_build", "options_without_a_toolkit"))
def test_options_without_a_toolkit(variables: list[str], options: list[str], venv: Path) -> None:
    make(venv, *variables)
    assert not (venv.parent / "toolkit").exists()
    assert shlex.split((venv.parent / "cmake_args").read_text()) == options


def test_nothing_is_built_where_there_is_no_toolkit(venv: Path) -> None:
    assert make(venv, "CUDA=1", check=False).returncode != 0
    assert (venv.parent / "toolkit").exists() and calls(venv) == []


def test_a_toolkit_that_does_not_compile_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc = program(tmp_path / "bin/nvcc", "echo 'nvcc error: unsupported GNU version' >&2; exit 1")
    assert shutil.which("cmake") or (Path(sys.executable).parent / "cmake").exists()
    assert find({"PATH": str(nvcc.parent)}) is None
    said = capsys.readouterr().err
    assert re.fullmatch(rf"cuda: the toolkit of {nvcc} [^\n]+; NVIDIA's packages are used\n", said), said
