"""Find the files of a model from the user's path."""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
from pathlib import Path

from fitter.errors import ModelError
from fitter.text import printable

_SPLIT = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_AS_ON_HUB = re.compile(r"(?:(?:huggingface|hf)\.co/)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?<!\.gguf)/?")
"""A path that looks like the name of a repository."""
_NEWEST = 3
"""Newest version of GGUF."""
ASK = "ask who provides it, or take another file"
"""Remedy for an incomplete remote file."""
_NAMED = 3
"""Most files that a message names; others are counted."""


def split_path(prefix: str, number: int, count: int) -> str:
    """Return the name of file ``number`` (from 1) of a split model, as in llama.cpp."""
    return f"{prefix}-{number:05d}-of-{count:05d}.gguf"


def split_name(path: Path) -> tuple[str, int, int] | None:
    """Return prefix, number (from 1) and count in a split file's name; ``None`` for another name."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return None
    number, count = int(match["number"]), int(match["count"])
    return (match["prefix"], number, count) if 1 <= number <= count else None


_CALLED: dict[str, str] = {}
"""Addresses of files whose headers were fetched."""
_MOST_CALLED = 1 << 14
_calling = threading.Lock()


def call(path: Path, address: str) -> None:
    """Use ``address`` as the name of the file at ``path``; the oldest of very many is forgotten."""
    with _calling:
        _CALLED.pop(str(path), None)
        _CALLED[str(path)] = address
        while len(_CALLED) > _MOST_CALLED:
            del _CALLED[next(iter(_CALLED))]


def called(path: Path) -> str:
    """Return the address of the file's header, or its path."""
    return _CALLED.get(str(path), str(path))


def another_count(name: str, count: int, named: int, again: str) -> str:
    """Describe a model with another number of files than ``named``."""
    return f"{name} is one of {count} files by its header, but one of {named} by its name; {again}"


def is_elsewhere(path: Path) -> bool:
    """Return whether only the header of the file is here."""
    return str(path) in _CALLED


def with_addresses(text: str) -> str:
    """Replace paths of fetched headers in ``text`` by their addresses."""
    for path, address in tuple(_CALLED.items()):
        text = text.replace(path, address)
    return text


def again(path: Path) -> str:
    """Return the remedy for an incomplete file."""
    return ASK if is_elsewhere(path) else "download it again"


def show(path: Path) -> str:
    """Return the path or address for a message, on one line and safe to print."""
    text = called(path)
    return printable(text if text.isprintable() else repr(text))


def model_files(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the files of the model at ``path``, the one for llama.cpp first.

    ``path`` may be any file of a split model. Each file must begin like a GGUF file.

    Raises ``ModelError`` if a file is missing, unreadable, empty, or no GGUF file for this llama.cpp.
    """
    try:
        given = Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"{show(Path(path))}: no such user; check the path of the model") from None
    split = split_name(given)
    if split is None:
        _check(given)
        return (given,)
    prefix, _, count = split
    files = tuple(given.with_name(split_path(prefix, number, count)) for number in range(1, count + 1))
    missing = [file.name for file in files if not os.path.exists(file)]
    if len(missing) == count:
        # if all are missing the path is wrong; otherwise the download is incomplete
        _check(given)
    if missing:
        shown = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise ModelError(f"{show(given)}: {len(missing)} of {count} split files are missing, download them: {shown}")
    for file in files:
        _check(file)
    return files


def _check(path: Path) -> None:
    """Raise ``ModelError`` unless ``path`` can be read and begins like a little-endian GGUF file of a known version."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{show(path)} is a directory; give the GGUF file{_inside(path)}")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{show(path)} is not a regular file; give a GGUF file")
        with path.open("rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        hub = _AS_ON_HUB.fullmatch(str(path))
        more = f", or give hf://{hub[1]} if it is on Hugging Face's hub" if hub else ""
        raise ModelError(f"{show(path)}: no such file; check the path of the model{more}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"{show(path)} cannot be read: {reason}") from None
    check_beginning(show(path), head)


def check_beginning(name: str, head: bytes) -> None:
    """Raise ``ModelError`` unless a file that begins with ``head`` is a little-endian GGUF file of a known version."""
    if not head:
        raise ModelError(f"{name} is empty; download the model again")
    if head[:8] == b"version ":
        raise ModelError(f"{name} is a pointer of Git LFS, not the model; get the file itself with 'git lfs pull'")
    if head[:5].lower() in (b"<!doc", b"<html"):
        raise ModelError(f"{name} is a web page, not the model; download the file itself")
    if head[:4] != b"GGUF":
        raise ModelError(f"{name} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py")
    if len(head) < 8:
        raise ModelError(f"{name} is truncated after {len(head)} bytes; download the model again")
    (version,) = struct.unpack("<I", head[4:8])
    if version & 0xFFFF == 0:
        raise ModelError(f"{name} is a big-endian GGUF; convert it with llama.cpp's gguf_convert_endian.py")
    if version == 1:
        raise ModelError(f"{name} is GGUF version 1, which llama.cpp no longer reads; convert the model again")
    if version > _NEWEST:
        raise ModelError(f"{name} is GGUF version {version}; this llama.cpp reads up to version {_NEWEST}")


def _inside(directory: Path) -> str:
    """List the GGUF files of ``directory`` for a message."""
    try:
        names = sorted(file.name for file in directory.iterdir() if file.suffix == ".gguf")
    except OSError:
        return " in it"
    return f" in it, such as {show(Path(names[0]))}" if names else " (there is no GGUF file in it)"
