"""``fitter.lock``: what every case took when it was accepted. Bytes.

Nothing in it depends on the machine or the time, so that the same cases make the same file everywhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitter.errors import AnswerError, FitterError, UsageError
from fitter.llama import wire
from fitter.llama.types import Params
from fitter.model.source import show
from fitter.regression.cases import Setting
from fitter.regression.toml import read_toml
from fitter.text import printable

LOCK_FILE = "fitter.lock"
SCHEMA = 1

_ABANDONED_SECONDS = 60.0
_EXACT = ("settings", "params")
"""What is compared with fitter.toml, and given to llama.cpp again."""


_HEAD = """\
# What llama.cpp needs for the cases of fitter.toml, by its own measure; sizes in bytes.
# Written by 'fitter lock', compared by 'fitter check'. Edit fitter.toml, not this.
"""


@dataclass(frozen=True)
class Memory:
    """Bytes of one buffer type: weights, KV cache and recurrent state, compute buffers."""

    model: int
    context: int
    compute: int

    @property
    def used(self) -> int:
        """Bytes of all three kinds."""
        return self.model + self.context + self.compute


@dataclass(frozen=True)
class LockedDevice:
    """A device and what the plan takes of it, by buffer type; ``shared`` is what else is there (``SharedUse``)."""

    description: str
    total: int
    free: int
    margin: int
    memory: Mapping[str, Memory] = field(default_factory=dict)
    shared: int = 0

    @property
    def used(self) -> int:
        """Bytes of all buffer types, and what shares the device with them."""
        return self.shared + sum(memory.used for memory in self.memory.values())

    @property
    def missing(self) -> int:
        """Bytes that the plan lacks there; 0 or less where it fits."""
        return self.used + self.margin - self.free


@dataclass(frozen=True)
class LockedHost:
    """What the plan takes of host memory, by buffer type. ``free`` is ``None`` where the host is unlimited."""

    margin: int
    free: int | None = None
    memory: Mapping[str, Memory] = field(default_factory=dict)
    shared: int = 0

    @property
    def used(self) -> int:
        """Bytes of all buffer types, and what shares the host with them."""
        return self.shared + sum(memory.used for memory in self.memory.values())

    @property
    def missing(self) -> int:
        """Bytes that the plan lacks there; 0 or less where it fits."""
        return 0 if self.free is None else self.used + self.margin - self.free


@dataclass(frozen=True)
class LockedModel:
    """The model. ``file`` is the name of its first file without the directory, ``bytes`` is of all tensors.

    ``header`` is the digest of the headers of all its files: metadata with the tokenizer, and tensors. ``header_bytes``
    and ``file_bytes`` have the length of each file's header and of each file. ``tensors`` has the type of every tensor
    (see ``fitter.regression.headers``).
    """

    file: str
    name: str
    architecture: str
    bytes: int
    header: str
    header_bytes: tuple[int, ...]
    file_bytes: tuple[int, ...]
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class LockedSpeed:
    """Tokens per second that the plan is estimated to reach."""

    prompt_tokens_per_second: float
    generation_tokens_per_second: float


@dataclass(frozen=True)
class Snapshot:
    """What one case takes. ``params`` are the fitted ones, complete; ``n_ctx`` is the context that llama.cpp makes.

    ``fitter`` and ``llama_cpp`` are the versions that measured it; ``settings`` are those of ``fitter.toml``.
    """

    fits: bool
    n_ctx: int
    fitter: str
    llama_cpp: str
    settings: Mapping[str, Setting]
    model: LockedModel
    params: Params
    devices: Mapping[str, LockedDevice]
    host: LockedHost
    estimate: LockedSpeed | None = None


@dataclass(frozen=True)
class Lock:
    """The snapshots of all cases by name."""

    cases: Mapping[str, Snapshot]


def read_lock(path: Path) -> Lock:
    """The lock in ``path``. Raises ``UsageError`` where it is missing, damaged, or written by a later fitter."""
    check_is_file(path)
    document = read_toml(path, "run 'fitter lock' to make it")
    schema = document.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise UsageError(f"{show(path)} is not a lock that fitter wrote: run 'fitter lock' to make one")
    if schema > SCHEMA:
        raise UsageError(f"{show(path)} is of schema {schema}, and this fitter reads {SCHEMA}: install a newer fitter")
    cases = document.get("cases", {})
    if schema < 1 or document.keys() - {"schema", "cases"} or not isinstance(cases, dict):
        raise UsageError(f"{show(path)} is damaged: run 'fitter lock' to make it again")
    return Lock({name: _snapshot(path, name, table) for name, table in sorted(cases.items())})


def check_is_file(path: Path, error: type[FitterError] = UsageError, what: str = "is") -> None:
    """Raise ``error`` where a directory, a device or a pipe is in the place of a lock: reading one may wait forever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else")
        raise error(f"{show(path)} {what} {kind}, and a lock is a file: give it another name with --lock")


