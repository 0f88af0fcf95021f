"""Fetched headers in the platform's cache directory, as sparse files of the full length.

Each content of each address has a folder, named by digests of both (of the address: without secrets), with
``about.json`` and, in ``files``, the model's files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fitter import system
from fitter.errors import ModelError
from fitter.llama.processes import wire
from fitter.model.files import header_cache
from fitter.model.files.addresses import Address
from fitter.model.files.source import show
from fitter.storage import cache_folder, portable, read_regular

_ABOUT, _FILES, _PIECE = "about.json", "files", 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A stored file: its name, tag and length, and length and digest of its header."""

    name: str
    tag: str
    file_bytes: int
    header_bytes: int
    digest: str


@dataclass(frozen=True)
class StoredHeader:
    """A fetched header; ``data`` are the first bytes of the file."""

    name: str
    tag: str
    file_bytes: int
    data: bytes

    @property
    def stored_file(self) -> StoredFile:
        """Its description for ``about.json``."""
        return StoredFile(self.name, self.tag, self.file_bytes, len(self.data), hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True)
class Entry:
    """The stored headers of a model, in ``folder``."""

    folder: Path
    files: tuple[StoredFile, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in their order."""
        return tuple(self.folder / _FILES / portable(each.name) for each in self.files)

    def header(self, index: int) -> StoredHeader:
        """One of its headers. Raises ``OSError``."""
        kept = self.files[index]
        with self.paths[index].open("rb") as file:
            return StoredHeader(kept.name, kept.tag, kept.file_bytes, file.read(kept.header_bytes))

    def is_whole(self) -> bool:
        """Whether every file is unchanged."""
        try:
            return all(
                path.stat().st_size == kept.file_bytes and _digest_of(path, kept.header_bytes) == kept.digest
                for path, kept in zip(self.paths, self.files, strict=True)
            )
        except OSError:
            return False


def _digest_of(path: Path, size: int) -> str:
    """Compute the digest of a file's first ``size`` bytes, piece by piece. Raises ``OSError``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (piece := file.read(min(size, _PIECE))):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


def folder() -> Path:
    """Return the folder of all stored headers."""
    return cache_folder(header_cache.HEADERS)


def newest(model: Sequence[Address]) -> Entry | None:
    """Return the last fetched headers of a model; ``None`` if there are none, or damaged ones."""
    try:
        abouts = sorted((each / _ABOUT for each in _content_folders(model)), key=os.path.getmtime)
    except OSError:
        return None
    if not abouts or not header_cache.use(abouts[-1].parent):
        return None
    entry = _read(abouts[-1].parent)
    names = [address.name for address in model]
    return entry if entry and [each.name for each in entry.files] == names and entry.is_whole() else None


def keep(model: Sequence[Address], headers: Sequence[StoredHeader]) -> Entry:
    """Store the headers of all files of a model. Raises ``ModelError`` if they cannot be written."""
    place = folder()
    try:
        return header_cache.kept(lambda: _keep(model, headers))
    except OSError as error:
        which = "takes files as long as the model" if error.errno == errno.EFBIG else "can be written"
        raise ModelError(
            f"the header of {model[0].shown} cannot be kept in {show(place)}: {error.strerror}; set XDG_CACHE_HOME "
            f"to a directory that {which}"
        ) from None


def _keep(model: Sequence[Address], headers: Sequence[StoredHeader]) -> Entry:
    kept = tuple(header.stored_file for header in headers)
    words = json.dumps([asdict(each) for each in kept], indent=1)
    place = folder() / f"{_digest(model)}-{hashlib.sha256(words.encode()).hexdigest()[:32]}"
    entry = Entry(place, kept)
    if not (header_cache.use(place) and entry.is_whole()):
        header_cache.put(place, lambda partial: _write(partial, headers, words), entry.is_whole)
    os.utime(place / _ABOUT)
    for other in _content_folders(model):
        # an older content of the address
        if other != place:
            header_cache.remove(other)
    return entry


def use(files: Sequence[Path]) -> bool:
    """Keep the ``files`` of an entry until the end of ``cache.reading``. Returns whether all exist."""
    try:
        name = files[0].relative_to(folder()).parts[0]
    except ValueError:
        # they have moved
        return False
    return header_cache.use(folder() / name) and all(file.exists() for file in files)


def _digest(model: Sequence[Address]) -> str:
    return hashlib.sha256(model[0].shown.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _content_folders(model: Sequence[Address]) -> list[Path]:
    """Return the folders of all contents of a model."""
    return list(folder().glob(f"{_digest(model)}-*"))


def _read(place: Path) -> Entry | None:
    try:
        about = json.loads(read_regular(place / _ABOUT))
        files: tuple[StoredFile, ...] = wire.decode(tuple[StoredFile, ...], about)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return Entry(place, files) if all(0 <= kept.header_bytes <= kept.file_bytes for kept in files) else None


def _write(place: Path, headers: Sequence[StoredHeader], words: str) -> None:
    (place / _FILES).mkdir()
    for header in headers:
        with (place / _FILES / portable(header.name)).open("xb") as file:
            file.write(header.data)
            system.extend(file, header.file_bytes)
    (place / _ABOUT).write_text(words + "\n", encoding="utf-8")
