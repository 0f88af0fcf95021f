"""A C++ compiler for another system than this machine: zig's clang.

On Linux libllama is compiled with libstdc++ and hands a ``std::map`` over, so that fitter's libraries cannot have zig's
libc++: they get the libstdc++ of this machine's g++ for that processor. What newer headers of libstdc++ want of glibc
and of libstdc++.so beyond the older ones is taken back in ``include/``. Elsewhere zig's libc++ is taken.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.wheel.targets import Target

INCLUDE = Path(__file__).resolve().parent / "include"


class MissingError(Exception):
    """Something that the wheel is made with is not on this machine: one line, with the remedy."""


def write_compilers(directory: Path, python: Path, target: Target) -> dict[str, str]:
    """Write ``zig-cc`` and ``zig-c++`` into ``directory``; the environment variables that have a build use them.

    ``python`` is an interpreter with the package ziglang. Raises ``MissingError`` if there is no g++ for a Linux.
    """
    compile_c, compile_cpp = ([str(python), "-m", "ziglang", zig, "-target", target.zig] for zig in ("cc", "c++"))
    # Nobody debugs what is stripped of its symbols here.
    libraries = ["-s"]
    directory.mkdir(parents=True, exist_ok=True)
    if target.system == "Linux":
        gcc = _gcc(target.processor)
        headers = [
            "-nostdinc++",
            "-Wno-gnu-include-next",
            *(f"-I{path}" for path in (INCLUDE, *_header_directories(gcc))),
        ]
        # By path: zig takes -lstdc++ for its own libc++. Up to glibc 2.33 two of its parts are libraries of their own.
        libraries += [
            _filesystem(gcc, directory),
            *(_library(gcc, name) for name in ("libstdc++.so.6", "libgcc_s.so.1")),
            "-ldl",
            "-lpthread",
        ]
        compile_cpp = [*compile_c, *headers]
    return {
        "CC": str(_write(directory / "zig-cc", compile_c, ["-s"])),
        "CXX": str(_write(directory / "zig-c++", compile_cpp, libraries)),
        # CMake wants one for Windows, whether there is something to compile or not.
        "RC": str(_write(directory / "zig-rc", [str(python), "-m", "ziglang", "rc"], [])),
        "ZIG_GLOBAL_CACHE_DIR": str(directory.parents[1] / "zig-cache"),
        "ZIG_LOCAL_CACHE_DIR": str(directory.parents[1] / "zig-cache"),
    }


def search_list(said: str) -> list[str]:
    """The directories of C++ headers in what ``g++ -v`` says while it preprocesses, in their order."""
    _, _, listed = said.partition("#include <...> search starts here:")
    directories = [line.strip() for line in listed.partition("End of search list.")[0].splitlines()]
    return [path for path in directories if re.search(r"/c\+\+/\d", path)]


def _gcc(processor: str) -> str:
    names = (f"{processor}-linux-gnu-g++", *(("g++",) if processor == platform.machine() else ()))
    if gcc := next(filter(None, map(shutil.which, names)), None):
        return gcc
    raise MissingError(
        f"no g++ for {processor}, whose libstdc++ the wheel is compiled against: install one (apt-get install "
        f"g++-{processor.replace('_', '-')}-linux-gnu)"
    )


def _header_directories(gcc: str) -> list[str]:
    command = [gcc, "-E", "-v", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    found = search_list(done.stderr)
    if not found:
        raise MissingError(f"{gcc} does not say where the headers of its libstdc++ are: use --native")
    return found


def _filesystem(gcc: str, directory: Path) -> str:
    """An archive of ``std::filesystem``, which older libstdc++ do not have, made in ``directory``."""
    names = ("fs_dir.o", "fs_ops.o", "fs_path.o")
    calls = (
        ("ar", "x", _library(gcc, "libstdc++.a"), *names),
        (gcc, "-O2", "-fPIC", "-c", str(INCLUDE.with_name("older.cpp")), "-o", "older.o"),
        ("ar", "rcs", "filesystem.a", *names, "older.o"),
    )
    for call in calls:
        subprocess.run(call, cwd=directory, check=True)
    return str(directory.resolve() / "filesystem.a")


def _library(gcc: str, name: str) -> str:
    path = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_file():
        raise MissingError(f"{gcc} has no {name}: install the libraries of g++ (apt-get install g++)")
    return str(Path(path).resolve())


# zig knows processors by names of its own: -march=armv8.2-a+fp16 is -mcpu=generic+v8_2a+fullfp16. It makes no bundles
# for macOS, and dlopen takes a library as well.
_WORDS = r"""for word do
  shift
  case $word in
    -bundle) word=-shared ;;
    -march=armv*) word=$(echo "$word" | sed 's/-march=armv8-a/-mcpu=generic/
      s/-march=armv\([0-9]*\)\.\([0-9]*\)-a/-mcpu=generic+v\1_\2a/; s/+fp16/+fullfp16/') ;;
  esac
  set -- "$@" "$word"
done
"""


def _write(path: Path, command: Sequence[str], libraries: Sequence[str]) -> Path:
    """A script that calls ``command``, and gives the ``libraries`` to what links."""
    call = shlex.join(command)
    only_compiles = '*" -c "*|*" -E "*|*" -S "*|*" -v "*|*" --version "*'
    path.write_text(
        f"#!/bin/sh\n# Written by tools/wheel.\n{_WORDS}"
        f'case " $* " in\n  {only_compiles}) exec {call} "$@" ;;\n'
        f'  *) exec {call} "$@" {shlex.join(libraries)} ;;\nesac\n'
    )
    path.chmod(0o755)
    return path
