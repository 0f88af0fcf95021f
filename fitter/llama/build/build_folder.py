"""Find a build of llama.cpp by the user's name for it: its libraries, what they need, and its identity.

Nothing is loaded or run, so every process may call these functions.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

from fitter.errors import LibraryError, UsageError
from fitter.llama.build import linking
from fitter.llama.build.elf import Linking
from fitter.llama.build.linking import EXECUTABLE, LIBLLAMA, LIBRARY, SEARCH_PATH, binaries, is_library, machine
from fitter.llama.processes import interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PYTHON = "python"
"""The name of this Python's libllama: llama-cpp-python's, or else the one that fitter's wheel brings."""
BUNDLE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bundle")
"""Folder of the libllama in fitter's wheel; a source build has none."""

_BELOW = ("", "lib", "lib64", "bin", "build/bin", "usr/lib", "usr/lib64")
_WHERE = f"a directory with {LIBLLAMA} and ggml's libraries, or a llama-server that is linked to them"
_OTHER = f"name another llama.cpp: {_WHERE}"


_LIBLLAMA = ("llama.",)
_GGML = ("ggml.", "ggml-")
_CORE = ("ggml.", "ggml-base.")
_CPU = ("ggml-cpu.", "ggml-cpu-")
_CUDA = ("ggml-cuda.",)
"""Beginnings of the names of CUDA's libraries."""
_CPU_FILES = LIBRARY.format("ggml-cpu*")
_HEXADECIMAL = frozenset("0123456789abcdef")


