"""Remote models as local files: only their headers are fetched, and stored in the platform's cache directory.

The local files have the full length, with nothing after the header. Now and then the server is asked for the ETag; if
it has changed, the header is fetched again. Each content of each address has a folder, named by digests of both (of the
address: without secrets), with ``about.json`` and, in ``files``, the model's files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from fitter import system
from fitter.errors import FitterError, ModelError
from fitter.llama.processes import wire
from fitter.model.files import header_cache, source
from fitter.model.files.addresses import Address, addresses, shown, without_secrets
from fitter.model.files.header_length import LONGEST, Damaged, HeaderLength, TooLong
from fitter.model.files.ranges import FsspecRanges, Patience, Ranges, Unchanged, changed
from fitter.model.files.source import show
from fitter.storage import cache_folder, portable, read_regular
from fitter.text import human

_T = TypeVar("_T")

DEFAULT_TIMEOUT = 60.0
"""Seconds for a header, by default."""

_BELIEVED = 60.0
"""Seconds for which an answer stays valid, so that a plan asks once."""
_AT_ONCE = 16
"""Files of a model to read at the same time."""
READER, MOST_READERS = "reading a header", 256
"""Name and largest number of the threads that read; the lookup of a host's name cannot be interrupted."""
_MOST_ANSWERS = 1024
_LOOK = 0.1
"""Seconds between two checks that the header is still wanted."""
_FIRST_OF_FIRST, _FIRST_OF_OTHERS = 1 << 14, 1 << 12
"""Bytes of the first request: for the file with the metadata, and for a file with tensors only."""


@dataclass(frozen=True)
class Fetching:
    """Progress of fetching a header."""

    text: str
    """The file, and how far it is."""
    part: float
    """Finished share, from 0 to 1."""


Say = Callable[[Fetching], None]


@dataclass
class _Answer:
    """The answer for a URL: its time, and the files."""

    url: str
    files: tuple[Path, ...] = ()
    asked: float = float("-inf")


_answers: dict[str, _Answer] = {}
_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def fetched(
    url: str, *, timeout: float | None = None, say: Say | None = None, at_once: int | None = None
) -> tuple[Path, ...]:
    """Return the files of the model at ``url``; only their headers are fetched.

    Args:
        url: The URL.
        timeout: Seconds for all of them.
        say: Called with the progress; its exception ends the fetching.
        at_once: Files to read at the same time.

    Raises:
        ModelError: A file cannot be read.
        LibraryError: A package is missing.
    """
    key, patience, say = shown(url), Patience(timeout or DEFAULT_TIMEOUT), say or (lambda _: None)
    with _lock:
        answer = _answers.get(key)
        if answer is not None and url == key:
            # a plan names its model without credentials
            url = answer.url
        mine = _locks.setdefault(key, threading.Lock())
    with _alone(mine, key, patience, say):
        answer = _answers.get(key)
        if (
            answer is not None
            and answer.url == url
            and time.monotonic() - answer.asked < _BELIEVED
            and _are_there(answer)
        ):
            return answer.files
        files = _fetch(addresses(url), patience, say, at_once)
        with _lock:
            _answers.pop(key, None)
            _answers[key] = _Answer(url, files, time.monotonic())
            while len(_answers) > _MOST_ANSWERS:
                del _answers[next(iter(_answers))]
        return files


@contextmanager
def _alone(mine: threading.Lock, name: str, patience: Patience, say: Say) -> Iterator[None]:
    """Wait until no other thread fetches the same URL."""
    while not mine.acquire(timeout=max(0.0, min(_LOOK, patience.left))):
        patience.check(name)
        say(Fetching("fetching the model's header", 0.0))
    try:
        yield
    finally:
        mine.release()


def beginning(url: str, most: int, *, timeout: float | None = None) -> bytes:
    """Return the first ``most`` bytes of the file at ``url``, or all of a smaller one. Raises like ``fetched``."""
    place, patience = addresses(url)[0], Patience(timeout or DEFAULT_TIMEOUT)
    ranges = _ranges(place, _headers() if place.is_hub else {}, patience)
    (part,) = _in_parallel(lambda _: ranges.read(0, most), range(1), patience, [place], lambda done: None, 1)
    return part.data


def forget() -> None:
    """Forget all answers."""
    _answers.clear()


def _are_there(answer: _Answer) -> bool:
    return use(answer.files)


def _fetch(model: Sequence[Address], patience: Patience, say: Say, at_once: int | None = None) -> tuple[Path, ...]:
    entry = newest(model)
    if model[0].is_hub and _is_offline():
        return _without_asking(model, entry)
    headers = _headers() if any(address.is_hub for address in model) else {}
    amounts = _Amounts(model, say)

    def read(index: int) -> StoredHeader | None:
        address = model[index]
        # text after a ? may be a signature, and is not stored; the same address may mean another file
        is_same = address.is_hub or "?" not in address.url
        tag = entry.files[index].tag if entry is not None and is_same else ""
        first = _FIRST_OF_OTHERS if index else _FIRST_OF_FIRST
        try:
            count = None if index else len(model)
            return _header(address, _ranges(address, headers, patience), first, tag, amounts.of(index), count)
        except Unchanged:
            return None

    every = range(len(model))
    # what its first file does not say that it has is not asked for
    parts = [every] if entry is not None else [every[:1], every[1:]]
    found = [
        each for part in parts for each in _in_parallel(read, part, patience, model, amounts.show, at_once or _AT_ONCE)
    ]
    if entry is not None and not any(found):
        files = entry
    else:
        files = keep(model, [_new_or_kept(each, entry, i, model) for i, each in enumerate(found)])
    for path, address in zip(files.paths, model, strict=True):
        source.call(path, address.shown)
    return files.paths


