"""Headers that were fetched from elsewhere, kept in the platform's cache directory: sparse files of the full length.

A folder for each address, by a digest of what may be shown of it; in it a folder for each content that it has had,
which has ``about.json``, and in ``files`` a file for each file of the model, named as there. It appears whole or not at
all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fitter.errors import ModelError
from fitter.model import cache
from fitter.model.addresses import Address
from fitter.model.source import show
from fitter.storage.files import make_private, read

_ABOUT, _FILES = "about.json", "files"
_PARTIAL = ".partial-"
_TRIES = 10
"""How often a damaged folder is replaced, which other processes may do at the same time."""


@dataclass(frozen=True)
class Kept:
    """What is kept of a file: its name, its tag, its length, and how much of that is its header, with a digest."""

    name: str
    tag: str
    file_bytes: int
    header_bytes: int
    digest: str


@dataclass(frozen=True)
class Header:
    """The header of a file that was fetched: ``data`` are its first bytes."""

    name: str
    tag: str
    file_bytes: int
    data: bytes

    @property
    def kept(self) -> Kept:
        """What is kept of it."""
        return Kept(self.name, self.tag, self.file_bytes, len(self.data), hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True)
class Entry:
    """The headers of a model that are kept in ``folder``."""

    folder: Path
    files: tuple[Kept, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in their order."""
        return tuple(self.folder / _FILES / each.name for each in self.files)

    def header(self, index: int) -> Header:
        """One of its headers. Raises ``OSError``."""
        kept = self.files[index]
        with self.paths[index].open("rb") as file:
            return Header(kept.name, kept.tag, kept.file_bytes, file.read(kept.header_bytes))

    def is_whole(self) -> bool:
        """Whether every file is as it was written."""
        try:
            return all(
                path.stat().st_size == kept.file_bytes and self.header(index).kept == kept
                for index, (path, kept) in enumerate(zip(self.paths, self.files, strict=True))
            )
        except OSError:
            return False


def folder() -> Path:
    """Where they are kept."""
    return cache.folder(cache.HEADERS)


def newest(model: Sequence[Address]) -> Entry | None:
    """What was fetched last of a model; ``None`` if nothing was, or if it is damaged."""
    try:
        found = sorted(_of(model).glob(f"*/{_ABOUT}"), key=os.path.getmtime)
    except OSError:
        return None
    entry = _read(found[-1].parent) if found else None
    names = [address.name for address in model]
    if not entry or [each.name for each in entry.files] != names or not entry.is_whole():
        return None
    cache.use(entry.folder.parent)
    return entry


def keep(model: Sequence[Address], headers: Sequence[Header]) -> Entry:
    """Keep the headers of all files of a model. Raises ``ModelError`` where they cannot be written."""
    kept = tuple(header.kept for header in headers)
    words = json.dumps([asdict(each) for each in kept], indent=1)
    place = _of(model) / hashlib.sha256(words.encode()).hexdigest()[:32]
    entry = Entry(place, kept)
    try:
        make_private(place.parent)
        cache.use(place.parent)
        if not entry.is_whole():
            _write(entry, headers, words)
        os.utime(place / _ABOUT)
    except OSError as error:
        which = "takes files as long as the model" if error.errno == errno.EFBIG else "can be written"
        raise ModelError(
            f"the header of {model[0].shown} cannot be kept in {show(folder())}: {error.strerror}; set XDG_CACHE_HOME "
            f"to a directory that {which}"
        ) from None
    cache.use(place.parent)
    _tidy(place)
    cache.look_after()
    return entry


def _of(model: Sequence[Address]) -> Path:
    return folder() / hashlib.sha256(model[0].shown.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _read(place: Path) -> Entry | None:
    try:
        found = json.loads(read(place / _ABOUT))
        files = tuple(Kept(**each) for each in found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return Entry(place, files) if all(map(_is_possible, files)) else None


def _is_possible(kept: Kept) -> bool:
    texts, sizes = (kept.name, kept.tag, kept.digest), (kept.file_bytes, kept.header_bytes)
    is_typed = all(isinstance(text, str) for text in texts) and all(isinstance(size, int) for size in sizes)
    return is_typed and 0 <= kept.header_bytes <= kept.file_bytes


def _write(entry: Entry, headers: Sequence[Header], words: str) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=entry.folder.parent))
    try:
        (partial / _FILES).mkdir()
        for header in headers:
            with (partial / _FILES / header.name).open("xb") as file:
                file.write(header.data)
                file.truncate(header.file_bytes)
        (partial / _ABOUT).write_text(words + "\n", encoding="utf-8")
        for left in range(_TRIES - 1, -1, -1):
            try:
                partial.rename(entry.folder)
                return
            except OSError:
                # Another process was quicker, or what is there is damaged.
                if entry.is_whole():
                    return
                if not left:
                    raise
                shutil.rmtree(entry.folder, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tidy(place: Path) -> None:
    """Remove what the address had before, and what a process that was killed has left."""
    with suppress(OSError):
        long_ago = time.time() - cache.STAYS_SECONDS
        for other in place.parent.iterdir():
            with suppress(OSError):
                if other != place and other.stat().st_mtime < long_ago:
                    shutil.rmtree(other, ignore_errors=True)
