"""Finding builds of llama.cpp, with libraries that hold no code: places and names of all kinds, and what is refused."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fitter.errors import LibraryError, UsageError
from fitter.llama.build import build_folder
from fitter.llama.build.build_folder import Build, find
from fitter.llama.build.linking.posix import read_cache
from tests.support import libraries
from tests.support.cases import cases, named_cases

BASE_SYMBOLS = ("ggml_version", "ggml_backend_dev_count")
MACHINE = os.uname().machine


@pytest.fixture(autouse=True)
def _no_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)


def install(
    directory: Path,
    *,
    llama: str = "libllama.so.0",
    ggml: str = "libggml.so.0",
    build_id: str = "aa",
    cpu: str = "libggml-cpu.so.0",
    symbols: tuple[str, ...] = BASE_SYMBOLS,
    runpath: str = "$ORIGIN",
) -> Path:
    """A whole build: libllama, ggml, its base, and a CPU backend that ggml is linked to, unless ``cpu`` is ''."""
    needed = ("libggml-base.so.0", *filter(None, [cpu]))
    libraries.write(
        directory / llama, needed=(ggml, "libggml-base.so.0", "libc.so.6"), runpath=runpath, build_id=build_id
    )
    libraries.write(directory / ggml, needed=needed, runpath=runpath, build_id=build_id + "01")
    libraries.write(directory / "libggml-base.so.0", needed=("libm.so.6",), defined=symbols, build_id=build_id + "02")
    if cpu:
        libraries.write(directory / cpu, needed=("libggml-base.so.0",), runpath=runpath, build_id=build_id + "03")
    return directory


def server(path: Path, needed: tuple[str, ...] = ("libllama.so.0",), runpath: str = "", rpath: str = "") -> Path:
    return libraries.write(path, name="", needed=needed, runpath=runpath, rpath=rpath)


def names(build: Build) -> list[str]:
    return [os.path.basename(path) for path in build.libraries]


# --- directories


@named_cases(
    ("itself", ""),
    ("lib", "lib"),
    ("bin", "bin"),
    ("a build of the source", "build/bin"),
    ("a distribution", f"usr/lib/{MACHINE}-linux-gnu"),
)
def test_a_directory(place: str, tmp_path: Path) -> None:
    directory = install(tmp_path / place)
    build = find(str(tmp_path))
    assert (build.where, build.directory) == (str(tmp_path), str(directory))
    assert names(build) == ["libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"]
    assert (build.backends, build.plugins) == (("cpu",), ())
    assert dict(build.build_ids)["libllama.so.0"] == "aa"


@cases("libllama.so", "libllama.so.0.5.0", "libllama.v0.5.0.so", "libllama.cuda.b9842.so", "libllama-43a2e278.so.0")
def test_odd_names(llama: str, tmp_path: Path) -> None:
    install(tmp_path, llama=llama, ggml="libggml-0b5e5db1.so.0")
    for beside in ("libllama-common.so", "libllama-server-impl.so.0", "libllama.so.txt", "libllama.a"):
        libraries.write(tmp_path / beside)
    assert os.path.basename(find(str(tmp_path)).libllama) == llama
    assert find(str(tmp_path / llama)).libllama == str(tmp_path / llama)


def test_several_names_of_one_library(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "libllama.so").write_bytes((tmp_path / "libllama.so.0").read_bytes())
    (tmp_path / "libllama.so.0.5.0").symlink_to("libllama.so.0")
    assert find(str(tmp_path)).libllama == str(tmp_path / "libllama.so.0")


def test_libraries_that_only_stand_beside_each_other(tmp_path: Path) -> None:
    install(tmp_path, runpath="")
    assert names(find(str(tmp_path))) == ["libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"]


def test_a_directory_comes_before_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "own")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(install(tmp_path / "other")))
    assert {os.path.dirname(path) for path in find(str(tmp_path / "own")).libraries} == {str(tmp_path / "own")}


@cases("", "ggml", "ggml/backends0")
def test_cpu_plugins(place: str, tmp_path: Path) -> None:
    install(tmp_path, cpu="")
    for name in ("libggml-cpu-haswell.so", "libggml-cpu-zen4.so", "libggml-cuda.so"):
        libraries.write(tmp_path / place / name, build_id="bb" + name.encode().hex())
    build = find(str(tmp_path))
    assert [os.path.basename(path) for path in build.cpu_plugins] == ["libggml-cpu-haswell.so", "libggml-cpu-zen4.so"]
    assert build.backends == ("cpu", "cuda")
    assert "libggml-cuda.so" in dict(build.build_ids)


@cases("", "bin/llama-server")
def test_plugins_beside_the_program(named: str, tmp_path: Path) -> None:
    install(tmp_path / "lib", cpu="")
    program = tmp_path / "bin" / "llama-server"
    plugin = libraries.write(program.with_name("libggml-cpu.so"))
    libraries.write(program, needed=("libllama.so.0",), runpath="$ORIGIN/../lib")
    assert find(str(tmp_path / named)).plugins == (str(plugin),)


def test_headers(tmp_path: Path) -> None:
    install(tmp_path / "lib")
    assert find(str(tmp_path)).headers == ()
    header = tmp_path / "include" / "llama.h"
    header.parent.mkdir()
    header.write_text("")
    assert find(str(tmp_path)).headers == (str(header),)


def test_the_key_is_of_the_files_and_not_of_their_place(tmp_path: Path) -> None:
    first, same = find(str(install(tmp_path / "a"))), find(str(install(tmp_path / "b", llama="libllama.v1.so")))
    assert first.key == same.key
    assert find(str(install(tmp_path / "c", build_id="ab"))).key != first.key


def test_libraries_without_a_build_id_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    first, same = find(str(install(tmp_path / "a", build_id=""))), find(str(install(tmp_path / "b", build_id="")))
    assert first.key == same.key
    libraries.write(tmp_path / "b" / "libggml-base.so.0", defined=(*BASE_SYMBOLS, "ggml_new"))
    assert find(str(tmp_path / "b")).key != first.key


# --- programs


def linked(directory: Path) -> None:
    install(directory / "opt" / "lib")
    server(directory / "opt" / "bin" / "llama-server", runpath="$ORIGIN/../lib")
    (directory / "llama-server").symlink_to("opt/bin/llama-server")


def through_another(directory: Path) -> None:
    libraries.write(install(directory) / "libllama-server-impl.so", needed=("libllama.so.0",), runpath="$ORIGIN")
    server(directory / "llama-server", ("libllama-server-impl.so",), runpath="$ORIGIN")


BELOW = "$ORIGIN/nothing:${ORIGIN}/lib"


@named_cases(
    ("beside it", lambda at: server(install(at) / "llama-server", runpath="$ORIGIN")),
    ("through its own library", through_another),
    ("below it", lambda at: server(install(at / "lib").parent / "llama-server", runpath=BELOW)),
    ("an rpath of it", lambda at: server(install(at / "lib", runpath="").parent / "llama-server", rpath="$ORIGIN/lib")),
    ("a link", linked),
)
def test_a_llama_server(lay: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path)
    build = find(str(tmp_path / "llama-server"))
    assert os.path.basename(build.libllama) == "libllama.so.0"
    assert names(build) == ["libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find("llama-server").libraries == build.libraries


def test_the_search_path_is_between_rpath_and_runpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = install(tmp_path / "other", build_id="bb")
    install(tmp_path / "own")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(other))
    by_runpath = find(str(server(tmp_path / "runpath" / "llama-server", runpath="$ORIGIN/../own")))
    by_rpath = find(str(server(tmp_path / "rpath" / "llama-server", rpath="$ORIGIN/../own")))
    assert by_runpath.directory == str(other)
    assert os.path.samefile(by_rpath.directory, tmp_path / "own")


@pytest.mark.parametrize("runpath", ["", ":", "$ORIGIN/no::", ".", "lib", "./lib:$ORIGIN/no", "../here/lib"])
@pytest.mark.parametrize("given", ["", ":", "/no::/nothing", ".", "lib", "/no;lib"])
def test_nothing_is_searched_for_in_the_current_directory(
    runpath: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "here/lib"):
        install(tmp_path / place)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LD_LIBRARY_PATH", given)
    for words in ({"runpath": runpath}, {"rpath": runpath}):
        path = server(tmp_path / "own" / "llama-server", **words)
        with pytest.raises(LibraryError, match=r"needs libllama\.so\.0, which the system does not find: "):
            find(str(path))
    # a name with a slash is a path for the linker
    path = server(tmp_path / "own" / "llama-server", ("lib/libllama.so.0",))
    with pytest.raises(LibraryError, match=r"needs lib/libllama\.so\.0, which the system does not find: "):
        find(str(path))


def test_the_cache_of_the_linker() -> None:
    texts = b"liba.so\0/usr/lib/liba.so\0/lib/i386-linux-gnu/liba.so\0"
    begin = 48 + 2 * 24
    entries = b"".join(struct.pack("<iIIIQ", 3, begin, begin + at, 0, 0) for at in (25, 8))
    data = b"glibc-ld.so.cache1.1" + struct.pack("<II20x", 2, len(texts)) + entries + texts
    assert read_cache(data) == {"liba.so": "/usr/lib/liba.so"}
    assert read_cache(b"ld.so-1.7.0\0" + data) == {"liba.so": "/usr/lib/liba.so"}
    for length in range(len(data)):
        read_cache(data[:length])


# --- what is refused


def script(directory: Path) -> Path:
    (directory / "llama-server").write_text("#!/bin/sh\nexec /opt/llama-server\n")
    return directory / "llama-server"


def dangling(directory: Path) -> Path:
    (directory / "libllama.so").symlink_to("libllama.so.0")
    return directory


def without_base(directory: Path) -> Path:
    (install(directory) / "libggml-base.so.0").unlink()
    return directory


def truncated(name: str) -> Callable[[Path], Path]:
    def lay(directory: Path) -> Path:
        path = install(directory) / name
        path.write_bytes(path.read_bytes()[:200])
        return directory

    return lay


def foreign(bits: int, machine: str) -> Callable[[Path], Path]:
    return lambda at: libraries.write(install(at) / "libllama.so.0", bits=bits, machine=machine).parent


def static(directory: Path) -> Path:
    return server(directory / "llama-server", ("libc.so.6",))


DAMAGED = "is damaged or not all there: download"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda at: at, "there is no libllama.so in {}: name another llama.cpp"),
    "static": (static, "{}/llama-server is not linked to libllama, so llama.cpp is built into it"),
    "beside a static one": (lambda at: static(at).parent, "{}, and its llama-server has llama.cpp built into it"),
    "not found": (
        lambda at: server(at / "llama-server"),
        "{}/llama-server needs libllama.so.0, which the system does not find: set LD_",
    ),
    "script": (script, "{}/llama-server is not a program that is linked to libllama (a script?): name a"),
    "two builds": (
        lambda at: libraries.write(install(at) / "libllama.v0.5.0.so", build_id="cc").parent,
        "in {} (libllama.so.0 and libllama.v0.5.0.so): name one of these files",
    ),
    "link to nothing": (dangling, "libllama.so is a link to a file that is not there: install"),
    "without ggml's base": (without_base, "needs libggml-base.so.0, which is not beside it: install"),
    "without a CPU backend": (lambda at: install(at, cpu=""), "there is no CPU backend (libggml-cpu*.so) beside {}"),
    "truncated libllama": (truncated("libllama.so.0"), f"{{}}/libllama.so.0 {DAMAGED}"),
    "truncated ggml": (truncated("libggml.so.0"), f"{{}}/libggml.so.0 {DAMAGED}"),
    "32 bits": (foreign(32, MACHINE), "{}/libllama.so.0 is for 32-bit machines: name a llama.cpp that"),
    "other machine": (foreign(64, libraries.OTHER), f"is for {libraries.OTHER}, this machine is {MACHINE}:"),
    "fork": (
        lambda at: install(at, symbols=("ggml_backend_dev_count",)),
        "but of a fork such as ik_llama.cpp, or too old (no ggml",
    ),
    "no device": (lambda at: install(at, symbols=()), "or too old (no ggml_backend_dev_count): name another llama.cpp"),
}


@cases(REFUSED)
def test_what_is_refused(lay: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(LibraryError) as caught:
        find(str(lay(tmp_path)))
    assert message.format(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none' is not there: give python, a directory with"):
        find(str(tmp_path / "none"))


# --- python


def test_llama_cpp_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llama_cpp"
    install(package / "lib", llama="libllama.so")
    (package / "__init__.py").write_text("raise SystemExit('llama_cpp was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    assert build_folder.find() == find("python")
    assert find("python").libllama == str(package / "lib" / "libllama.so")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(install(tmp_path / "given", llama="libllama.so")))
    assert find("python").directory == str(tmp_path / "given")


def test_the_one_in_the_wheel_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_folder, "BUNDLE", str(install(tmp_path / "bundle", llama="libllama.so")))
    install(tmp_path / "packages" / "llama_cpp" / "lib", llama="libllama.so")
    (tmp_path / "packages" / "llama_cpp" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path / "packages")])
    assert find("python").directory == str(tmp_path / "packages" / "llama_cpp" / "lib")
    assert not find("python").is_bundled
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.meta_path", [])
    assert (find("python").directory, find("python").is_bundled) == (str(tmp_path / "bundle"), True)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(install(tmp_path / "given", llama="libllama.so")))
    assert not find("python").is_bundled


def test_no_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.meta_path", [])
    with pytest.raises(LibraryError, match="llama-cpp-python is not installed: pip install"):
        find("python")
