"""The directory in which fitter keeps what it can find out again. Only this user may write it."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

from fitter.storage.temporary import Directory

_instead: dict[Path, Directory] = {}
"""What is used until this process ends, instead of a directory that others may write."""


def folder(name: str = "") -> Path:
    """``llama-fitter/name`` in the platform's cache directory (``XDG_CACHE_HOME``).

    Where somebody else may write that, it is not used: a ``UserWarning`` says so once, and what is kept is kept until
    this process ends.
    """
    from platformdirs import user_cache_path

    place = user_cache_path("llama-fitter", appauthor=False)
    if place not in _instead:
        why = _why_not(place)
        if not why:
            return place / name
        warnings.warn(why, stacklevel=2)
        _instead[place] = Directory()
    return Path(_instead[place].name, name)


def is_lasting() -> bool:
    """Whether another process finds what this one keeps."""
    return folder() not in {Path(each.name) for each in _instead.values()}


_OTHER = "nothing is kept there: set XDG_CACHE_HOME to a directory of your own"


def _why_not(place: Path) -> str:
    """Why a directory is not used, and what to do, '' where it is used, or is not there yet."""
    try:
        above = place.parent.stat()
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            return f"{place.parent} may be written by others, so {_OTHER}"
        found = place.stat()
        if not {place.lstat().st_uid, found.st_uid} <= {0, os.geteuid()}:
            return f"{place} belongs to somebody else, so {_OTHER}"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} may be written by others, so nothing is kept there: chmod 700 {place}"
    except OSError:
        # What needs it says what is wrong with it.
        return ""
    return ""
