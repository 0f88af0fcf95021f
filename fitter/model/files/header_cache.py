"""Where headers are kept, those that were fetched and those that were made, and how much of them. Bytes.

They are in folders of the platform's cache directory, in each an entry for each model, which is a folder again. Who
reads an entry has a shared lock of its folder (``flock``), which ends with the process at the latest, and who removes
it the exclusive one. So all of them take no more than ``MOST`` after every write, whoever else reads and writes.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fitter.errors import ModelError
from fitter.storage.files import make_private
from fitter.storage.folders import cache_folder
from fitter.text import human

HEADERS, SHAPES = "headers", "shapes"
MOST = 2 << 30
"""What all of them may take on the disk; a sparse file takes what was written into it."""
MOST_ENTRIES = 4096
"""How many there may be, as each write looks at all of them: 0.1 seconds."""
_PARTIAL, _LEAVING = ".partial-", ".leaving-"
_TRIES = 10
"""How often a damaged entry is replaced, which other processes may do at the same time."""

_here = threading.local()
"""``held``: the entries that this thread reads, and the descriptor of each one's lock."""


@contextmanager
def reading() -> Iterator[None]:
    """Keep every entry that this thread uses in the block: no process removes it before the end."""
    before: dict[Path, int] | None = getattr(_here, "held", None)
    held: dict[Path, int] = {}
    _here.held = held
    try:
        yield
    finally:
        _here.held = before
        for lock in held.values():
            os.close(lock)


def use(entry: Path) -> bool:
    """Note that ``entry`` is used now, and keep it until the end of ``reading``. Returns whether it is there."""
    held: dict[Path, int] | None = getattr(_here, "held", None)
    if held is not None and entry not in held:
        lock = _locked(entry, fcntl.LOCK_SH)
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


def put(entry: Path, fill: Callable[[Path], object], is_whole: Callable[[], bool]) -> None:
    """Have ``fill`` write the files of ``entry`` into a folder that becomes it, whole or not at all, and use it.

    One that is there and not ``is_whole`` is replaced. Raises ``OSError``, and ``ModelError`` where there is no room.
    """
    import shutil

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
                break
            except OSError:
                # Another process was quicker, or what is there is damaged.
                if is_whole():
                    break
                if not left:
                    raise
                shutil.rmtree(entry, ignore_errors=True)
        use(entry)


def remove(entry: Path) -> bool:
    """Remove ``entry`` unless somebody uses it. Returns whether it is gone."""
    lock = _locked(entry, fcntl.LOCK_EX)
    if lock is None:
        return not os.path.lexists(entry)
    try:
        _discard(entry)
    finally:
        os.close(lock)
    return not os.path.lexists(entry)


def look_after() -> bool:
    """Remove what was used longest ago and is not in use, until what is kept takes no more than ``MOST``.

    Returns whether it does. What a process has left that was killed goes first.
    """
    found = sorted(each for name in (HEADERS, SHAPES) for each in _entries(cache_folder(name)))
    size, count = sum(each for _, _, each in found), len(found)
    for _, entry, taken in found:
        is_left = entry.name.startswith((_PARTIAL, _LEAVING))
        if not is_left and size <= MOST and count <= MOST_ENTRIES:
            break
        if remove(entry):
            size, count = size - taken, count - 1
    return size <= MOST


def _locked(entry: Path, how: int) -> int | None:
    """The descriptor of a lock of ``entry``; ``None`` where others have theirs, or where it is gone."""
    try:
        lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        # it may have been moved away meanwhile, and another one be there
        if _is_had(lock, how) and os.path.samestat(os.fstat(lock), os.stat(entry)):
            return lock
    os.close(lock)
    return None


def _is_had(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: what was used longest ago goes all the same, and is fetched again
        return True
    return True


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """A new folder in ``place``, in use until the end, under whichever name."""
    import shutil
    import tempfile

    for _ in range(_TRIES):
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=place))
        # another process may take it for one that was left
        if (lock := _locked(partial, fcntl.LOCK_SH)) is not None:
            break
    else:
        raise BlockingIOError("no new folder can be locked")
    try:
        yield partial
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _entries(place: Path) -> Iterator[tuple[float, Path, int]]:
    """When each entry was used last (what was left: never), and what it takes on the disk."""
    with suppress(OSError):
        for entry in place.iterdir():
            with suppress(OSError):
                used = 0.0 if entry.name.startswith(".") else entry.lstat().st_mtime
                yield used, entry, _bytes(entry)


def _bytes(entry: str | os.PathLike[str]) -> int:
    # of 512 bytes, whatever the file system's are
    size = 512 * os.lstat(entry).st_blocks
    with os.scandir(entry) as found:
        for each in found:
            is_folder = each.is_dir(follow_symlinks=False)
            size += _bytes(each) if is_folder else 512 * each.stat(follow_symlinks=False).st_blocks
    return size


def _discard(entry: Path) -> None:
    """Nobody sees half of it: it is moved away first."""
    import shutil
    import tempfile

    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=_LEAVING, dir=entry.parent))
        with suppress(OSError):
            entry.rename(gone / entry.name)
        shutil.rmtree(gone, ignore_errors=True)
