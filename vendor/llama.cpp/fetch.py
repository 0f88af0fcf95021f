#!/usr/bin/env python3
"""Bring the pinned llama.cpp source in, and print the directory that holds it.

The source comes out of the sdist of the pinned llama-cpp-python, which pip downloads, and only if its sha256 is the one
in pin.toml. It is laid in `source/` beside this script and never committed. A stamp in it says what it is, so a second
run does nothing. LLAMA_CPP_SOURCE_DIR names a tree to use instead; nothing is fetched then.

Standard library only: this runs inside isolated builds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
STAMP = ".fitter-stamp"
PIN_KEYS = ("package", "version", "sdist", "folder", "sha256", "commit", "llama", "ggml")

# What compiling bindings/ needs. The CMakeLists hold the versions.
HEADERS = re.compile(
    r"LICENSE|CMakeLists\.txt|ggml/CMakeLists\.txt|include/[^/]+\.h|ggml/include/[^/]+\.h|ggml/src/[^/]+\.h|src/llama[^/]*\.h"
    r"|tools/mtmd/mtmd\.h"
)
# What pip's warnings say when it is the network and not the package that is missing.
NO_CONNECTION = re.compile(r"Retrying \(|ConnectionError|ConnectTimeout|Max retries|name resolution", re.IGNORECASE)

# A tree without one of these is not a llama.cpp that fitter can be built against.
NEEDED = (
    *("CMakeLists.txt", "ggml/CMakeLists.txt", "include/llama.h", "ggml/src/ggml-backend-impl.h", "src/llama-ext.h"),
    *("src/llama-context.h", "tools/mtmd/mtmd.h"),
)


class FetchError(Exception):
    """Why there is no source, in one line, with the remedy."""


def read_pin(path: Path) -> dict[str, str]:
    """The pin's keys and values; every key in PIN_KEYS is there."""
    try:
        pin = dict(re.findall(r'^(\w+) = "([^"]*)"$', path.read_text(encoding="utf-8"), re.MULTILINE))
    except OSError as error:
        raise FetchError(f"cannot read the pin {path}: {error.strerror}") from None
    missing = [key for key in PIN_KEYS if key not in pin]
    if missing:
        raise FetchError(f"the pin {path} has no {', '.join(missing)}; restore it from the repository")
    return pin


def check_tree(tree: Path) -> Path:
    """A tree of the user's own, absolute; raises FetchError if fitter cannot be built against it."""
    if not tree.is_dir():
        raise FetchError(f"LLAMA_CPP_SOURCE_DIR is not a directory: {tree}; point it to a llama.cpp source or unset it")
    missing = [name for name in NEEDED if not (tree / name).is_file()]
    if missing:
        raise FetchError(
            f"LLAMA_CPP_SOURCE_DIR is not a llama.cpp source tree that fitter can use: {tree} has no {missing[0]}; "
            "point it to one or unset it"
        )
    return tree.resolve()


def is_laid(source: Path, sha256: str, headers_only: bool) -> bool:
    """Whether `source` already holds what was asked for; a full tree serves where headers are wanted."""
    try:
        stamp = (source / STAMP).read_text(encoding="utf-8").split()
    except OSError:
        return False
    wanted = (["headers"] if headers_only else []) + ["full"]
    is_it = len(stamp) == 2 and stamp[0] == sha256 and stamp[1] in wanted
    # an earlier fitter may have wanted fewer of the same
    return is_it and all((source / name).is_file() for name in NEEDED)


