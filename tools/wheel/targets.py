"""The systems that wheels are made for: what zig, CMake and pip call each."""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A system and its processor.

    ``zig``: zig's name for it, with the oldest version to run on. ``system`` and ``processor``: CMake's. ``platform``:
    the wheel's tag. ``library``: how the names of llama.cpp's libraries are written.
    """

    zig: str
    system: str
    processor: str
    platform: str
    library: str = "lib{}.so"

    @property
    def processors(self) -> tuple[str, ...]:
        """The CPU backends in the bundle, the plainest first: vendor/llama.cpp/bundle/CMakeLists.txt says why these."""
        if self.processor in ("x86_64", "AMD64"):
            return "x64", "haswell", "skylakex", "sapphirerapids"
        return ("apple_m1", "apple_m2_m3") if self.system == "Darwin" else ("armv8.0_1", "armv8.2_1", "armv8.6_1")

    @property
    def bundle(self) -> frozenset[str]:
        """The files of the llama.cpp that the wheel brings, by their names in it, and its licence."""
        names = ("llama", "mtmd", "ggml", "ggml-base", "ggml-rpc", *(f"ggml-cpu-{each}" for each in self.processors))
        # CMake calls plugins for macOS .so.
        plain = (f"lib{name}.so" if self.is_plugin(name) else self.library.format(name) for name in names)
        return frozenset(f"fitter/llama/bundle/{file}" for file in (*plain, "LICENSE"))

    def is_plugin(self, name: str) -> bool:
        """Whether ggml loads the library itself, and it is named as such on macOS."""
        return self.system == "Darwin" and name.startswith(("ggml-cpu", "ggml-rpc"))

    @property
    def own(self) -> frozenset[str]:
        """The files of fitter's own libraries."""
        of_linux = ("fitter-cudart", "fitter-cells", "fitter-preload") if self.system == "Linux" else ()
        names = ("fitter", "ggml-fitter", *of_linux)
        library = self.library if self.system == "Windows" else "lib{}.so"
        return frozenset(f"fitter/llama/{library.format(name)}" for name in names)


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.28", "Linux", "x86_64", "manylinux_2_28_x86_64"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.28", "Linux", "aarch64", "manylinux_2_28_aarch64"),
    "macos-arm64": Target("aarch64-macos.14.0", "Darwin", "arm64", "macosx_14_0_arm64", "lib{}.dylib"),
    "macos-x86_64": Target("x86_64-macos.14.0", "Darwin", "x86_64", "macosx_14_0_x86_64", "lib{}.dylib"),
    "windows-x86_64": Target("x86_64-windows-gnu", "Windows", "AMD64", "win_amd64", "{}.dll"),
}


def own_target() -> str:
    """The target that is this machine's Linux."""
    return f"linux-{platform.machine()}"
