"""Builds of llama.cpp that fitter must not plan with: each is one line and exit status 3, never a crash or a number."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from fitter.llama.build import layouts
from fitter.llama.build.build_folder import find
from tests.support.cases import cases, named_cases
from tests.support.llama_builds import LAYOUTS, every, fetched, header_of, where

ONE_OF_THEM = "v0.5.0"
OF_EACH_LAYOUT = [pytest.param(name, marks=pytest.mark.llama_cpp) if name == "v0.4.0" else name for name in every()]
"""Every build; of those of `make test` that have the newest layout, one is left to `make test-llama-cpp`."""
OTHER = 183 if os.uname().machine == "x86_64" else 62
"""ELF's number of another machine, aarch64 or x86_64."""

# Forks of it are the workers, so they know no other layout; nor do they read a header that is beside libllama.
_WITH_ONE_LAYOUT = """
import sys
from fitter.llama.build import functions, layouts
from fitter.llama.worker import process
from fitter.llama.processes.interpreter import worker_variables

layout, where, header, *args = sys.argv[1:]
layouts.data()["layouts"] = {layout: layouts.layouts()[layout]} if layout else {}
layout_of = layouts.layout_of
layouts.layout_without_header = lambda known, written: None
functions.layout_of = lambda probe, headers: layout_of(probe, (header,) if header else ())
for _ in range(4):
    process.prestart(worker_variables(where))
from fitter.cli import main
sys.exit(main([*args, "--llama-cpp", where]))
"""


def run(words: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    variables = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=variables)


