"""The map that a function of another C++ library returns, read by fitter's bindings for Windows as it lies in memory.

Maps of libstdc++ are this machine's own; those of libc++ are zig's, for Windows. Builds of llama.cpp for Windows show
Microsoft's (test_windows.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.wine import with_wine
from tools.wine import libraries, place

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
#include <cstdio>
#include <cstring>
#include "platform/returned_map.h"

struct use { size_t model, context, compute; };
using map = std::map<const char *, use>;
static const char names[1000] = {};

static map made(int n) {
    map result;
    for (int i = 0; i < n; i++) {
        const int key = i * 37 % 1000;
        result[names + key] = {size_t(key), size_t(key) << 40, 1};
    }
    return result;
}

int main() {
    using fitter::platform::map_room;
    using returned = fitter::platform::returned_map<const char *, use>;
    // as another library's function is called, which this compiler knows nothing of
    using function = void * (*)(map_room *, int);
    const volatile auto call = reinterpret_cast<function>(reinterpret_cast<void *>(made));
    for (int n : {0, 1, 2, 7, 1000}) {
        map_room room;
        call(&room, n);
        const map found = returned::of_clang_or_gcc(room);
        bool same = found.size() == size_t(n);
        for (const auto & [name, each] : made(n)) {
            same = same && std::memcmp(&found.at(name), &each, sizeof(each)) == 0;
        }
        std::printf("%d %s\\n", n, same ? "same" : "other");
    }
    map_room zero, counted;
    call(&counted, 0);
    // more entries than there are nodes, in the word that has the number
    counted.words[WORD_OF_SIZE] = reinterpret_cast<void *>(5);
    for (map_room * room : {&zero, &counted}) {
        try {
            returned::of_clang_or_gcc(*room);
            std::puts("taken");
        } catch (const std::runtime_error & error) {
            std::puts(error.what());
        }
    }
}
"""
REFUSED = "a std::map of this llama.cpp is laid out in another way"
EXPECTED = [*(f"{n} same" for n in (0, 1, 2, 7, 1000)), REFUSED, REFUSED]


def compiled(compiler: str, word_of_size: int, directory: Path, program: str) -> Path:
    source = directory / "maps.cpp"
    source.write_text(PROGRAM, encoding="utf-8")
    options = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-DWORD_OF_SIZE={word_of_size}")
    words = [compiler, *options, f"-I{ROOT / 'bindings'}", str(source), "-o", str(directory / program)]
    environment = {**os.environ, **(libraries.compilers() if program.endswith(".exe") else {})}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory / program


def test_a_map_of_gcc(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None
    program = compiled(compiler, 5, tmp_path, "maps")
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines() == EXPECTED


@with_wine
@pytest.mark.timeout(600)
def test_a_map_of_clang(tmp_path: Path) -> None:
    place.prepare()
    program = compiled(libraries.compilers()["CXX"], 2, tmp_path, "maps.exe")
    done = subprocess.run(["wine", program], env=place.environment(), capture_output=True, text=True)
    assert done.stdout.splitlines() == EXPECTED, done.stderr
