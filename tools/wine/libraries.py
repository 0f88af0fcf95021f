"""fitter's libraries for Windows, built by zig beside this tree's Python files, where those of Linux are."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.builds.llama_builds import FetchError
from tools.wheel.compiler import write_compilers
from tools.wheel.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
_TARGET = TARGETS["windows-x86_64"]
_PLACES = [ROOT / path for path in sorted(_TARGET.own)]


def build(directory: Path) -> None:
    """Build them in ``directory``, unless those that are there are of these sources. Raises ``FetchError``."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp, wanted = directory / "sources", _digest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and all(path.is_file() for path in _PLACES):
        return
    variables = compilers()
    source = _do([sys.executable, str(ROOT / "vendor" / "llama.cpp" / "fetch.py"), "--headers-only"], {})
    defined = {
        "CMAKE_SYSTEM_NAME": _TARGET.system,
        "CMAKE_SYSTEM_PROCESSOR": _TARGET.processor,
        "CMAKE_BUILD_TYPE": "Release",
        "LLAMA_CPP_SOURCE_DIR": source.strip(),
        "Python3_EXECUTABLE": sys.executable,
    }
    words = [f"-D{name}={value}" for name, value in defined.items()]
    _do(["cmake", "-G", "Ninja", "-S", str(ROOT / "bindings"), "-B", str(directory / "cmake"), *words], variables)
    _do(["cmake", "--build", str(directory / "cmake")], variables)
    for path in _PLACES:
        shutil.copy2(directory / "cmake" / path.name, path)
    stamp.write_text(wanted, encoding="utf-8")


def compilers() -> dict[str, str]:
    """The environment variables with which a build makes files for Windows."""
    # zig's cache has its C++ library, which takes minutes to compile, for wheels too
    return write_compilers(ROOT / "build" / "wheel" / "windows-x86_64" / "bin", Path(sys.executable), _TARGET)


def _digest() -> str:
    """What the libraries are made of."""
    digest = hashlib.sha256((ROOT / "vendor" / "llama.cpp" / "pin.toml").read_bytes())
    for path in sorted(path for path in (ROOT / "bindings").rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _do(words: list[str], variables: Mapping[str, str]) -> str:
    # cmake and ninja may be beside this Python
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchError(f"fitter's libraries for Windows cannot be built: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
