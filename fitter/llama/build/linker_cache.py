"""Find a library among the system's as Linux's dynamic linker would: in its cache, or where libraries usually are."""

from __future__ import annotations

import functools
import os
import platform
import struct

_CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"


def path_of(name: str) -> str:
    """Return the path of a library, '' without one."""
    cached = _cache().get(name, "")
    if cached and os.path.isfile(cached):
        return cached
    return next((path for place in _default_places() if os.path.isfile(path := os.path.join(place, name))), "")


def _default_places() -> tuple[str, ...]:
    machine = platform.machine()
    return (
        f"/lib/{machine}-linux-gnu",
        f"/usr/lib/{machine}-linux-gnu",
        *("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    )


@functools.cache
def _cache() -> dict[str, str]:
    try:
        with open(_CACHE, "rb") as file:
            return read_cache(file.read())
    except OSError:
        return {}


def read_cache(data: bytes) -> dict[str, str]:
    """Read an ``ld.so.cache``: paths of this machine's libraries by name; empty for an unknown format."""
    begin = data.find(_MAGIC)
    if begin < 0:
        return {}
    paths: dict[str, str] = {}
    try:
        (count,) = struct.unpack_from("<I", data, begin + len(_MAGIC))
        for i in range(count):
            _, name, path = struct.unpack_from("<iII", data, begin + 48 + 24 * i)
            key, value = (_text(data, begin + at) for at in (name, path))
            # the first of a name is the best; libraries of other machines are between them
            if key not in paths and _is_own(value):
                paths[key] = value
    except (struct.error, ValueError):
        return paths
    return paths


def _text(data: bytes, start: int) -> str:
    return os.fsdecode(data[start : data.index(b"\0", start)])


def _is_own(path: str) -> bool:
    return "/lib32/" not in path and "/libx32/" not in path and "/i386-linux-gnu/" not in path
