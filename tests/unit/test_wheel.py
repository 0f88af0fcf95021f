"""How the wheel is made: what the compiler is told, and which wheel is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from fitter.llama.build.virtual_backends import compared
from tests.support.cases import named_cases
from tools.wheel.__main__ import BuildError, check_contents
from tools.wheel.compiler import INCLUDE, search_list, write_compilers
from tools.wheel.targets import TARGETS, own_target

ROOT = Path(__file__).resolve().parents[2]
LINUX = TARGETS["linux-x86_64"]
LIBRARIES = LINUX.own | LINUX.bundle
NAME = "llama_fitter-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
SAID = """\
ignoring nonexistent directory "/usr/local/include/x86_64-linux-gnu"
#include "..." search starts here:
#include <...> search starts here:
 /usr/include/c++/12
 /usr/include/x86_64-linux-gnu/c++/12
 /usr/include/c++/12/backward
 /usr/lib/gcc/x86_64-linux-gnu/12/include
 /usr/include
End of search list.
 /usr/include/c++/13
"""


def test_headers_of_the_library_alone_and_in_their_order() -> None:
    assert search_list(SAID) == [
        "/usr/include/c++/12",
        "/usr/include/x86_64-linux-gnu/c++/12",
        "/usr/include/c++/12/backward",
    ]
    assert search_list("g++: error\n") == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_what_links_gets_the_library_and_what_compiles_does_not(tmp_path: Path) -> None:
    # A Python that says what it is called with.
    python = tmp_path / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    variables = write_compilers(tmp_path / "bin", python, TARGETS[own_target()])

    def call(variable: str, *words: str) -> list[str]:
        done = subprocess.run([variables[variable], *words], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    compiles = call("CXX", "-c", "a b.cpp")
    assert compiles[:5] == ["-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28"]
    assert f"-I{INCLUDE}" in compiles and compiles[-2:] == ["-c", "a b.cpp"]
    assert "-nostdinc++" in compiles and not any("libstdc++" in word for word in compiles)
    links = call("CXX", "-shared", "a.o", "-o", "a.so")
    assert [Path(word).name.partition(".so")[0] for word in links[-5:]] == [
        "filesystem.a",
        "libstdc++",
        "libgcc_s",
        "-ldl",
        "-lpthread",
    ]
    assert call("CC", "-shared", "a.o")[-3:] == ["-shared", "a.o", "-s"]


@named_cases(
    ("right", NAME, LIBRARIES, None),
    ("no tag", "llama_fitter-0.1.0-py3-none-linux_x86_64.whl", LIBRARIES, "is not tagged for manylinux"),
    ("one Python's", NAME.replace("py3-none", "cp311-cp311"), LIBRARIES, "is not tagged for manylinux"),
    ("a link", NAME, LIBRARIES | {"fitter/llama/bundle/libllama.so.0"}, "not hold .*libllama.so.0"),
    ("one is missing", NAME, LIBRARIES - {"fitter/llama/libfitter.so"}, "lacks .*libfitter.so"),
    ("no licence", NAME, LIBRARIES - {"fitter/llama/bundle/LICENSE"}, "lacks .*LICENSE"),
)
def test_which_wheel_is_right(name: str, libraries: frozenset[str], says: str | None, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for library in (*libraries, "fitter/__init__.py"):
            archive.writestr(library, "")
    if says is None:
        check_contents(tmp_path / name, LINUX)
    else:
        with pytest.raises(BuildError, match=says):
            check_contents(tmp_path / name, LINUX)


def test_every_target_gets_the_processors_that_cmake_builds() -> None:
    lists = re.findall(
        r"set\(bundle_processors ([^)]*)\)", (ROOT / "vendor/llama.cpp/bundle/CMakeLists.txt").read_text()
    )
    assert {target.processors for target in TARGETS.values()} == {tuple(each.split()) for each in lists}


def test_the_rules_were_compared_with_the_llama_cpp_in_the_wheel() -> None:
    text = (ROOT / "vendor/llama.cpp/bundle/pin.toml").read_text()
    pin = dict(re.findall(r'^(\w+) = "([^"]*)"$', text, re.MULTILINE))
    for profile in ("cuda", "rocm", "vulkan", "metal"):
        assert compared(profile, pin["ggml"], pin["commit"]) is not None
