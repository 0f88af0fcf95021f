"""Files and directories of fitter: what it reads, and writes whole or not at all, its cache and temporary directories.

The cache is a directory that only this user may write. Temporary directories are in one directory of the user. A
process locks each of its own; the directories of a killed process are removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fitter import system
from fitter.errors import AnswerError
from fitter.text import printable


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError`` (a ``TOMLDecodeError``) for anything else."""
    # Imported when it is needed: it takes milliseconds.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def read_data(module_file: str, name: str = "") -> dict[str, Any]:
    """Read the data file beside a module, given as its ``__file__``; by default the file of the module's own name."""
    path = Path(module_file)
    return parse_toml((path.with_name(name) if name else path.with_suffix(".toml")).read_text(encoding="utf-8"))


_CHARACTERS = r'[\x00-\x1f"%*/:<>?\\|]|[. ]$'
_DEVICES = r"(?i:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[0-9\u00b9\u00b2\u00b3])(?= *(?:\.|$))"
"""Names that are devices on Windows, with any ending (Microsoft Learn: Naming Files, Paths, and Namespaces)."""


def portable(name: str) -> str:
    """Write ``name`` so that every system takes it for a file: other characters as in an address, such as ``%3A``.

    Different names stay different.
    """
    name = re.sub(_CHARACTERS, lambda found: f"%{ord(found[0]):02X}", name)
    return f"%{ord(name[0]):02X}{name[1:]}" if re.match(_DEVICES, name) else name


_LONGEST_TEXT = 64 * 2**20
"""No text that people or fitter write is that long; a model is."""

_ABANDONED_SECONDS = 60.0
"""The age of a partial file whose writer is taken for dead."""


def read_regular(path: Path) -> bytes:
    """Read a regular file. Raises ``OSError``, also for a link, a pipe or a device."""
    with _opened(path, os.O_RDONLY) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a text file. Raises ``OSError``, and ``ValueError`` for a file that is not UTF-8 or is far too long."""
    with path.open("rb") as file:
        data = file.read(_LONGEST_TEXT + 1)
    if len(data) > _LONGEST_TEXT:
        raise ValueError
    return data.decode()


def identity(path: str) -> tuple[int, ...]:
    """Return a value that changes with the file; empty if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_dev, status.st_ino)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces the file at ``path`` when the block ends. Raises ``OSError``.

    After an error everything is as before. Until the end the new file has a name that nobody can guess.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.ITSELF, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
        system.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def replace_document(path: Path, content: bytes) -> None:
    """Replace a file of the user: links and permissions stay, and the content survives a loss of power.

    A killed process leaves a partial file, which a later call removes. A pipe or a device is written to.

    Raises:
        AnswerError: The file cannot be written; it is as before.
    """
    try:
        _replace_document(Path(os.path.realpath(path)), content)
    except OSError as error:
        text = str(path)
        name = printable(text if text.isprintable() else repr(text))
        raise AnswerError(f"{name} cannot be written: {error.strerror or error}") from None


