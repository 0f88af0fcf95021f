"""What can be checked of a wheel for macOS without a Mac: its libraries' form, and that llama.cpp has what they want.

Builds of llama.cpp for macOS that others publish say which functions there are, headers of the llama.cpp in the wheel
how its structs are laid out. Nothing is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import lief

from fitter.llama.build.functions import REQUIRED
from fitter.llama.build.layouts import layouts, structs_of
from tools.builds import llama_builds
from tools.builds.llama_builds import Packaged
from tools.wheel.targets import Target

# It says nothing that the checks below do not.
lief.logging.disable()

_NEWEST = (14, 0)
_SYSTEM = ("/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib")
_LOOKUP = -2
"""The number of the library where the linker takes a function of any."""
_MACHINES = {"arm64": lief.MachO.Header.CPU_TYPE.ARM64, "x86_64": lief.MachO.Header.CPU_TYPE.X86_64}
_SYNC = "llama_cpp_py_sync-0.11548-1metal-py3-none-macosx_14_0_arm64.whl"
BUILDS = {
    "arm64": (
        Packaged(
            "b11548-macos",
            "wheel",
            "llama-cpp-py-sync",
            "0.11548",
            _SYNC,
            "d31b5ae4629603deac950de3d5e96433f1681ba450e4f54aa04aa692fc8697a2",
            "llama_cpp_py_sync",
            "b11549",
        ),
        Packaged(
            "v0.4.0-macos-arm64",
            "npm",
            "@node-llama-cpp/mac-arm64-metal",
            "3.21.1",
            "node-llama-cpp-mac-arm64-metal-3.21.1.tgz",
            "cd11a52fab1935fde5abd221b5ecf8167686b45e386b6a02df49cb9b2814e9d6",
            "package/bins/mac-arm64-metal",
            "0.3.36",
        ),
    ),
    "x86_64": (
        Packaged(
            "v0.4.0-macos-x64",
            "npm",
            "@node-llama-cpp/mac-x64",
            "3.21.1",
            "node-llama-cpp-mac-x64-3.21.1.tgz",
            "3bcc6b2d6d3618098a36c9c01ae3afff1599f336a826cd54b1a55a73ed2159a7",
            "package/bins/mac-x64",
            "0.3.36",
        ),
    ),
}
"""Public builds for each processor."""


def problems(wheel: Path, target: Target, directory: Path) -> Iterator[str]:
    """Say what is wrong with the libraries of a wheel, which are laid in ``directory``. Raises ``FetchError``."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in target.own | target.bundle if not name.endswith("LICENSE"))
        libraries = {name: lief.MachO.parse(archive.extract(name, directory)).at(0) for name in names}
    for name, library in libraries.items():
        yield from (f"{name} {problem}" for problem in problems_of_form(library, target))
    builds = {build.name: offered_by(llama_builds.fetched(build)) for build in BUILDS[target.processor]}
    builds["the bundle"] = offered_by(directory / "fitter" / "llama" / "bundle")
    for where, offered in builds.items():
        for name in sorted(target.own):
            if lacks := sorted(wanted_of(libraries[name]) - offered):
                yield f"{where} does not have what {name} wants: {', '.join(lacks)}"
        if lacks := sorted(REQUIRED - offered):
            yield f"{where} does not have what fitter calls: {', '.join(lacks)}"


def problems_of_form(library: lief.MachO.Binary, target: Target) -> Iterator[str]:
    """Say what macOS would not accept of a library."""
    if library.header.cpu_type != _MACHINES[target.processor]:
        yield f"is for {library.header.cpu_type}"
    version = library.build_version if library.has_build_version else None
    if version is None or version.platform != lief.MachO.BuildVersion.PLATFORMS.MACOS:
        yield "is not for macOS"
    elif tuple(version.minos[:2]) > _NEWEST:
        yield f"needs macOS {'.'.join(map(str, version.minos))}"
    places = [each.path for each in library.rpaths]
    for needed in (each.name for each in library.libraries if each.command != lief.MachO.LoadCommand.TYPE.ID_DYLIB):
        if needed not in _SYSTEM and not (needed.startswith("@rpath/lib") and "@loader_path" in places):
            yield f"needs {needed}, which macOS would not find"
    if not library.has_code_signature and target.processor == "arm64":
        yield "is not signed, and processors of Apple run nothing that is not"


def wanted_of(library: lief.MachO.Binary) -> set[str]:
    """The functions that a library takes of any other in its process."""
    return {each.symbol.name[1:] for each in library.bindings if each.library_ordinal == _LOOKUP}


def offered_by(directory: Path) -> set[str]:
    """The functions of all libraries in a directory, by the names that ``dlsym`` takes."""
    offered: set[str] = set()
    for path in directory.iterdir():
        if path.suffix in (".dylib", ".so") and (fat := lief.MachO.parse(path)) is not None:
            offered |= {symbol.name[1:] for symbol in fat.at(0).exported_symbols}
    return offered


def problems_of_layouts(source: Path, target: Target, layout: str = "b11549") -> Iterator[str]:
    """Say where the structs of a llama.cpp's source have not the layout of that name on macOS."""
    lines = ["#include <cstddef>", '#include "llama.h"']
    for name, struct in structs_of(layouts()[layout]).items():
        fields = (field for field, *_ in struct._fields_)
        lines += [f'static_assert(offsetof({name}, {f}) == {getattr(struct, f).offset}, "{name}.{f}");' for f in fields]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target.zig, "-std=c++17", "-x", "c++", "-c", "-"]
    command += [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", "-o", os.devnull]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    yield from (line for line in done.stderr.splitlines() if "error" in line)
