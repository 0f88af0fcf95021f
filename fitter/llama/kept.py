"""What was found out about builds of llama.cpp, kept for the next time in the platform's cache directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def folder() -> Path:
    """``llama-fitter/llama-cpp`` in the cache directory (``XDG_CACHE_HOME``)."""
    from platformdirs import user_cache_path

    return user_cache_path("llama-fitter", appauthor=False) / "llama-cpp"


def read(name: str) -> dict[str, Any] | None:
    """What was kept under ``name``; ``None`` if nothing was, or if it cannot be read."""
    try:
        found = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write(name: str, found: dict[str, Any]) -> None:
    """Keep ``found`` under ``name``, all of it or nothing; where that cannot be, it is found out again."""
    path = folder() / f"{name}.json"
    partial = path.with_name(f".{name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have other processes wait that find something out as well, where files can be locked."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((folder() / "lock").open("w")), fcntl.LOCK_EX)
        yield
