"""Answers about builds of llama.cpp, stored in the platform's cache directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitter.storage import files
from fitter.storage.folders import cache_folder


def folder() -> Path:
    """Name ``llama-fitter/llama-cpp`` in the cache directory (``XDG_CACHE_HOME``)."""
    return cache_folder("llama-cpp")


def path_of(name: str) -> Path:
    """Name the file of an answer."""
    return folder() / f"{name}.json"


def read(name: str) -> dict[str, Any] | None:
    """Read an answer; ``None`` if there is none, or if it cannot be read."""
    try:
        answer = files.read_json(path_of(name))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def write(name: str, answer: dict[str, Any]) -> None:
    """Store an answer, all or nothing; ignore errors, because it can be asked again."""
    with contextlib.suppress(OSError):
        files.write_json(path_of(name), answer)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let other processes that would ask too wait, if files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            files.make_private(folder())
            stack.enter_context(files.locked(folder() / "lock"))
        yield
