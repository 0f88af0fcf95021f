"""A C++ compiler for an older glibc than this machine's: zig's clang, with the libstdc++ of this machine.

libllama is compiled with libstdc++ and hands a ``std::map`` over, so fitter's libraries cannot have zig's libc++. What
newer headers of libstdc++ want of glibc and of libstdc++.so beyond the older ones is taken back in ``include/``.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent / "include"


class MissingError(Exception):
    """Something that the wheel is made with is not on this machine: one line, with the remedy."""


def write_compilers(directory: Path, python: Path, machine: str, glibc: str) -> dict[str, str]:
    """Write ``zig-cc`` and ``zig-c++`` into ``directory``; the environment variables that have a build use them.

    ``python`` is an interpreter with the package ziglang, ``machine`` a processor (``x86_64``), ``glibc`` the oldest
    version that the libraries are to run with (``2.28``). Raises ``MissingError`` if there is no g++.
    """
    gcc = shutil.which("g++")
    if gcc is None:
        raise MissingError("no g++, whose libstdc++ the wheel is compiled against: install one (apt-get install g++)")
    zig = [str(python), "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{glibc}"]
    headers = ["-nostdinc++", "-Wno-gnu-include-next", *(f"-I{path}" for path in (INCLUDE, *_header_directories(gcc)))]
    # By path: zig takes -lstdc++ for its own libc++. Up to glibc 2.33 two of its parts are libraries of their own.
    libraries = [*(_library(gcc, name) for name in ("libstdc++.so.6", "libgcc_s.so.1")), "-ldl", "-lpthread"]
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "CC": str(_write(directory / "zig-cc", zig, [])),
        "CXX": str(_write(directory / "zig-c++", [*zig, *headers], libraries)),
        "ZIG_GLOBAL_CACHE_DIR": str(directory.parent / "zig-cache"),
        "ZIG_LOCAL_CACHE_DIR": str(directory.parent / "zig-cache"),
    }


def search_list(said: str) -> list[str]:
    """The directories of C++ headers in what ``g++ -v`` says while it preprocesses, in their order."""
    _, _, listed = said.partition("#include <...> search starts here:")
    directories = [line.strip() for line in listed.partition("End of search list.")[0].splitlines()]
    return [path for path in directories if re.search(r"/c\+\+/\d", path)]


def _header_directories(gcc: str) -> list[str]:
    command = [gcc, "-E", "-v", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    found = search_list(done.stderr)
    if not found:
        raise MissingError(f"{gcc} does not say where the headers of its libstdc++ are: use --native")
    return found


def _library(gcc: str, name: str) -> str:
    path = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_file():
        raise MissingError(f"{gcc} has no {name}: install the libraries of g++ (apt-get install g++)")
    return str(Path(path).resolve())


def _write(path: Path, command: Sequence[str], libraries: Sequence[str]) -> Path:
    """A script that calls ``command``, and gives the ``libraries`` to what links."""
    call = shlex.join(command)
    only_compiles = '*" -c "*|*" -E "*|*" -S "*|*" -v "*|*" --version "*'
    path.write_text(
        "#!/bin/sh\n# Written by tools/wheel.\n"
        f'case " $* " in\n  {only_compiles}) exec {call} "$@" ;;\n'
        f'  *) exec {call} "$@" {shlex.join(libraries)} ;;\nesac\n'
    )
    path.chmod(0o755)
    return path