def check_sum(sdist: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with sdist.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FetchError(f"cannot read {sdist}: {error.strerror}") from None
    if digest.hexdigest() != sha256:
        raise FetchError(
            f"checksum mismatch: {sdist.name} has sha256 {digest.hexdigest()}, the pin says {sha256}; "
            "nothing was unpacked; delete that file, or clear pip's cache (pip cache purge), and try again"
        )


def download(pin: Mapping[str, str], into: Path) -> Path:
    """Have pip download the sdist into the directory `into`; its path."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"no pip in {sys.executable}; install it (python -m ensurepip) or set LLAMA_CPP_SOURCE_DIR")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Not ":all:", which would build the build tools from source as well.
    command += ["--no-binary", pin["package"], "--dest", str(into.absolute())]
    if pin["package"] != "xllamacpp" and importlib.util.find_spec("scikit_build_core") is not None:
        # pip asks the sdist's build backend for metadata before it saves the file; this environment has that backend,
        # except for the bundle's, which is built with others.
        command += ["--no-build-isolation"]
    command += [f"{pin['package']}=={pin['version']}"]
    # Set where a pip that builds fitter runs this; it is that pip's own.
    env = {key: value for key, value in os.environ.items() if key != "PIP_BUILD_TRACKER"}
    # In a directory of its own: "-m" runs modules of the current one first.
    done = subprocess.run(
        command, env=env, cwd=into, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sdist = into / pin["sdist"]
    if sdist.is_file():
        return sdist
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = said[-1].partition(":")[2].strip() if said else f"pip exited with status {done.returncode}"
    if NO_CONNECTION.search(done.stderr):
        reason = "no connection to the package index"
    raise FetchError(
        f"pip could not download {pin['sdist']}: {reason}; check the network, "
        "or download it elsewhere and give it with --sdist, or set LLAMA_CPP_SOURCE_DIR"
    )


def unpack(sdist: Path, folder: str, into: Path, headers_only: bool) -> None:
    """Unpack the files of llama.cpp, which are in `folder` of `sdist`, into the directory `into`."""
    laid = 0
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or not PurePosixPath(*parts[1:]).is_relative_to(folder):
                continue
            inside = PurePosixPath(*parts[1:]).relative_to(folder).parts
            # A .git here would point to a repository that is not there.
            if not inside or ".." in inside or inside[0] == ".git":
                continue
            if headers_only and not HEADERS.fullmatch("/".join(inside)):
                continue
            content = archive.extractfile(member)
            assert content is not None
            path = into.joinpath(*inside)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as file:
                shutil.copyfileobj(content, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            # The archive's times, so that laying the same source again rebuilds nothing.
            os.utime(path, (member.mtime, member.mtime))
            laid += 1
    if not laid:
        raise FetchError(f"{sdist.name} does not contain {folder}")


def lay(sdist: Path, pin: Mapping[str, str], source: Path, headers_only: bool) -> None:
    """Check `sdist` against the pin and put its llama.cpp at `source`, whole or not at all."""
    check_sum(sdist, pin["sha256"])
    with tempfile.TemporaryDirectory(prefix=".source-", dir=source.parent) as directory:
        fresh, old = Path(directory, "fresh"), Path(directory, "old")
        fresh.mkdir()
        try:
            unpack(sdist, pin["folder"], fresh, headers_only)
        except (tarfile.TarError, EOFError, UnicodeError) as error:
            raise FetchError(f"{sdist.name} is not a readable sdist: {error}") from None
        (fresh / STAMP).write_text(f"{pin['sha256']} {'headers' if headers_only else 'full'}\n", encoding="utf-8")
        try:
            if source.exists():
                source.rename(old)
            fresh.rename(source)
        except OSError:
            # Another run of this script may have been quicker.
            if not is_laid(source, pin["sha256"], headers_only):
                raise


def bring(pin: Mapping[str, str], source: Path, headers_only: bool, sdist: Path | None) -> None:
    """Lay the pinned source at `source`, from `sdist` if given and from pip otherwise, unless it is there already."""
    if is_laid(source, pin["sha256"], headers_only):
        return
    if sdist is not None:
        lay(sdist, pin, source, headers_only)
        return
    print(f"fetching {pin['sdist']} (llama.cpp {pin['commit'][:9]}) with pip", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fitter-fetch-") as directory:
        lay(download(pin, Path(directory)), pin, source, headers_only)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bring the pinned llama.cpp source in and print where it is.")
    parser.add_argument("--headers-only", action="store_true", help="only what fitter itself is compiled against")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="the sdist, already downloaded")
    parser.add_argument("--pin", type=Path, default=HERE / "pin.toml", help="another pin")
    parser.add_argument("--dest", type=Path, default=HERE / "source", help="where to lay it (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        own = os.environ.get("LLAMA_CPP_SOURCE_DIR")
        if own:
            print(check_tree(Path(own)))
            return 0
        bring(read_pin(arguments.pin), arguments.dest, arguments.headers_only, arguments.sdist)
        print(arguments.dest.resolve())
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fetch.py: cannot write the source: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
