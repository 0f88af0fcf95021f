"""The files of a model, wherever it is: a path of this machine, or an address of which the header is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fitter.errors import ModelError
from fitter.model.files import source
from fitter.model.shapes import shape_addresses as shapes

if TYPE_CHECKING:
    from fitter.model.files.remote_files import Fetching


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the address of a file that is elsewhere."""
    if ":" not in os.fspath(path):
        # most are paths, which need no more than this
        return False
    from fitter.model.files.addresses import as_url

    url = as_url(path)
    return shapes.wanted(path) is not None or (url is not None and not url.lower().startswith("file://"))


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a repository of the hub, a folder in one, or a directory with GGUF files in it."""
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
    """The files of the model at ``path``, a path or an address; the first is the one to pass to llama.cpp.

    Of a model that is elsewhere these have only the header, and its length. ``timeout`` are seconds for fetching that,
    and ``say`` is told how far it is; ``at_once``: how many files are read at the same time. Raises ``ModelError``
    where a file is missing, cannot be read, or is no GGUF file that this llama.cpp can read, and ``LibraryError`` where
    a package is missing to read it.
    """
    if (shape := shapes.wanted(path)) is not None:
        from fitter.model.shapes import shape_files

        return shape_files.model_files(shape, timeout)
    if is_address(path):
        from fitter.model.files import remote_files
        from fitter.model.files.addresses import as_url

        return remote_files.fetched(as_url(path) or "", timeout=timeout, say=say, at_once=at_once)
    return source.model_files(_of_file_url(path))


def name_of(path: str | os.PathLike[str]) -> str:
    """The name of the file, without where it is. Raises ``ModelError`` for an address that names no file."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.file_name
    if not is_address(path):
        return Path(path).name
    from fitter.model.files.addresses import as_url, file_name

    return file_name(as_url(path) or "")


def called(path: str | os.PathLike[str]) -> str:
    """The path, or what may be shown of the address."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.shown
    if not is_address(path):
        return os.fspath(path)
    from fitter.model.files.addresses import as_url, shown

    return shown(as_url(path) or "")


def local_name(path: str | os.PathLike[str]) -> str:
    """The path, or where the file is once it has been downloaded into the current directory."""
    if (shape := shapes.wanted(path)) is not None:
        return shape.file_name
    if not is_address(path):
        return os.fspath(path)
    from fitter.model.files import addresses

    url = addresses.as_url(path) or ""
    is_hub = url.lower().startswith(f"{addresses.HUB}:")
    return addresses.hub_name(url) if is_hub else addresses.file_name(url)


def check_is_here(path: str | os.PathLike[str]) -> None:
    """Raise ``ModelError`` for a model that is elsewhere, and so cannot be loaded."""
    if (shape := shapes.wanted(path)) is not None:
        raise ModelError(
            f"{shape.shown} is a model without a file, which cannot be loaded: give the path of a GGUF file of it"
        )
    if is_address(path):
        from fitter.model.files.addresses import as_url, download_command, shown

        url = as_url(path) or ""
        raise ModelError(f"{shown(url)} has to be here to be loaded: download it with {download_command(url)}")


def _of_file_url(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    text = os.fspath(path)
    if not text.lower().startswith("file:/"):
        return path
    from urllib.parse import unquote, urlsplit

    return unquote(urlsplit(text).path)
