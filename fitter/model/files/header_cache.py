"""The cache of headers, fetched or made, and its limit. Bytes.

Folders of the platform's cache directory have an entry for each model, which is a folder again. Readers lock an entry's
folder shared (``flock``, until the process ends at the latest), removers exclusively. After every write, all entries
together keep within ``MOST``, whatever other processes do.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fitter import system
from fitter.errors import ModelError
from fitter.storage import cache_folder, make_private, replace_cache
from fitter.text import human

_T = TypeVar("_T")

HEADERS, SHAPES = "headers", "shapes"
MOST = 2 << 30
"""Most bytes of all entries on the disk; sparse files count only what was written."""
MOST_ENTRIES = 4096
"""Most entries; each write reads all of them, in 0.1 seconds."""
_PARTIAL, _LEAVING = ".partial-", ".leaving-"
_TRIES = 10
"""Most tries to replace a damaged entry or to make room, while other processes may do the same."""
_PAUSE = 0.02
"""Seconds between two tries to make room: removing an entry takes less, unless the disk is slow."""

_here = threading.local()
"""``held``: entries that this thread reads, with their locks."""


@contextmanager
def reading() -> Iterator[None]:
    """Keep every entry that this thread uses inside the block from being removed."""
    before: dict[Path, system.Folder] | None = getattr(_here, "held", None)
    held: dict[Path, system.Folder] = {}
    _here.held = held
    try:
        yield
    finally:
        _here.held = before
        for lock in held.values():
            lock.close()


def use(entry: Path) -> bool:
    """Mark ``entry`` as used now, and keep it until the end of ``reading``. Returns whether it exists."""
    held: dict[Path, system.Folder] | None = getattr(_here, "held", None)
    if held is not None and entry not in held:
        lock = _locked(entry, is_shared=True)
        if lock is None:
            return False
        held[entry] = lock
    try:
        os.utime(entry)
    except FileNotFoundError:
        return False
    except OSError:
        # of another user, who lets this one read
        return entry.is_dir()
    return True


def kept(keep: Callable[[], _T]) -> _T:
    """Call ``keep``, which puts entries, and again with a temporary directory if the cache cannot be written.

    A ``UserWarning`` says so then. Raises the first ``OSError`` if neither can be written.
    """
    try:
        return keep()
    except OSError as error:
        with suppress(OSError):
            if problem := replace_cache(error):
                found = keep()
                warnings.warn(problem, stacklevel=2)
                return found
        raise


def put(entry: Path, fill: Callable[[Path], object], is_whole: Callable[[], bool]) -> None:
    """Let ``fill`` write the files of ``entry`` into a folder that becomes it, whole or not at all, and use it.

    An existing entry that is not ``is_whole`` is replaced. Raises ``OSError``, and ``ModelError`` if there is no room.
    """
    make_private(entry.parent)
    with _partial(entry.parent) as partial:
        fill(partial)
        if not look_after():
            raise ModelError(
                f"the header of {human(_bytes(partial))} cannot be kept: those in use take the rest of {human(MOST)}, "
                "which is all that may be kept; ask again later"
            )
        for left in range(_TRIES - 1, -1, -1):
            try:
                partial.rename(entry)
            except OSError:
                # another process was quicker, or the entry is damaged
                if not is_whole():
                    if not left:
                        raise
                    _let_go(entry)
                    if not remove(entry):
                        time.sleep(_PAUSE)
                    continue
            if use(entry):
                break


def remove(entry: Path) -> bool:
    """Remove ``entry`` unless somebody uses it. Returns whether it is gone."""
    lock = _locked(entry, is_shared=False)
    if lock is None:
        return not os.path.lexists(entry)
    try:
        _discard(entry)
    finally:
        lock.close()
    return not os.path.lexists(entry)


def look_after() -> bool:
    """Remove entries that nobody reads, the least recently used first, until the rest takes at most ``MOST``.

    Leftovers of killed processes are removed first. What another process is about to remove is counted again shortly
    after.

    Returns:
        Whether the rest is within the limits.
    """
    for left in range(_TRIES - 1, -1, -1):
        if _remove_least_recent():
            return True
        if left:
            time.sleep(_PAUSE)
    return False


def _remove_least_recent() -> bool:
    """Count all entries once, and do what ``look_after`` promises."""
    entries = sorted(each for name in (HEADERS, SHAPES) for each in _entries(cache_folder(name)))
    size, count = sum(each for _, _, each in entries), len(entries)
    for _, entry, taken in entries:
        is_left = entry.name.startswith((_PARTIAL, _LEAVING))
        if not is_left and size <= MOST and count <= MOST_ENTRIES:
            break
        if remove(entry):
            size, count = size - taken, count - 1
    return size <= MOST


def _let_go(entry: Path) -> None:
    """Give up this thread's lock of an entry."""
    held: dict[Path, system.Folder] = getattr(_here, "held", None) or {}
    if (lock := held.pop(entry, None)) is not None:
        lock.close()


def _locked(entry: Path, *, is_shared: bool) -> system.Folder | None:
    """Lock ``entry``, and return the lock; ``None`` if others have locked or removed it."""
    try:
        lock = system.Folder(entry)
    except OSError:
        return None
    with suppress(OSError):
        # another entry may have replaced it meanwhile
        if _is_had(lock, is_shared) and lock.is_at(entry):
            return lock
    lock.close()
    return None


def _is_had(lock: system.Folder, is_shared: bool) -> bool:
    try:
        lock.lock(is_shared=is_shared)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: the oldest entries are removed nevertheless, and fetched again
        return True
    return True


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """Make a new folder in ``place``, locked until the end."""
    import shutil
    import tempfile

    for _ in range(_TRIES):
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=place))
        # another process may think that it was left behind
        if (lock := _locked(partial, is_shared=True)) is not None:
            break
    else:
        raise BlockingIOError("no new folder can be locked")
    try:
        yield partial
    finally:
        lock.close()
        shutil.rmtree(partial, ignore_errors=True)


def _entries(place: Path) -> Iterator[tuple[float, Path, int]]:
    """Yield each entry's time of last use (0 for leftovers), and its bytes on the disk."""
    with suppress(OSError):
        for entry in place.iterdir():
            with suppress(OSError):
                used = 0.0 if entry.name.startswith(".") else entry.lstat().st_mtime
                yield used, entry, _bytes(entry)


def _bytes(entry: str | os.PathLike[str]) -> int:
    size = system.disk_bytes(entry)
    with os.scandir(entry) as files:
        for each in files:
            is_folder = each.is_dir(follow_symlinks=False)
            size += _bytes(each) if is_folder else system.disk_bytes(each)
    return size


def _discard(entry: Path) -> None:
    """Remove an entry; it is moved away first, so that nobody sees half of it."""
    import shutil
    import tempfile

    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=_LEAVING, dir=entry.parent))
        with suppress(OSError):
            entry.rename(gone / entry.name)
        shutil.rmtree(gone, ignore_errors=True)
