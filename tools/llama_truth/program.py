"""Compiling ``program.cpp`` for a build of llama.cpp with the build's own headers, and asking it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fitter.llama.build.build_folder import PYTHON, Build, find
from tools.builds import llama_builds, llama_python
from tools.comparisons.upstream import tool
from tools.llama_truth.loads import Load
from tools.loopback import rpc_servers

_SOURCE = Path(__file__).with_suffix(".cpp")
_SECONDS = 600
CRASHED = "CRASH"


class CompileError(Exception):
    """Why there is no program for a build, in one line."""


def headers_of(name: str, pinned: Path, source: Path | None = None) -> Path:
    """The source of llama.cpp whose headers belong to a build; ``pinned``: that of the pinned version.

    A prebuilt one has the layouts of the llama-cpp-python that ``llama_builds.json`` names, or those of ``source``.
    Raises ``FetchError``, and ``CompileError`` without a source.
    """
    version = "" if name == PYTHON else llama_builds.packaged()[name].layout
    newest = list(llama_builds.headers())[-1]
    if version and version not in llama_builds.headers():
        if source is None:
            raise CompileError(f"{name} has newer headers than every llama-cpp-python: name its source with --source")
        return source
    return pinned if version in ("", newest) else llama_python.source(version) / "vendor" / "llama.cpp"


def compiled(build: Build, source: Path, into: Path) -> Path:
    """The program for a build, with the headers of a source tree. Raises ``CompileError``."""
    program = into / "program"
    linked = [path for path in build.libraries if os.path.basename(path).startswith(("libggml.", "libggml-base."))]
    directories = dict.fromkeys(map(os.path.dirname, (build.libllama, *linked)))
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", str(_SOURCE), "-o", str(program)),
        *(f"-I{source / below}" for below in ("include", "ggml/include", "src")),
        *(
            build.libllama,
            *linked,
            "-Wl,--disable-new-dtags",
            "-Wl,--allow-shlib-undefined",
            *(f"-Wl,-rpath,{each}" for each in directories),
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["nothing was said"]
        raise CompileError(f"{_SOURCE.name} does not compile for {build.where}: {lines[0]}")
    return program


def answers(
    program: Path, build: Build, loads: Sequence[Load], directory: Path, servers: Sequence[str] = ()
) -> list[str]:
    """What a build's program says to each load; ``CRASHED`` where it ended instead. Models are in ``directory``."""
    lines = [load.line(directory) for load in loads]
    said: list[str] = []
    plugins = os.path.dirname(build.plugins[0]) if build.plugins else ""
    environment = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    while len(said) < len(lines):
        done = subprocess.run(
            [str(program), plugins, *servers],
            input="".join(f"{line}\n" for line in lines[len(said) :]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=environment,
        )
        if done.returncode == 2:
            raise CompileError(done.stderr.strip())
        said += done.stdout.splitlines()
        if done.returncode and len(said) < len(lines):
            said.append(CRASHED)
    return said


@contextmanager
def servers(name: str, count: int) -> Iterator[tuple[str, ...]]:
    """So many of a build's own rpc-servers, as ``host:port``; none where it has no such program."""
    program = tool("rpc-server") if name == PYTHON else llama_builds.PLACE / name / "ggml-rpc-server"
    started: list[tuple[subprocess.Popen[bytes], str]] = []
    try:
        for _ in range(count if program.is_file() else 0):
            started.append(rpc_servers.start(program=program))
        yield tuple(endpoint for _, endpoint in started)
    finally:
        for process, _ in started:
            rpc_servers.stop(process)


def with_one_cpu(name: str, into: Path) -> str:
    """What to call a build whose backend of the CPU is the same on every machine of today.

    Where a build has several of them, that is a directory with links to one of them only, which needs AVX2. Raises
    ``FetchError``, and ``CompileError`` of ``tools.builds.llama_python``.
    """
    if name == PYTHON:
        return PYTHON
    if name in llama_builds.headers():
        return str(llama_python.libraries(name))
    directory = llama_builds.fetched(llama_builds.packaged()[name])
    if not find(str(directory)).cpu_plugins:
        return str(directory)
    for path in directory.iterdir():
        link = into / path.name
        if (not path.name.startswith("libggml-cpu") or path.name == "libggml-cpu-haswell.so") and not link.exists():
            link.symlink_to(path)
    return str(into)
