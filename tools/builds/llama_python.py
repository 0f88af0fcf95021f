"""Other versions of llama-cpp-python to test with.

``python -m tools.builds.llama_python`` has them in ``build/llama-python``. Their Python is in their sdists, which hold
the source of their llama.cpp as well. That is compiled for the CPU only: four minutes on two cores, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tools.builds import llama_builds
from tools.builds.llama_builds import ROOT, FetchError, alone, fetched

PLACE = Path(os.environ.get("FITTER_LLAMA_PYTHON", ROOT / "build" / "llama-python"))
_SOURCE = "vendor/llama.cpp"
_OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "CMAKE_BUILD_WITH_INSTALL_RPATH=ON", "CMAKE_INSTALL_RPATH=$ORIGIN"),
    *("BUILD_SHARED_LIBS=ON", "GGML_NATIVE=OFF", "GGML_OPENMP=OFF", "GGML_RPC=ON", "LLAMA_CURL=OFF"),
    *(f"LLAMA_BUILD_{each}=OFF" for each in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")),
)


class CompileError(Exception):
    """Why a version is not there, in one line."""


def source(version: str) -> Path:
    """The directory of a version's sdist, fetched unless it is there. Raises ``FetchError``."""
    packaged = llama_builds.headers()[version]
    return fetched(replace(packaged, name=f"{version}-sdist", folder=packaged.file.removesuffix(".tar.gz")))


def libraries(version: str) -> Path:
    """The directory of a version's libraries, compiled unless they are there.

    Raises ``FetchError`` and ``CompileError``.
    """
    directory = PLACE / version
    stamp = directory / ".compiled"
    if not stamp.is_file():
        with alone(directory):
            # Another process may have been quicker.
            if not stamp.is_file():
                _compile(version, directory)
                stamp.touch()
    return directory


def as_pip_builds_it(version: str) -> Path:
    """The directory of a version's libraries as pip builds them for a user, without options, made unless it is there.

    Raises ``CompileError``.
    """
    directory = PLACE / f"{version}-pip"
    if not (directory / ".compiled").is_file():
        with alone(directory):
            if not (directory / ".compiled").is_file():
                package = ("--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}")
                _run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(directory), *package)
                (directory / ".compiled").touch()
    return directory / "llama_cpp" / "lib"


def _compile(version: str, into: Path) -> None:
    place = into / "cmake"
    options = [f"-D{option}" for option in _OPTIONS]
    _run("cmake", "-S", str(source(version) / _SOURCE), "-B", str(place), "-G", "Ninja", *options)
    _run("cmake", "--build", str(place), "--target", "llama", "--parallel", str(os.cpu_count() or 1))
    for path in (place / "bin").glob("lib*.so*"):
        shutil.copy2(path, into, follow_symlinks=False)
    shutil.rmtree(place)


def environment(version: str) -> dict[str, str]:
    """The variables with which Python imports that version. Raises ``FetchError`` and ``CompileError``."""
    return {"PYTHONPATH": str(source(version)), "LLAMA_CPP_LIB_PATH": str(libraries(version))}


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        lines = [line for line in said if "error" in line.lower()] or said or ["nothing was said"]
        raise CompileError(f"{' '.join(command[:3])} failed: {lines[0]}")


def main(argv: list[str] | None = None) -> int:
    """Fetch and compile the versions that are named, or all of them, and print where their libraries are."""
    parser = argparse.ArgumentParser(description="Have other versions of llama-cpp-python, and print where they are.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", choices=[*llama_builds.headers(), []])
    status = 0
    for version in parser.parse_args(argv).versions or llama_builds.headers():
        try:
            print(f"{version} {libraries(version)}", flush=True)
        except (FetchError, CompileError) as error:
            print(f"llama_python: {version}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
