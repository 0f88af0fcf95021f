"""Where headers are kept, those that were fetched and those that were made, and how much of them. Bytes.

They are in folders of the platform's cache directory, in each an entry for each model, which is a folder again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fitter.storage.cache import folder as folder

HEADERS, SHAPES = "headers", "shapes"
MOST = 2 << 30
"""What all of them may take on the disk; a sparse file takes what was written into it."""
STAYS_SECONDS = 24 * 3600
"""How long what was used last stays, however much there is: somebody may still be reading it."""
_LOOKED_SECONDS = 3600
"""How long nobody looks again whether there is too much."""
_LOOKED, _LEAVING = ".looked-after", ".leaving-"


def use(entry: Path) -> None:
    """Note that ``entry`` is used now."""
    with suppress(OSError):
        os.utime(entry)


def look_after(most: int = MOST) -> None:
    """Remove what was used longest ago, until what is kept takes no more than ``most``. It looks once an hour.

    What cannot be removed stays.
    """
    now, looked = time.time(), folder(HEADERS).with_name(_LOOKED)
    with suppress(OSError):
        if 0 <= now - looked.stat().st_mtime < _LOOKED_SECONDS:
            return
    with suppress(OSError):
        looked.touch()
        found = sorted(each for name in (HEADERS, SHAPES) for each in _entries(folder(name)))
        left = sum(size for _, _, size in found)
        for used, entry, size in found:
            if left <= most or used > now - STAYS_SECONDS:
                return
            # another process may have begun to use it
            if entry.stat().st_mtime == used:
                _remove(entry)
                left -= size


def _entries(place: Path) -> Iterator[tuple[float, Path, int]]:
    """When each entry was used last, and what it takes on the disk."""
    with suppress(OSError):
        for entry in place.iterdir():
            with suppress(OSError):
                yield entry.stat().st_mtime, entry, _bytes(entry)


def _bytes(entry: Path) -> int:
    # of 512 bytes, whatever the file system's are
    return sum(
        512 * os.lstat(os.path.join(where, name)).st_blocks for where, _, names in os.walk(entry) for name in names
    )


def _remove(entry: Path) -> None:
    """Nobody sees half of it: it is moved away first."""
    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=_LEAVING, dir=entry.parent))
        with suppress(OSError):
            entry.rename(gone / entry.name)
        shutil.rmtree(gone, ignore_errors=True)
