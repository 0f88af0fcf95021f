"""Directories of fitter: its cache, which only this user may write, its configuration, and temporary ones.

Temporary directories are in one directory of the user. A process locks each of its own; the directories of a killed
process are removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import warnings
from pathlib import Path
from types import TracebackType

from fitter import system

_directories: set[TemporaryDirectory] = set()
"""Directories of this process."""


class TemporaryDirectory:
    """A new directory that only this user can read, removed by ``cleanup`` or at the end of a ``with`` block.

    Raises ``OSError`` if it cannot be made.
    """

    def __init__(self) -> None:
        import tempfile

        place = Path(tempfile.gettempdir())
        locked: tuple[str, system.Folder | None] | None = None
        while locked is None:
            self._above = _users_directory(place)
            if self._above is None:
                # somebody else has the name
                locked = tempfile.mkdtemp(prefix="fitter-"), None
            else:
                _sweep(self._above)
                locked = _locked(self._above)
        self.name, self._lock = locked
        self._owner = os.getpid()
        _directories.add(self)

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the directory once, unless this process is a fork of its maker."""
        if self not in _directories:
            return
        _directories.discard(self)
        if self._owner == os.getpid():
            _remove(self.name)
            if self._above is not None:
                with contextlib.suppress(OSError):
                    # unless there are others
                    self._above.rmdir()
        if self._lock is not None:
            self._lock.close()


def remove_temporary() -> None:
    """Remove all directories of this process, which ends."""
    for directory in tuple(_directories):
        directory.cleanup()


atexit.register(remove_temporary)


def _users_directory(place: Path) -> Path | None:
    """Make the user's directory in ``place``; ``None`` if it belongs to somebody else, or is a link."""
    above = place / f"fitter-{system.user()}"
    while True:
        with contextlib.suppress(FileExistsError):
            above.mkdir(0o700)
        # another process removes it once it is empty
        with contextlib.suppress(FileNotFoundError):
            return above if system.is_private(above.lstat()) else None


def _locked(above: Path) -> tuple[str, system.Folder] | None:
    """Make a new directory and lock it; ``None`` if another process has removed it or ``above``."""
    path = above / os.urandom(8).hex()
    try:
        path.mkdir(0o700)
        lock = system.Folder(path)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        # without locks nothing is swept
        lock.lock(waits=True)
    if path.is_dir():
        return str(path), lock
    lock.close()
    return None


def _sweep(above: Path) -> None:
    """Remove directories whose process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(above):
            with contextlib.suppress(OSError):
                lock = system.Folder(above / name)
                try:
                    lock.lock()
                    _remove(str(above / name))
                finally:
                    lock.close()


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


_replacements: dict[Path, TemporaryDirectory] = {}
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
        _replacements[place] = TemporaryDirectory()
    return Path(_replacements[place].name, name)


def replace_cache(error: OSError) -> str:
    """Replace the cache directory, where ``error`` was met, by a temporary directory of this process.

    Returns a sentence to warn with; '' if it was one already. Raises ``OSError`` if there is no room for one.
    """
    place = _place()
    if place in _replacements:
        return ""
    _replacements[place] = TemporaryDirectory()
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