def check_can_be_written(path: Path) -> None:
    """Raise ``AnswerError`` where no lock can stand."""
    check_is_file(path, AnswerError, "cannot be written: it is")


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def write_lock(path: Path, lock: Lock) -> None:
    """Put ``lock`` in the place of ``path``, all of it or nothing. Raises ``AnswerError`` where that is impossible."""
    check_can_be_written(path)
    text = dumps(lock)
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise AnswerError(f"{show(path)} cannot be written: {error.strerror or error}") from None


def dumps(lock: Lock) -> str:
    """The lock as text: cases by name, keys in one order."""
    import tomli_w

    cases = {name: _document(snapshot) for name, snapshot in sorted(lock.cases.items())}
    return _HEAD + "\n" + tomli_w.dumps({"schema": SCHEMA, "cases": cases})


def replace_file(path: Path, content: bytes, before_rename: Callable[[], object] = lambda: None) -> None:
    """Write a file that is at every moment either the old one or all of the other. Raises ``OSError``.

    What a process that is killed leaves behind is a file of another name beside it, which a later writer removes.
    A pipe or a device is written to.
    """
    import tempfile

    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    for left in target.parent.glob(f".{target.name}.*.partial"):
        with contextlib.suppress(OSError):
            # one that is younger may still be written
            if left.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                left.unlink()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _mode(target))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        # The rename itself outlives a loss of power only then; some file systems know no such thing.
        with contextlib.suppress(OSError):
            os.fsync(directory)
    finally:
        os.close(directory)


def _mode(path: Path) -> int:
    """The permissions of a file that is there, or those that one gets that is made now."""
    try:
        return path.stat().st_mode & 0o7777
    except OSError:
        mask = os.umask(0o022)
        os.umask(mask)
        return 0o666 & ~mask


def _shown(value: Any) -> Any:
    """What was read, fit to be shown."""
    if isinstance(value, dict):
        return {printable(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_shown, value))
    return printable(value) if isinstance(value, str) else value


def _snapshot(path: Path, name: str, table: Any) -> Snapshot:
    if isinstance(table, dict):
        table = {key: item if key in _EXACT else _shown(item) for key, item in table.items()}
    try:
        snapshot: Snapshot = wire.decode(Snapshot, table)
    except (TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"{show(path)}: the case '{name}' is damaged ({why[:120]}): run 'fitter lock --update {name}'"
        ) from None
    return snapshot


def _document(snapshot: Snapshot) -> dict[str, Any]:
    document: dict[str, Any] = _without_nothing(wire.encode(snapshot))
    return document


def _without_nothing(value: Any) -> Any:
    """TOML has no word for ``None``; memory that nothing shares needs none, nor what no parameter is in."""
    if isinstance(value, dict):
        nothing: tuple[tuple[str, Any], ...] = (("shared", 0), ("more", []))
        left = {key: item for key, item in value.items() if item is not None and (key, item) not in nothing}
        return {key: _without_nothing(item) for key, item in left.items()}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value