def _replace_document(target: Path, content: bytes) -> None:
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    for left in target.parent.glob(f".{target.name}.*.partial"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                left.unlink()
    with replacing(target) as file:
        with contextlib.suppress(FileNotFoundError):
            system.copy_mode(target, file.fileno())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    # The rename itself survives a loss of power only then; some file systems cannot do this.
    system.sync_folder(target.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file that ``write_json`` wrote. Raises ``OSError``, ``ValueError`` and ``RecursionError``."""
    import json

    return json.loads(read_regular(path))


def write_json(path: Path, document: object) -> None:
    """Replace the JSON file at ``path``, in a private directory. Raises ``OSError``."""
    import json

    make_private(path.parent)
    with replacing(path) as file:
        file.write(json.dumps(document, indent=1).encode() + b"\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock of the file at ``path``, and hold it in the block. Raises ``OSError``."""
    with _opened(path, os.O_RDWR | os.O_CREAT) as file:
        system.lock_file(file, waits=True)
        yield


def make_private(folder: Path) -> None:
    """Make a directory and its missing parents, which only this user may read. Raises ``OSError``."""
    try:
        folder.mkdir(0o700, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def _opened(path: Path, flags: int) -> BinaryIO:
    descriptor = os.open(path, flags | system.ITSELF, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "r+b" if flags & os.O_RDWR else "rb")


_directories: set[TemporaryDirectory] = set()
"""Directories of this process."""


class TemporaryDirectory:
    """A new directory that only this user can read, removed by ``cleanup`` or at the end of a ``with`` block.

    Raises ``OSError`` if it cannot be made.
    """

    def __init__(self) -> None:
        import tempfile

        place = Path(tempfile.gettempdir())
        locked: tuple[str, system.Folder | None] | None = None
        while locked is None:
            self._above = _users_directory(place)
            if self._above is None:
                # somebody else has the name
                locked = tempfile.mkdtemp(prefix="fitter-"), None
            else:
                _sweep(self._above)
                locked = _locked_folder(self._above)
        self.name, self._lock = locked
        self._owner = os.getpid()
        _directories.add(self)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the directory once, unless this process is a fork of its maker."""
        if self not in _directories:
            return
        _directories.discard(self)
        if self._owner == os.getpid():
            _remove(self.name)
            if self._above is not None:
                with contextlib.suppress(OSError):
                    # unless there are others
                    self._above.rmdir()
        if self._lock is not None:
            self._lock.close()


def remove_temporary() -> None:
    """Remove all directories of this process, which ends."""
    for directory in tuple(_directories):
        directory.cleanup()


atexit.register(remove_temporary)


def _users_directory(place: Path) -> Path | None:
    """Make the user's directory in ``place``; ``None`` if it belongs to somebody else, or is a link."""
    above = place / f"fitter-{system.user()}"
    while True:
        with contextlib.suppress(FileExistsError):
            above.mkdir(0o700)
        # another process removes it once it is empty
        with contextlib.suppress(FileNotFoundError):
            return above if system.is_private(above.lstat()) else None


def _locked_folder(above: Path) -> tuple[str, system.Folder] | None:
    """Make a new directory and lock it; ``None`` if another process has removed it or ``above``."""
    path = above / os.urandom(8).hex()
    try:
        path.mkdir(0o700)
        lock = system.Folder(path)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        # without locks nothing is swept
        lock.lock(waits=True)
    if path.is_dir():
        return str(path), lock
    lock.close()
    return None


def _sweep(above: Path) -> None:
    """Remove directories whose process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(above):
            with contextlib.suppress(OSError):
                lock = system.Folder(above / name)
                try:
                    lock.lock()
                    _remove(str(above / name))
                finally:
                    lock.close()


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


_replacements: dict[Path, TemporaryDirectory] = {}
"""Temporary directories that replace cache directories that others may write."""


def cache_folder(name: str = "") -> Path:
    """Name ``llama-fitter/name`` in the platform's cache directory (``XDG_CACHE_HOME``).

    If somebody else may write there, a ``UserWarning`` says so once, and a temporary directory of this process replaces
    it.
    """
    place = _place()
    if place not in _replacements:
        problem = _problem(place)
        if not problem:
            return place / name
        warnings.warn(problem, stacklevel=2)
        _replacements[place] = TemporaryDirectory()
    return Path(_replacements[place].name, name)


def replace_cache(error: OSError) -> str:
    """Replace the cache directory, where ``error`` was met, by a temporary directory of this process.

    Returns a sentence to warn with; '' if it was one already. Raises ``OSError`` if there is no room for one.
    """
    place = _place()
    if place in _replacements:
        return ""
    _replacements[place] = TemporaryDirectory()
    return f"{place} cannot be written ({error.strerror}), so {_OTHER}"


def config_folder() -> Path:
    """Name ``llama-fitter`` in the platform's configuration directory (``XDG_CONFIG_HOME``)."""
    from platformdirs import user_config_path

    return user_config_path("llama-fitter", appauthor=False)


def _place() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("llama-fitter", appauthor=False)


def is_lasting() -> bool:
    """Whether the cache directory outlives this process."""
    return cache_folder() not in {Path(directory.name) for directory in _replacements.values()}


_OTHER = "nothing is kept there: set XDG_CACHE_HOME to a directory of your own"


def _problem(place: Path) -> str:
    """Say why a cache directory is not used, and the way out; '' if it is used, or does not exist yet."""
    if not system.HAS_OWNERS:
        return ""
    try:
        parent = place.parent.stat()
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            return f"{place.parent} may be written by others, so {_OTHER}"
        status = place.stat()
        if not {place.lstat().st_uid, status.st_uid} <= {0, system.user()}:
            return f"{place} belongs to somebody else, so {_OTHER}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} may be written by others, so nothing is kept there: chmod 700 {place}"
    except OSError:
        # The code that opens the directory reports its error.
        return ""
    return ""
