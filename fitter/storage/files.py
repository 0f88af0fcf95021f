"""Reading a file that fitter wrote itself, and writing one so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_ITSELF = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Open what is there, and not what a link points to; and wait for nobody to write into a pipe."""


def read(path: Path) -> bytes:
    """The content of a regular file. Raises ``OSError``, also where there is a link, a pipe or a device."""
    with _opened(path, os.O_RDONLY) as file:
        return file.read()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of the one at ``path`` once the block has ended. Raises ``OSError``.

    After an error everything is as it was. Nobody can guess the name that it has until then.
    """
    partial = path.with_name(f".partial-{os.urandom(8).hex()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ITSELF, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have other processes wait that lock the file at ``path``, too. Raises ``OSError`` where it cannot be locked."""
    import fcntl

    with _opened(path, os.O_RDWR | os.O_CREAT) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_private(folder: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone. Raises ``OSError``."""
    try:
        folder.mkdir(0o700, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def _opened(path: Path, flags: int) -> BinaryIO:
    descriptor = os.open(path, flags | _ITSELF, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "r+b" if flags & os.O_RDWR else "rb")