def _is_offline() -> bool:
    """Return whether the hub may not be asked (``HF_HUB_OFFLINE``)."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def _without_asking(model: Sequence[Address], entry: Entry | None) -> tuple[Path, ...]:
    if entry is None:
        raise ModelError(
            f"{model[0].shown}: HF_HUB_OFFLINE is set, and its header was not fetched before: unset it, or give a file "
            "of this machine"
        )
    for path, address in zip(entry.paths, model, strict=True):
        source.call(path, address.shown)
    return entry.paths


def _new_or_kept(
    fetched: StoredHeader | None, entry: Entry | None, index: int, model: Sequence[Address]
) -> StoredHeader:
    if fetched is not None:
        return fetched
    assert entry is not None
    try:
        return entry.header(index)
    except OSError:
        raise changed(model[index].shown) from None


def _headers() -> dict[str, str]:
    from fitter.model.files.http_ranges import hub_headers

    return hub_headers()


def _ranges(address: Address, headers: dict[str, str], patience: Patience) -> Ranges:
    if not address.is_http:
        return FsspecRanges(address)
    from fitter.model.files.http_ranges import HttpRanges

    return HttpRanges(address, headers if address.is_hub else {}, patience)


def _header(
    address: Address,
    ranges: Ranges,
    first: int,
    known: str,
    report: Callable[[int, int], None],
    count: int | None,
) -> StoredHeader:
    """The header of one file, which is to say that the model has ``count`` of them, if that is known.

    Raises ``ModelError``, and ``Unchanged`` where its tag is still ``known``.
    """
    part = ranges.read(0, first, known)
    source.check_beginning(address.shown, part.data[:8])
    header = HeaderLength(part.file_bytes)
    try:
        header.add(part.data)
        while header.missing:
            report(len(header.data), header.expected)
            more = ranges.read(len(header.data), header.missing)
            if (more.file_bytes, more.tag) != (part.file_bytes, part.tag):
                raise changed(address.shown)
            if not more.data:
                raise Damaged
            header.add(more.data)
    except Damaged:
        raise ModelError(f"{address.shown}: its header is truncated or damaged; {source.ASK}") from None
    except TooLong:
        raise ModelError(
            f"{address.shown}: its header has more than {human(LONGEST)}, which that of no model has; take another file"
        ) from None
    if count is not None and count > 1 and header.split_count != count:
        raise ModelError(source.another_count(address.shown, header.split_count, count, source.ASK))
    report(len(header.data), len(header.data))
    return StoredHeader(address.name, part.tag, part.file_bytes, header.whole)


class _Amounts:
    """Fetched and expected bytes of each file's header, reported by several threads."""

    def __init__(self, model: Sequence[Address], say: Say) -> None:
        self._have = [(0, 0)] * len(model)
        self._say = say

    def of(self, index: int) -> Callable[[int, int], None]:
        """Return a function for the fetched and expected bytes of a file."""

        def report(have: int, expected: int) -> None:
            self._have[index] = (have, expected)
            if sum(have for have, _ in self._have) > LONGEST:
                raise TooLong

        return report

    def show(self, done: int) -> None:
        """Report the progress, with ``done`` files."""
        count, here = len(self._have), sum(have for have, _ in self._have)
        lengths = [expected for _, expected in self._have if expected]
        every = sum(lengths) + (count - len(lengths)) * (min(lengths) if lengths else 1)
        of = f"{done} of {count} files, " if count > 1 else ""
        self._say(Fetching(f"fetching the model's header: {of}{human(here)}", min(1.0, here / every) if every else 0.0))


def _in_parallel(
    read: Callable[[int], _T],
    files: range,
    patience: Patience,
    model: Sequence[Address],
    show: Callable[[int], None],
    at_once: int,
) -> list[_T]:
    """Call ``read`` for each of the ``files``, several at once; the first error ends all."""
    read_headers: dict[int, _T] = {}
    left = iter(files)
    results: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                index = next(left, None)
            if index is None:
                return
            try:
                read_headers[index] = read(index)
                results.put((index, None))
            except BaseException as error:
                results.put((index, error))
                return

    if sum(thread.name == READER for thread in threading.enumerate()) >= MOST_READERS:
        raise ModelError(f"{model[0].shown}: too many headers are being fetched: try again later")
    for _ in range(min(at_once, len(files))):
        # not joined at the end, because resolving a name cannot be interrupted
        threading.Thread(target=work, name=READER, daemon=True).start()
    done = files.start
    try:
        while done < files.stop:
            show(done)
            try:
                index, error = results.get(timeout=max(0.0, min(_LOOK, patience.left)))
            except queue.Empty:
                patience.check(model[0].shown)
                continue
            if isinstance(error, (FitterError, Unchanged)):
                raise error
            if error is not None:
                said = without_secrets(f"{type(error).__name__}: {error}", model[index].url)
                raise ModelError(f"{model[index].shown} cannot be read: {said}") from None
            done += 1
        if any(read_headers.values()):
            show(done)
    except BaseException:
        patience.stop()
        raise
    return [read_headers[index] for index in files]


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
