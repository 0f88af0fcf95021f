"""Directories of fitter: its cache, which only this user may write, and its configuration."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path

from fitter import system
from fitter.storage.temporary import Directory

_replacements: dict[Path, Directory] = {}
"""Temporary directories that replace cache directories that others may write."""


def cache_folder(name: str = "") -> Path:
    """Name ``llama-fitter/name`` in the platform's cache directory (``XDG_CACHE_HOME``).

    If somebody else may write there, a ``UserWarning`` says so once, and a temporary directory of this process replaces
    it.
    """
    place = _place()
    if place not in _replacements:
        problem = _problem(place)
        if not problem:
            return place / name
        warnings.warn(problem, stacklevel=2)
        _replacements[place] = Directory()
    return Path(_replacements[place].name, name)


def replace_cache(error: OSError) -> str:
    """Replace the cache directory, where ``error`` was met, by a temporary directory of this process.

    Returns a sentence to warn with; '' if it was one already. Raises ``OSError`` if there is no room for one.
    """
    place = _place()
    if place in _replacements:
        return ""
    _replacements[place] = Directory()
    return f"{place} cannot be written ({error.strerror}), so {_OTHER}"


def config_folder() -> Path:
    """Name ``llama-fitter`` in the platform's configuration directory (``XDG_CONFIG_HOME``)."""
    from platformdirs import user_config_path

    return user_config_path("llama-fitter", appauthor=False)


def _place() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("llama-fitter", appauthor=False)


def is_lasting() -> bool:
    """Whether the cache directory outlives this process."""
    return cache_folder() not in {Path(directory.name) for directory in _replacements.values()}


_OTHER = "nothing is kept there: set XDG_CACHE_HOME to a directory of your own"


def _problem(place: Path) -> str:
    """Say why a cache directory is not used, and the way out; '' if it is used, or does not exist yet."""
    if not system.HAS_OWNERS:
        return ""
    try:
        parent = place.parent.stat()
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            return f"{place.parent} may be written by others, so {_OTHER}"
        status = place.stat()
        if not {place.lstat().st_uid, status.st_uid} <= {0, system.user()}:
            return f"{place} belongs to somebody else, so {_OTHER}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} may be written by others, so nothing is kept there: chmod 700 {place}"
    except OSError:
        # The code that opens the directory reports its error.
        return ""
    return ""