def _is(path: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a path is a library whose name begins so (see ``is_library``)."""
    return is_library(_own_name(path), beginnings)


def _own_name(path: str) -> str:
    """Remove the addition of a repaired wheel from a file's name: libllama.so for libllama-43a2e278.so."""
    name = os.path.basename(path)
    stem, dot, rest = name.partition(".")
    before, _, added = stem.rpartition("-")
    return f"{before}{dot}{rest}" if before and len(added) in (8, 32) and set(added) <= _HEXADECIMAL else name


class Build(NamedTuple):
    """A build of llama.cpp.

    Attributes:
        where: The user's name for it.
        libllama: Path of its libllama.
        libraries: Paths of ggml's libraries and others that libllama needs, in an order to load them in.
        plugins: Backends that ggml loads itself, of the CPU's only the best; none if libllama is linked to its own.
        headers: Its ``llama.h``, if there is one.
        build_ids: Identities of libllama and of ggml's libraries, by name.
    """

    where: str
    libllama: str
    libraries: tuple[str, ...]
    plugins: tuple[str, ...]
    headers: tuple[str, ...]
    build_ids: tuple[tuple[str, str], ...]

    @property
    def directory(self) -> str:
        """Directory of libllama."""
        return os.path.dirname(self.libllama)

    @property
    def is_bundled(self) -> bool:
        """Whether fitter's wheel brought it, which was tested with it."""
        return self.directory == BUNDLE

    @property
    def cpu_plugins(self) -> tuple[str, ...]:
        """Plugins for a CPU, one of which is loaded."""
        return tuple(path for path in self.plugins if _is(path, _CPU))

    @property
    def cuda(self) -> str:
        """Path of its CUDA backend; '' without one."""
        return next((path for path in (*self.plugins, *self.libraries) if _is(path, _CUDA)), "")

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of its ggml backends, such as ``cpu`` and ``cuda``."""
        files = [path for path in (*self.libraries, *self.plugins) if _is(path, _GGML) and not _is(path, _CORE)]
        names = (_own_name(path).partition("ggml-")[2].partition(".")[0] for path in files)
        return tuple(sorted({"cpu" if name.startswith("cpu-") else name for name in names}))

    @property
    def key(self) -> str:
        """A key that is equal for equal files, wherever they are."""
        import hashlib

        return hashlib.sha256(" ".join(sorted({build_id for _, build_id in self.build_ids})).encode()).hexdigest()


def find(where: str = PYTHON) -> Build:
    """Find the build that ``where`` names: ``python``, a directory, a ``llama-server`` or a libllama.

    ``python`` is the libllama that the installed llama-cpp-python would load, whatever version that is. Without one it
    is the libllama in fitter's wheel.

    Raises:
        UsageError: There is no such file.
        LibraryError: fitter cannot use it.
    """
    if where == PYTHON:
        return _build(where, _of_python())
    path = _existing_path(where)
    if os.path.isdir(path):
        build = _build(where, _in_directory(path), path)
    elif _is(path, _LIBLLAMA):
        build = _build(where, os.path.abspath(path), os.path.dirname(os.path.abspath(path)))
    else:
        build = _of_program(where, path)
    _check_symbols(build)
    return build


def named(where: str | None) -> str:
    """Return the name of the llama.cpp for a worker; ``None`` becomes the environment's."""
    return where or os.environ.get(interpreter.LLAMA_CPP) or PYTHON


def may_have_cuda(where: str) -> bool:
    """Return false if ``where`` surely has no CUDA backend. Checks little, because every plan calls it."""
    if where != PYTHON:
        return True
    try:
        return bool(_files(os.path.dirname(_of_python()), _CUDA))
    except LibraryError:
        return False


def _existing_path(where: str) -> str:
    if program := on_path(where):
        return program
    path = os.path.expanduser(where)
    if os.path.exists(path):
        return path
    raise UsageError(f"llama_cpp '{where}' is not there: give python, {_WHERE}")


def on_path(name: str) -> str:
    """Return the path of a program; '' if the PATH has none, or if ``name`` is itself a path.

    Entries of the PATH relative to the current directory are ignored: nobody installed those programs.
    """
    if os.path.basename(name) != name:
        return ""
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    file = name.removesuffix(EXECUTABLE) + EXECUTABLE
    places_of = (os.path.join(place, file) for place in filter(os.path.isabs, places))
    return next((path for path in places_of if os.path.isfile(path) and os.access(path, os.X_OK)), "")


def has_python() -> bool:
    """Return whether this Python has a libllama: llama-cpp-python is installed, or fitter's wheel brought one."""
    return bool(_python_folders())


def _python_folders() -> list[str]:
    """List the folders that may hold this Python's libllama."""
    if given := os.environ.get("LLAMA_CPP_LIB_PATH"):
        return [given]
    # Not imported: that would load libllama into this process.
    package = importlib.util.find_spec("llama_cpp")
    places = package.submodule_search_locations if package is not None else None
    if places:
        return [os.path.join(place, "lib") for place in places]
    return [BUNDLE] if os.path.isdir(BUNDLE) else []


def _of_python() -> str:
    paths = [os.path.join(folder, LIBLLAMA) for folder in _python_folders()]
    if not paths:
        raise LibraryError(
            "llama-cpp-python is not installed: pip install llama-cpp-python, or name another llama.cpp with "
            "--llama-cpp"
        )
    return os.path.abspath(next(filter(os.path.exists, paths), paths[0]))


def _in_directory(directory: str) -> str:
    """Return the path of the one libllama in a directory or in the usual folders below it."""
    below = (*_BELOW, f"lib/{machine()}-linux-gnu", f"usr/lib/{machine()}-linux-gnu")
    for place in (
        os.path.join(os.path.abspath(directory), name) if name else os.path.abspath(directory) for name in below
    ):
        if libraries := _files(place, _LIBLLAMA):
            return _single_name(libraries, place)
    servers = _servers(directory, below)
    why = ", and its llama-server has llama.cpp built into it" if servers and not _links_llama(servers[0]) else ""
    raise LibraryError(f"there is no {LIBLLAMA} in {directory}{why}: {_OTHER}")


def _servers(directory: str, below: Iterable[str] = _BELOW) -> list[str]:
    """List the llama-servers in the usual folders below a directory."""
    paths = [os.path.join(os.path.abspath(directory), name, f"llama-server{EXECUTABLE}") for name in below]
    return [path for path in paths if os.path.isfile(path)]


def _files(directory: str, beginnings: tuple[str, ...]) -> list[str]:
    try:
        return [os.path.join(directory, file) for file in sorted(os.listdir(directory)) if _is(file, beginnings)]
    except OSError:
        return []


def _single_name(libraries: Sequence[str], directory: str) -> str:
    """Return the name that a library with several names calls itself. Raises ``LibraryError`` for several libraries."""
    readable = {path: binaries.linking_of(path) for path in libraries if os.path.exists(path)}
    if not readable:
        raise LibraryError(f"{libraries[0]} is a link to a file that is not there: install that llama.cpp again")
    builds = {_identity(path, linking): path for path, linking in readable.items()}
    if len(builds) > 1:
        names = " and ".join(sorted(os.path.basename(path) for path in builds.values()))
        raise LibraryError(f"there are different builds of llama.cpp in {directory} ({names}): name one of these files")
    return min(readable, key=lambda path: (os.path.basename(path) != readable[path].name, len(path)))


def _of_program(where: str, path: str) -> Build:
    path = os.path.abspath(path)
    if not binaries.is_binary(path):
        raise LibraryError(f"{path} is not a program that is linked to libllama (a script?): name {_WHERE}")
    libraries = linking.linked(path)
    libllama = next((each for name, each in libraries.items() if _is(name, _LIBLLAMA)), None)
    if libllama is None and not linking.missing_libraries(libraries):
        raise LibraryError(f"{path} is not linked to libllama, so llama.cpp is built into it or missing: name {_WHERE}")
    if libllama is None or not libllama.path:
        missing = ", ".join(linking.missing_libraries(libraries))
        raise LibraryError(
            f"{path} needs {missing}, which the system does not find: set {SEARCH_PATH} to the whole path of its "
            "directory"
        )
    program_folder = os.path.dirname(os.path.realpath(path))
    return _make_build(
        where, libllama.path, linking.needed_by(libllama, libraries), (os.path.dirname(libllama.path), program_folder)
    )


def _links_llama(program: str) -> bool:
    try:
        return any(_is(name, _LIBLLAMA) for name in linking.linked(program))
    except LibraryError:
        return False


def _build(where: str, libllama: str, before: str = "") -> Build:
    directory = os.path.dirname(libllama)
    needed = linking.linked(libllama, directory if before else "")
    programs = [os.path.dirname(server) for server in _servers(before)] if before else []
    return _make_build(where, libllama, list(needed.values()), (directory, *programs))


def _make_build(where: str, libllama: str, needed: Iterable[linking.Linked], places: Sequence[str]) -> Build:
    needed = list(needed)
    ggml = [each for each in needed if _is(each.name, _GGML)]
    if missing := [each.name for each in ggml if not each.path]:
        raise LibraryError(
            f"{libllama} needs {', '.join(missing)}, which is not beside it: install that llama.cpp whole, or name "
            f"{_WHERE}"
        )
    beside = os.path.dirname(libllama)
    libraries = [each.path for each in needed if each in ggml or os.path.dirname(each.path) == beside]
    has_own = any(_is(each.name, _CPU) for each in ggml)
    plugins = () if has_own else _plugins(places)
    kept = [libllama, *(each.path for each in ggml), *plugins]
    return Build(where, libllama, tuple(libraries), plugins, _headers(libllama), _build_ids(kept))


def _plugins(places: Sequence[str]) -> tuple[str, ...]:
    """List the backends that ggml would find: beside libllama or the program, or where distributions put them."""
    directories = list(dict.fromkeys(places))
    for place in places:
        # as in /usr/lib/x86_64-linux-gnu/ggml/backends0
        directories += [os.path.join(place, "ggml"), *_library_folders(os.path.join(place, "ggml"))]
    for directory in directories:
        files = _files(directory, _GGML)
        if any(_is(file, _CPU) for file in files):
            return tuple(file for file in files if not _is(file, _CORE))
    return ()


def _library_folders(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in sorted(os.listdir(directory), reverse=True)]
    except OSError:
        return []


def _headers(libllama: str) -> tuple[str, ...]:
    places = (os.path.dirname(libllama), os.path.dirname(os.path.realpath(libllama)))
    above = [
        os.path.normpath(os.path.join(place, up, "include", "llama.h")) for place in places for up in ("..", "../..")
    ]
    above += [os.path.join(place, "include", "llama.h") for place in places]
    return tuple(path for path in dict.fromkeys(above) if os.path.isfile(path))


def _build_ids(paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((os.path.basename(path), _identity(path, binaries.linking_of(path))) for path in paths)


def _identity(path: str, linking: Linking) -> str:
    if linking.build_id:
        return linking.build_id
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _check_symbols(build: Build) -> None:
    """Raise ``LibraryError`` if the symbols show a llama.cpp that fitter cannot use."""
    core = [path for path in build.libraries if _is(path, _CORE)]
    defined = frozenset[str]().union(*(binaries.read(path).defined for path in (core or [build.libllama])))
    if missing := {"ggml_backend_dev_count", "ggml_version"} - defined:
        raise LibraryError(
            f"{build.libllama} is not of the llama.cpp of ggml-org, but of a fork such as ik_llama.cpp, or too old (no "
            f"{min(missing)}): {_OTHER}"
        )
    if not build.cpu_plugins and not any(_is(path, _CPU) for path in build.libraries):
        every = frozenset[str]().union(*(binaries.read(path).defined for path in build.libraries))
        if "ggml_backend_cpu_reg" not in every and "ggml_backend_cpu_init" not in every:
            raise LibraryError(
                f"there is no CPU backend ({_CPU_FILES}) beside {build.libllama}, and every plan needs one: install "
                f"that llama.cpp whole, or {_OTHER}"
            )
