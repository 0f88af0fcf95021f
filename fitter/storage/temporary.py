"""Private temporary directories: a killed process leaves its directory, which the next process removes.

They are in one directory of the user. A process locks each of its directories, so that others can tell which
process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path
from types import TracebackType

from fitter import system

_directories: set[Directory] = set()
"""Directories of this process."""


class Directory:
    """A new directory that only this user can read, removed by ``cleanup`` or at the end of a ``with`` block.

    Raises ``OSError`` if it cannot be made.
    """

    def __init__(self) -> None:
        import tempfile

        place = Path(tempfile.gettempdir())
        locked: tuple[str, system.Folder | None] | None = None
        while locked is None:
            self._above = _above(place)
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


def remove_all() -> None:
    """Remove all directories of this process, which ends."""
    for directory in tuple(_directories):
        directory.cleanup()


atexit.register(remove_all)


def _above(place: Path) -> Path | None:
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
