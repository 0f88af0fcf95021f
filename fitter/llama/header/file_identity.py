"""Identity of a file for the worker and its client. Imports next to nothing."""

from __future__ import annotations

import os


def identity(path: str) -> tuple[int, ...]:
    """Return a value that changes with the file; empty if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_dev, status.st_ino)
