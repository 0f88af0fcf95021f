"""Read a library or program as bytes in memory, with one-line errors."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from fitter.errors import LibraryError


@contextmanager
def mapped(path: str | os.PathLike[str], system: str, beginnings: tuple[bytes, ...]) -> Iterator[mmap.mmap]:
    """Yield the bytes of a file that begins like a library or program for ``system``.

    Raises ``LibraryError`` for any other file, and if the block finds it damaged.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            if file.read(4)[: len(beginnings[0])] not in beginnings:
                raise LibraryError(f"{name} is not a library or a program for {system}: name another one")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except OSError as error:
        raise LibraryError(f"{name} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise LibraryError(f"{name} is damaged or not all there: download or build it again") from error


def begins_so(path: str | os.PathLike[str], beginnings: tuple[bytes, ...]) -> bool:
    """Return whether a file begins with one of ``beginnings``, which are equally long."""
    try:
        with open(path, "rb") as file:
            return file.read(len(beginnings[0])) in beginnings
    except OSError:
        return False


def text_at(data: mmap.mmap, start: int) -> str:
    """Return the text that ends with a NUL. Raises ``ValueError`` without one."""
    end = data.find(b"\0", start)
    if start < 0 or end < 0:
        raise ValueError("a name without an end")
    return data[start:end].decode("utf-8", "surrogateescape")
