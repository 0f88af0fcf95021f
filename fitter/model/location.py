"""Find the files of a model: a path, or an address whose header is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fitter import system
from fitter.errors import ModelError, UsageError
from fitter.model.files import source
from fitter.model.shapes import catalogue as shapes
from fitter.text import LONGEST_NAME, printable

if TYPE_CHECKING:
    from fitter.model.files.remote_files import Fetching


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is the address of a remote file, or the name of a shape."""
    if shapes.wanted(path) is not None:
        return True
    if ":" not in os.fspath(path):
        return False
    from fitter.model.files.addresses import as_url

    url = as_url(path)
    return url is not None and not url.lower().startswith("file://")


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a repository of the hub, a folder of one, or a directory with GGUF files."""
    if ":/" not in os.fspath(path) and not os.path.isdir(path):
        # most are files, which need no more than this
        return False
    from fitter.model import repository_models

    return repository_models.is_repository(path)


def model_files(
    path: str | os.PathLike[str],
    *,
    timeout: float | None = None,
    say: Callable[[Fetching], None] | None = None,
    at_once: int | None = None,
) -> tuple[Path, ...]:
    """Return the files of a model, the one for llama.cpp first; a remote model's files have only header and length.

    Args:
        path: Path or address.
        timeout: Seconds to fetch headers.
        say: Called with the progress.
        at_once: Files to read at the same time.

    Raises:
        UsageError: There is no such file, but a shape with a similar name.
        ModelError: A file is missing, cannot be read, or is no GGUF file for this llama.cpp.
        LibraryError: A package that reads it is missing.
    """
    if (shape := shapes.wanted(path)) is not None:
        from fitter.model.shapes import shape_files

        return shape_files.model_files(shape, timeout)
    if is_address(path):
        from fitter.model.files import remote_files
        from fitter.model.files.addresses import as_url

        return remote_files.fetched(as_url(path) or "", timeout=timeout, say=say, at_once=at_once)
    plain = os.fspath(_of_file_url(path))
    if os.sep not in plain and not plain.endswith(".gguf") and not os.path.lexists(plain):
        from fitter.model.shapes.catalogue import similar_shape

        if hint := similar_shape(plain.replace(":", "-")):
            raise UsageError(f"{printable(plain, LONGEST_NAME)}: no such file or shape; {hint}")
    return source.model_files(plain)


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the file, without its place. Raises ``ModelError`` for an address without a file."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.file_name
    if not is_address(path):
        return Path(path).name
    from fitter.model.files.addresses import as_url, file_name

    return file_name(as_url(path) or "")


def called(path: str | os.PathLike[str]) -> str:
    """Return the path, or the printable part of the address."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.shown
    if not is_address(path):
        return os.fspath(path)
    from fitter.model.files.addresses import as_url, shown

    return shown(as_url(path) or "")


def local_name(path: str | os.PathLike[str]) -> str:
    """Return the path, or the file's name after a download into the current directory."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.file_name
    if not is_address(path):
        return os.fspath(path)
    from fitter.model.files import addresses

    url = addresses.as_url(path) or ""
    is_hub = url.lower().startswith(f"{addresses.HUB}:")
    return addresses.hub_name(url) if is_hub else addresses.file_name(url)


def download(path: str | os.PathLike[str]) -> str:
    """Return the command that downloads a remote model; empty for others."""
    if shapes.wanted(path) is not None or not is_address(path):
        return ""
    from fitter.model.files.addresses import as_url, download_command

    return download_command(as_url(path) or "")


def check_is_here(path: str | os.PathLike[str]) -> None:
    """Raise ``ModelError`` for a remote model, which cannot be loaded."""
    if (shape := shapes.wanted(path)) is not None:
        raise ModelError(
            f"{shape.shown} is a model without a file, which cannot be loaded: give the path of a GGUF file of it"
        )
    if is_address(path):
        raise ModelError(f"{called(path)} has to be here to be loaded: download it with {download(path)}")


def _of_file_url(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    text = os.fspath(path)
    if not text.lower().startswith("file:/"):
        return path
    from urllib.parse import urlsplit

    return system.path_of_url(urlsplit(text).path)
