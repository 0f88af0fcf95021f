"""What is read of libraries for Windows and macOS, and what their names are, on whatever system this is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fitter.errors import LibraryError
from fitter.llama.build import macho, pe
from fitter.llama.build.elf import Linking
from tests.support.cases import named_cases
from tests.support.other_libraries import write_for_macos, write_for_windows

GUID = bytes(range(20))
UUID = bytes(range(16))
ARM = "arm64"


def _for_windows(folder: Path, **options: int) -> Path:
    return write_for_windows(folder / "llama.dll", ("ggml.dll", "KERNEL32.dll"), ("f", "?g@@YAXXZ"), GUID, **options)


def _for_macos(folder: Path) -> Path:
    needed = ("@rpath/libggml.0.dylib", "/usr/lib/libc++.1.dylib")
    places = ("@loader_path/../lib", "/opt/lib")
    return write_for_macos(folder / "libllama.dylib", needed, ("f", "_Z1gv"), ("h",), places, UUID)


def test_a_library_for_windows(tmp_path: Path) -> None:
    path = _for_windows(tmp_path)
    assert pe.linking_of(path) == Linking("llama.dll", ("ggml.dll", "KERNEL32.dll"), ("$ORIGIN",), (), GUID.hex())
    assert pe.read(path) == (("ggml.dll", "KERNEL32.dll"), {"f", "?g@@YAXXZ"}, frozenset())
    without = write_for_windows(tmp_path / "plain.dll", (), ())
    assert pe.linking_of(without) == Linking("plain.dll", (), ("$ORIGIN",), (), "")


def test_a_library_for_macos(tmp_path: Path) -> None:
    path = _for_macos(tmp_path)
    needed = ("libggml.0.dylib", "/usr/lib/libc++.1.dylib")
    places = ("$ORIGIN", "$ORIGIN/../lib", "/opt/lib")
    assert macho.linking_of(path, ARM) == Linking("libllama.dylib", needed, places, (), UUID.hex())
    assert macho.read(path, ARM) == (needed, {"f", "_Z1gv"}, {"h"})


def test_a_file_for_several_machines(tmp_path: Path) -> None:
    one = _for_macos(tmp_path).read_bytes()
    start = 4096
    entry = b"".join(number.to_bytes(4, "big") for number in (0x0100_000C, 0, start, len(one), 12))
    path = tmp_path / "both.dylib"
    path.write_bytes((b"\xca\xfe\xba\xbe" + (1).to_bytes(4, "big") + entry).ljust(start, b"\0") + one)
    assert macho.read(path, ARM).defined == {"f", "_Z1gv"}


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda folder: pe.linking_of(_for_windows(folder, machine=0xAA64)), "is not for x86-64: name a llama.cpp"),
        (lambda folder: macho.linking_of(_for_macos(folder), "x86_64"), "is not for x86_64: name a llama.cpp"),
        (lambda folder: pe.linking_of(_for_macos(folder)), "is not a library or a program for Windows"),
        (lambda folder: macho.read(_for_windows(folder), ARM), "is not a library or a program for macOS"),
        (lambda folder: pe.read(folder / "no.dll"), "cannot be read"),
    ],
    ids=["other Windows", "other Mac", "Mac's for Windows", "Windows' for Mac", "no file"],
)
def test_a_library_that_cannot_be_used(read: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(LibraryError) as caught:
        read(tmp_path)
    assert message in str(caught.value)


@named_cases(("Windows", pe, _for_windows), ("macOS", macho, _for_macos))
def test_a_part_of_a_library(
    module: ModuleType, write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends early is damaged, or has all that is read; nothing else is raised."""
    monkeypatch.setattr("platform.machine", lambda: ARM)
    whole = write(tmp_path).read_bytes()
    part = tmp_path / "part"
    refused = 0
    for length in range(0, len(whole), 3):
        part.write_bytes(whole[:length])
        for read in (module.linking_of, module.read):
            try:
                read(part)
            except LibraryError as error:
                refused += 1
                assert "is damaged or not all there" in str(error) or length < 4
    assert refused > len(whole) // 3
    assert module.is_binary(part)
    assert not module.is_binary(Path(__file__))
