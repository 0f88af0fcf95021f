"""Read parts of remote files by fsspec; ``http_ranges`` reads those of web servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fitter.errors import LibraryError, ModelError, Remedy
from fitter.installation import install_command
from fitter.model.files.addresses import EXTRA, Address, without_secrets

MORE_TIME = Remedy("give it more time (--timeout)", "timeout", "raise")


@dataclass(frozen=True)
class Part:
    """Some bytes of a file, its whole length, and a tag that changes with its content (empty if unknown)."""

    data: bytes
    file_bytes: int
    tag: str


class Unchanged(Exception):
    """The file still has the known tag."""


class Ranges(Protocol):
    """A file whose parts can be read."""

    def read(self, start: int, size: int, known: str = "") -> Part:
        """Read at most ``size`` bytes from ``start``. Raises ``Unchanged`` if the tag is still ``known``.

        Raises ``ModelError`` if it cannot be read.
        """


@dataclass
class Patience:
    """A time limit in seconds, and the connections to close when nobody wants the answer any more."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _closers: set[Callable[[], None]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self.began + self.seconds - time.monotonic()

    def check(self, name: str) -> None:
        """Raise ``ModelError`` after the time limit, or if nobody wants the answer any more."""
        if self.left <= 0 or self._stopped.is_set():
            raise self.error(name)

    def error(self, name: str) -> ModelError:
        """Make the error after the time limit."""
        return ModelError(f"{name}: its header did not arrive within {self.seconds:g} s: ", MORE_TIME)

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the time limit."""
        self._stopped.wait(max(0.0, min(seconds, self.left)))

    def open(self, close: Callable[[], None]) -> None:
        """Register ``close``, which ``stop`` calls."""
        with self._lock:
            self._closers.add(close)
        if self._stopped.is_set():
            close()

    def done(self, close: Callable[[], None]) -> None:
        """Remove ``close``: its connection is closed."""
        with self._lock:
            self._closers.discard(close)

    def stop(self) -> None:
        """Close all open connections."""
        self._stopped.set()
        with self._lock:
            waiting = tuple(self._closers)
        for close in waiting:
            close()


class FsspecRanges:
    """A file that fsspec reads: in a bucket, on an FTP server, in a zip file, and so on."""

    def __init__(self, address: Address) -> None:
        """Raises ``LibraryError`` if a package is missing, ``ModelError`` for an unknown scheme."""
        self._address = address
        try:
            import fsspec
        except ImportError:
            raise LibraryError(
                f"{address.shown} is read with fsspec, which is not installed: {install_command(EXTRA)}"
            ) from None
        try:
            self._files, self._path = fsspec.core.url_to_fs(address.url)
        except ImportError as error:
            raise LibraryError(f"{address.shown} cannot be read: {_error_text(error, address)}") from None
        except Exception as error:
            # file systems have their own classes of errors
            raise ModelError(f"{address.shown} cannot be read: {_error_text(error, address)}") from None
        self._tag = ""

    def read(self, start: int, size: int, known: str = "") -> Part:
        """Read as ``Ranges``; the tag is what the file system tells about the content."""
        address = self._address
        try:
            self._files.invalidate_cache()
            info: dict[str, Any] = self._files.info(self._path)
            file_bytes, tag = info.get("size"), str(self._files.ukey(self._path))
            if info.get("type") == "directory":
                raise ModelError(f"{address.shown} is a directory; give the address of a GGUF file in it")
            if not isinstance(file_bytes, int):
                raise ModelError(f"{address.shown}: nobody says how long it is, so no part of it can be read")
            if known and tag == known:
                raise Unchanged
            data = self._files.cat_file(self._path, start=start, end=min(start + size, file_bytes))
        except (ModelError, Unchanged):
            raise
        except FileNotFoundError:
            raise ModelError(f"{address.shown}: no such file; check the address") from None
        except Exception as error:
            raise ModelError(f"{address.shown} cannot be read: {_error_text(error, address)}") from None
        if self._tag not in ("", tag):
            raise changed(address.shown)
        self._tag = tag
        return Part(bytes(data)[:size], file_bytes, tag)


def changed(name: str) -> ModelError:
    """Make the error for a file that changed during the reading."""
    return ModelError(f"{name} has changed while its header was read: try again")


def _error_text(error: Exception, address: Address) -> str:
    """Return the text of a file system's error, without possible secrets."""
    return without_secrets(str(error), address.url) or type(error).__name__
