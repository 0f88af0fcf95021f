"""The checks of a wheel for macOS, on small libraries that zig compiles for it here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import named_cases

lief = pytest.importorskip("lief", reason="lief reads libraries for macOS: make wheel installs it")
pytest.importorskip("ziglang", reason="zig compiles for macOS: make wheel installs it")

from tools.wheel import macos  # noqa: E402
from tools.wheel.targets import TARGETS  # noqa: E402

MAC = TARGETS["macos-arm64"]


def library(
    directory: Path, *options: str, zig: str = MAC.zig, text: str = "int f(void) { return 1; }"
) -> lief.MachO.Binary:
    (directory / "a.c").write_text(text)
    # without -nostdlib zig compiles a library of its own for each target, for 15 seconds
    call = ["ziglang", "cc", "-target", zig, "-shared", "-nostdlib", "-lSystem", "a.c", "-o", "liba.dylib", *options]
    subprocess.run([sys.executable, "-m", *call], cwd=directory, check=True)
    return lief.MachO.parse(str(directory / "liba.dylib")).at(0)


@named_cases(
    ("right", (), MAC.zig, []),
    ("a later macOS", (), "aarch64-macos.15.0", ["needs macOS 15.0.0"]),
    (
        "another processor, whose files need no signature",
        (),
        TARGETS["macos-x86_64"].zig,
        ["is for CPU_TYPE.X86_64", "is not signed, and processors of Apple run nothing that is not"],
    ),
    ("a name of its own is nobody's need", ("-install_name", "/x/liba.dylib"), MAC.zig, []),
)
def test_the_form(options: tuple[str, ...], zig: str, says: list[str], tmp_path: Path) -> None:
    assert list(macos.problems_of_form(library(tmp_path, *options, zig=zig), MAC)) == says


@named_cases(
    ("beside it", "@rpath/libb.dylib", "@loader_path", None),
    ("nowhere", "@rpath/libb.dylib", "/elsewhere", "needs @rpath/libb.dylib"),
    ("where it was built", "/build/libb.dylib", "@loader_path", "needs /build/libb.dylib"),
)
def test_what_it_is_linked_to(name: str, place: str, says: str | None, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    library(tmp_path / "other", "-install_name", name, text="int g(void) { return 2; }")
    linked = library(
        tmp_path, "other/liba.dylib", f"-Wl,-rpath,{place}", text="int g(void); int f(void) { return g(); }"
    )
    found = list(macos.problems_of_form(linked, MAC))
    assert found == [] if says is None else says in found[0]


def test_what_it_wants_of_llama_cpp(tmp_path: Path) -> None:
    text = "int llama_n_ctx(void *); void *malloc(unsigned long); int f(void) { return llama_n_ctx(malloc(8)); }"
    assert macos.wanted_of(library(tmp_path, "-undefined", "dynamic_lookup", text=text)) == {"llama_n_ctx"}
    assert "f" in macos.offered_by(tmp_path)
