"""Private directories that do not outlive their use: a process that is killed leaves one, which the next one removes.

They are below one directory of this user's. A process holds a lock on each of its own, so that others know of those
whose process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

_here: set[Directory] = set()
"""Those of this process."""


class Directory:
    """A new directory that only this user can read, removed by ``cleanup`` or at the end of a ``with`` block.

    Raises ``OSError`` if it cannot be made.
    """

    def __init__(self) -> None:
        import tempfile

        place = Path(tempfile.gettempdir())
        made: tuple[str, int | None] | None = None
        while made is None:
            self._above = _above(place)
            if self._above is None:
                # somebody else has the name
                made = tempfile.mkdtemp(prefix="fitter-"), None
            else:
                _sweep(self._above)
                made = _locked(self._above)
        self.name, self._lock = made
        self._owner = os.getpid()
        _here.add(self)

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it, once; a fork of the process that made it does not."""
        if self not in _here:
            return
        _here.discard(self)
        if self._owner == os.getpid():
            _remove(self.name)
            if self._above is not None:
                with contextlib.suppress(OSError):
                    # unless there are others
                    self._above.rmdir()
        if self._lock is not None:
            os.close(self._lock)


def remove_all() -> None:
    """Remove every one of this process, which ends."""
    for each in tuple(_here):
        each.cleanup()


atexit.register(remove_all)


def _above(place: Path) -> Path | None:
    """The directory of this user's in ``place``; ``None`` where that is somebody else's, or a link."""
    above = place / f"fitter-{os.geteuid()}"
    while True:
        with contextlib.suppress(FileExistsError):
            above.mkdir(0o700)
        # another process removes it once it is empty
        with contextlib.suppress(FileNotFoundError):
            found = above.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            return above if is_own else None


def _locked(above: Path) -> tuple[str, int] | None:
    """A new directory, and its lock; ``None`` where another process has removed ``above``, or has swept it."""
    path = above / os.urandom(8).hex()
    try:
        path.mkdir(0o700)
        lock = _open(path)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        # where nobody can lock, nobody sweeps
        fcntl.flock(lock, fcntl.LOCK_EX)
    if path.is_dir():
        return str(path), lock
    os.close(lock)
    return None


def _sweep(above: Path) -> None:
    """Remove directories whose process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(above):
            with contextlib.suppress(OSError):
                lock = _open(above / name)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(above / name))
                finally:
                    os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
