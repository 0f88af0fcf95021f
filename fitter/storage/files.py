"""Read files: fitter's own, the data beside modules, and TOML of users; and replace a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
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


def read(path: Path) -> bytes:
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

    return json.loads(read(path))


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
