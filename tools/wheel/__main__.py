"""``python -m tools.wheel``: fitter's wheel, built for another system or an older Linux than this, checked, and tried.

zig (tools/wheel/compiler.py) compiles fitter's libraries, and the small llama.cpp that the wheel brings to plan with
(vendor/llama.cpp/bundle). The exit status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.wheel.compiler import MissingError, write_compilers
from tools.wheel.targets import TARGETS, Target, own_target
from tools.wheel.trial import TrialError, try_out

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "wheel"


class BuildError(Exception):
    """Why there is no wheel, in one line; what the tool said is printed before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and try the wheel."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default=own_target(), help="the system (this machine's Linux)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the wheel goes (dist)")
    options = parser.parse_args(arguments)
    try:
        target = TARGETS[options.target]
        wheel = build(target, BUILD / options.target, options.output)
        check_contents(wheel, target)
        if target.system == "Linux":
            check_versions(wheel, target)
        if target.system == "Darwin":
            check_for_macos(wheel, target)
        print(f"built {wheel}")
        if options.target == own_target():
            print(try_out(wheel, BUILD / "trial"))
    except (BuildError, MissingError, TrialError) as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


def build(target: Target, directory: Path, output: Path) -> Path:
    """The wheel in ``output``: as pip builds it, with libraries for that target, and its tag."""
    defined = {"FITTER_BUNDLE_LLAMA": "ON"}
    if (target.system, target.processor) != ("Linux", platform.machine()):
        defined |= {"CMAKE_SYSTEM_NAME": target.system, "CMAKE_SYSTEM_PROCESSOR": target.processor}
    if target.system == "Darwin":
        # CMake insists on it, and has nothing for it to do.
        defined["CMAKE_INSTALL_NAME_TOOL"] = "true"
    variables = {
        **write_compilers(directory / "bin", Path(sys.executable), target),
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in defined.items()),
        # llama.cpp takes minutes to compile, so that it is kept.
        "SKBUILD_BUILD_DIR": str(directory / "cmake"),
        # zig strips what it links; this machine's strip knows this machine's files only.
        "SKBUILD_INSTALL_STRIP": "false",
    }
    shutil.rmtree(directory / "raw", ignore_errors=True)
    pip = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    _run(*pip, "--wheel-dir", directory / "raw", ROOT, variables=variables)
    (raw,) = (directory / "raw").glob("*.whl")
    _run("wheel", "tags", "--platform-tag", target.platform, "--remove", raw)
    (tagged,) = (directory / "raw").glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(tagged, output / tagged.name))


def check_contents(wheel: Path, target: Target) -> None:
    """Raises ``BuildError`` unless the wheel is for the target and every Python 3, and holds the libraries for it."""
    if not wheel.name.endswith(f"-py3-none-{target.platform}.whl"):
        raise BuildError(f"{wheel.name} is not tagged for {target.platform} and every Python 3")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if re.search(r"\.(so|dylib|dll)(\.|$)|bundle/", name)}
    expected = target.own | target.bundle
    if lacks := expected - files:
        raise BuildError(f"{wheel.name} lacks {sorted(lacks)}")
    if files - expected:
        raise BuildError(f"{wheel.name} should not hold {sorted(files - expected)}")


def check_versions(wheel: Path, target: Target) -> None:
    """Raises ``BuildError`` if a library wants a later glibc or libstdc++ than those of the tag's time."""
    said = " ".join(_run("auditwheel", "show", wheel).split())
    found = re.search(r'consistent with the following platform tag: "manylinux_2_(\d+)_', said)
    if found is None or int(found[1]) > int(target.platform.split("_")[2]):
        raise BuildError(f"{wheel.name} is not for {target.platform}: {said}")


def check_for_macos(wheel: Path, target: Target) -> None:
    """Raises ``BuildError`` if a Mac would not take the wheel, as far as it can be known without one."""
    # lief is for this alone
    from tools.wheel import macos

    source = ROOT / "vendor" / "llama.cpp" / "bundle" / "source"
    with tempfile.TemporaryDirectory() as directory:
        found = [*macos.problems(wheel, target, Path(directory)), *macos.problems_of_layouts(source, target)]
    if found:
        raise BuildError(f"{wheel.name}: {'; '.join(found)}")


def _run(module: str, *words: str | Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a Python module's command, and return what it says, which is shown where it fails."""
    # CMake looks for ninja beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(variables or {})}
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise BuildError(f"{module} {words[0]} failed, see above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