def refusal(words: Sequence[str | Path], **variables: str) -> str:
    """Run a command that must fail with status 3 and one line on stderr, and return that line."""
    done = run(words, **variables)
    assert (done.returncode, done.stdout) == (3, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix("fitter: error: ")


def fit(model: Path, build: str | Path, *words: str, **variables: str) -> str:
    """Fit for a described card with a build that must be refused, and return the error."""
    return refusal(["-m", "fitter", model, "--gpu", "8GiB", "--llama-cpp", build, *words], **variables)


def copied(name: str, into: Path) -> Path:
    """A build whose files can be changed one by one: libllama and ggml's own are copies, the others links."""
    into.mkdir()
    for path in fetched(name).iterdir():
        if path.name.startswith(("libllama.", "libggml.", "libggml-base.")):
            shutil.copy(path, into)
        else:
            (into / path.name).symlink_to(path)
    return into


# --- layouts


def others(name: str, versions: Iterable[str]) -> str:
    """Return the version before the layout of a build, or the version after the first one."""
    known = list(versions)
    return known[(known.index(LAYOUTS[name]) or 2) - 1]


@pytest.mark.parametrize("name", OF_EACH_LAYOUT)
def test_another_layout_is_refused(name: str, model: Path) -> None:
    """A layout is forced on a build by knowing no other, and no way to find one from it."""
    directory = where(name)
    command = ["-c", _WITH_ONE_LAYOUT]
    words = [directory, "", model, "--gpu", "8GiB"]
    assert run([*command, LAYOUTS[name], *words]).returncode == 0
    said = refusal([*command, others(name, layouts.layouts()), *words])
    assert f"{find(directory).libllama} (commit " in said
    assert "its parameters are laid out as in no version that fitter knows" in said


@pytest.mark.parametrize("name", OF_EACH_LAYOUT)
def test_the_header_of_another_version_is_refused(name: str, model: Path) -> None:
    """A layout that no table has is read from a ``llama.h``, which may belong to another version."""
    command = ["-c", _WITH_ONE_LAYOUT, "", where(name)]
    words = [model, "--gpu", "8GiB"]
    right, wrong = map(header_of, (LAYOUTS[name], others(name, layouts.layouts())))
    assert run([*command, right, *words]).returncode == 0
    assert f"{wrong} belongs to another version (llama_" in refusal([*command, wrong, *words])


_PAST_THE_PROBE = """
import sys
from fitter.llama.build import functions, layouts

functions.layout_of = lambda probe, headers: (sys.argv[1], layouts.layouts()[sys.argv[1]])
from fitter.llama.load.canary import main
main()
"""


@pytest.mark.parametrize("layout", layouts.layouts())
def test_every_layout_behind_the_probe(layout: str, tmp_path: Path) -> None:
    """Were the probe wrong, the small models whose memory is known would tell, or end their process."""
    done = run(["-c", _PAST_THE_PROBE, layout], FITTER_LLAMA_CPP=where(ONE_OF_THEM), TMPDIR=str(tmp_path))
    assert not any(tmp_path.iterdir()), "whatever becomes of the process, it leaves no file"
    assert ((done.returncode, done.stdout.strip()) == (0, "")) == (layout == LAYOUTS[ONE_OF_THEM]), done.stdout


# --- libraries that lack something


def without(path: Path, symbol: str) -> None:
    """Take the first letter from the name of a symbol that a library defines."""
    data = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # type, offset, size, linked section
    sections = [struct.unpack_from("<4xI16xQQI", data, start + i * size) for i in range(count)]
    _, symbols, length, link = next(each for each in sections if each[0] == 11)
    strings = sections[link][1]
    names = data[strings : strings + sections[link][2]]
    changed = 0
    for place in range(symbols, symbols + length, 24):
        name, defined = struct.unpack_from("<I2xH", data, place)
        if defined and names[name : names.index(b"\0", name)] == symbol.encode():
            struct.pack_into("<I", data, place, name + 1)
            changed += 1
    assert changed == 1
    path.write_bytes(data)


LLAMA, GGML, BASE = "libllama.v0.5.0.so", "libggml.v0.5.0.so", "libggml-base.so"
SYMBOLS = {
    "llama_model_default_params": LLAMA,
    "llama_init_from_model": LLAMA,
    "_Z26llama_get_memory_breakdownPK13llama_context": LLAMA,
    "ggml_backend_dev_count": GGML,
    "ggml_backend_load": GGML,
    "ggml_version": BASE,
    "gguf_init_from_callback": BASE,
}
"""Functions that fitter, or its own libraries, call; and the library that defines each."""


@pytest.mark.parametrize(("symbol", "library"), SYMBOLS.items())
def test_a_build_without_a_symbol(symbol: str, library: str, model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    without(directory / library, symbol)
    said = fit(model, directory)
    assert symbol[1:] in said
    assert str(directory) in said or "does not match the loaded libllama" in said


def test_a_directory_without_a_cpu_backend(model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    for path in directory.glob("libggml-cpu*"):
        path.unlink()
    assert f"there is no CPU backend (libggml-cpu*.so) beside {directory / LLAMA}" in fit(model, directory)


@cases((LLAMA,), (GGML,), (BASE,))
def test_a_library_that_is_not_there(library: str, model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    (directory / library).unlink()
    assert ("there is no libllama.so in" if library == LLAMA else f"needs {library}") in fit(model, directory)


@named_cases(
    ("machine", 0x12, struct.pack("<H", OTHER), f"this machine is {os.uname().machine}"),
    ("bits", 0x04, b"\x01", "is for 32-bit machines"),
    ("order", 0x05, b"\x02", "is for big-endian machines"),
)
def test_a_library_for_another_machine(place: int, value: bytes, message: str, model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    data = bytearray((directory / BASE).read_bytes())
    data[place : place + len(value)] = value
    (directory / BASE).write_bytes(data)
    assert message in fit(model, directory)


# --- libraries that do something else


def write_code(path: Path, symbol: str, code: bytes) -> None:
    """Replace the first instructions of a function in a library's file."""
    data = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # type, address, offset, size, linked section
    sections = [struct.unpack_from("<4xI8xQQQI", data, start + i * size) for i in range(count)]
    _, _, symbols, length, link = next(each for each in sections if each[0] == 11)
    strings = sections[link][2]
    for place in range(symbols, symbols + length, 24):
        name, section, address = struct.unpack_from("<I2xHQ", data, place)
        if section and data[strings + name : data.index(b"\0", strings + name)] == symbol.encode():
            start = sections[section][2] + address - sections[section][1]
            data[start : start + len(code)] = code
            path.write_bytes(data)
            return
    raise ValueError(symbol)


CRASHES = {"ggml_version": BASE, "llama_model_default_params": LLAMA, "llama_init_from_model": LLAMA}
"""Functions that a plan, or the way to it, calls; and the library that defines each."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="writes instructions of x86-64")
@pytest.mark.parametrize(("function", "library"), CRASHES.items())
def test_a_function_that_crashes(function: str, library: str, model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    write_code(directory / library, function, b"\x0f\x0b")
    assert "was ended by SIGILL" in fit(model, directory)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="writes instructions of x86-64")
def test_a_function_that_does_not_return(model: Path, tmp_path: Path) -> None:
    directory = copied(ONE_OF_THEM, tmp_path / "build")
    write_code(directory / LLAMA, "llama_init_from_model", b"\xeb\xfe")
    assert "within 2 seconds: raise --timeout" in fit(model, directory, "--timeout", "2")


# --- builds that others made


@cases(
    ("b7347", "(commit 7e467cc) is too old for fitter: its ggml is 0.9.4, and 0.13.1 is needed"),
    ("b8390", "(commit 57bea3d) is too old for fitter: its ggml is 0.9.7, and 0.13.1 is needed"),
)
def test_a_build_that_is_too_old(name: str, message: str, model: Path) -> None:
    assert message in fit(model, fetched(name))


def test_a_fork(model: Path) -> None:
    assert "but of a fork such as ik_llama.cpp" in fit(model, fetched("ik_llama.cpp") / "ik_llama_cpp")
