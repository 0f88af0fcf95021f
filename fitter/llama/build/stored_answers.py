"""What was found out about builds of llama.cpp, kept for the next time in the platform's cache directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitter.storage import cache, files


def folder() -> Path:
    """``llama-fitter/llama-cpp`` in the cache directory (``XDG_CACHE_HOME``)."""
    return cache.folder("llama-cpp")


def path_of(name: str) -> Path:
    """The file of what is kept under ``name``."""
    return folder() / f"{name}.json"


def read(name: str) -> dict[str, Any] | None:
    """What was kept under ``name``; ``None`` if nothing was, or if it cannot be read."""
    try:
        found = json.loads(files.read(path_of(name)))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write(name: str, found: dict[str, Any]) -> None:
    """Keep ``found`` under ``name``, all of it or nothing; where that cannot be, it is found out again."""
    path = path_of(name)
    with contextlib.suppress(OSError):
        files.make_private(path.parent)
        with files.replacing(path) as file:
            file.write(json.dumps(found).encode() + b"\n")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have other processes wait that find something out as well, where files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            files.make_private(folder())
            stack.enter_context(files.locked(folder() / "lock"))
        yield
