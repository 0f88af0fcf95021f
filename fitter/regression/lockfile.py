"""``fitter.lock``: the memory of every case when it was accepted, and what its model is known by. Sizes in bytes.

Nothing in it depends on the machine or the time, so the same cases make the same file everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from fitter import system
from fitter.errors import AnswerError, FitterError, ModelError, UsageError
from fitter.llama.processes import wire
from fitter.llama.types import Params, TensorInfo
from fitter.model.files.source import show
from fitter.model.tensors import split_name
from fitter.regression.cases import CaseValue
from fitter.regression.trust import read_toml
from fitter.storage import replace_document
from fitter.text import printable

LOCK_FILE = "fitter.lock"
SCHEMA = 1

_TICK = 0.05
"""Seconds between two tries."""
_EXACT = ("settings", "params")
"""Keys whose text must stay exact: they are compared with fitter.toml and passed to llama.cpp again."""


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
    """A device and the plan's memory on it, by buffer type; ``shared``: bytes of ``SharedUse``."""

    description: str
    total: int
    free: int
    margin: int
    memory: Mapping[str, Memory] = field(default_factory=dict)
    shared: int = 0

    @property
    def used(self) -> int:
        """Bytes of all buffer types, and of draft models, vision and LoRA."""
        return self.shared + sum(memory.used for memory in self.memory.values())

    @property
    def missing(self) -> int:
        """Bytes that the plan lacks there; 0 or less if it fits."""
        return self.used + self.margin - self.free


@dataclass(frozen=True)
class LockedHost:
    """The plan's memory on the host, by buffer type. ``free`` is ``None`` if the host is unlimited.

    ``later``: bytes that its program takes after the load at most.
    """

    margin: int
    free: int | None = None
    memory: Mapping[str, Memory] = field(default_factory=dict)
    shared: int = 0
    later: int = 0

    @property
    def used(self) -> int:
        """Bytes of all buffer types, of draft models, vision and LoRA, and of later memory."""
        return self.shared + self.later + sum(memory.used for memory in self.memory.values())

    @property
    def missing(self) -> int:
        """Bytes that the plan lacks there; 0 or less if it fits."""
        return 0 if self.free is None else self.used + self.margin - self.free


@dataclass(frozen=True)
class LockedPool:
    """Memory that devices share with the host, and the bytes that the plan takes of it."""

    total: int
    free: int
    margin: int
    used: int

    @property
    def missing(self) -> int:
        """Bytes that the plan lacks there; 0 or less if it fits."""
        return self.used + self.margin - self.free


@dataclass(frozen=True)
class LockedModel:
    """The model. ``file``: the name of its first file, without directory. ``bytes``: the size of all tensors.

    ``header``: the digest of the headers of all files, with tokenizer and tensors. ``header_bytes``, ``file_bytes``:
    the length of each file's header, and of each file. ``tensors``: the type of every tensor (see
    ``summarize_types``).
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
    """The plan's estimated speed in tokens per second."""

    prompt_tokens_per_second: float
    generation_tokens_per_second: float


@dataclass(frozen=True)
class Snapshot:
    """The memory of one case. ``params``: all fitted parameters. ``n_ctx``: the context that llama.cpp makes.

    ``fitter``, ``llama_cpp``: the versions that measured it. ``settings``: those in ``fitter.toml``. ``cpu``: the file
    of the CPU backend that measured it, empty where llama.cpp has only one.
    """

    fits: bool
    n_ctx: int
    fitter: str
    llama_cpp: str
    settings: Mapping[str, CaseValue]
    model: LockedModel
    params: Params
    devices: Mapping[str, LockedDevice]
    host: LockedHost
    estimate: LockedSpeed | None = None
    cpu: str = ""
    pools: Mapping[str, LockedPool] = field(default_factory=dict)


@dataclass(frozen=True)
class LockedMember:
    """A model of a fleet. ``keywords``: those of ``fit`` that repeat its plan. ``needs``: its bytes by place."""

    keywords: Mapping[str, CaseValue]
    needs: Mapping[str, int]


@dataclass(frozen=True)
class LockedFleet:
    """The plan of a fleet. ``sets``: the names of the models that fit together."""

    sets: tuple[tuple[str, ...], ...]
    models: Mapping[str, LockedMember]


@dataclass(frozen=True)
class Lock:
    """The snapshots of all cases by name, and the fleet."""

    cases: Mapping[str, Snapshot]
    fleet: LockedFleet | None = None


def read_lock(path: Path) -> Lock:
    """Read the lock in ``path``. Raises ``UsageError`` if it is missing, damaged, or written by a newer fitter."""
    check_is_file(path)
    document = read_toml(path, "run 'fitter lock' to make it")
    schema = document.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise UsageError(f"{show(path)} is not a lock that fitter wrote: run 'fitter lock' to make one")
    if schema > SCHEMA:
        raise UsageError(
            f"{show(path)} has schema {schema}, but this fitter reads schema {SCHEMA}: install a newer fitter"
        )
    cases = document.get("cases", {})
    if schema < 1 or document.keys() - {"schema", "cases", "fleet"} or not isinstance(cases, dict):
        raise UsageError(f"{show(path)} is damaged: run 'fitter lock' to make it again")
    snapshots = {name: _snapshot(path, name, table) for name, table in sorted(cases.items())}
    return Lock(snapshots, _fleet(path, document["fleet"]) if "fleet" in document else None)


def _fleet(path: Path, table: Any) -> LockedFleet:
    try:
        if isinstance(table, dict):
            models = {
                name: {**_safe_value(model), "keywords": model.get("keywords")} if isinstance(model, dict) else model
                for name, model in table.get("models", {}).items()
            }
            table = {**table, "models": models}
        fleet: LockedFleet = wire.decode(LockedFleet, table)
        if any(name not in fleet.models for names in fleet.sets for name in names):
            raise TypeError("a set has a model that is not there")
    except (TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{show(path)}: the fleet is damaged ({why[:120]}): run 'fitter lock'") from None
    return fleet


def check_is_file(path: Path, error: type[FitterError] = UsageError, what: str = "is") -> None:
    """Raise ``error`` if ``path`` is a directory, a device or a pipe: reading from one may wait forever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else")
        raise error(f"{show(path)} {what} {kind}, but a lock must be a file: choose another path with --lock")


def check_can_be_written(path: Path) -> None:
    """Raise ``AnswerError`` if something that is not a file is in the place of the lock."""
    check_is_file(path, AnswerError, "cannot be written: it is")


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def write_lock(path: Path, lock: Lock) -> None:
    """Write ``lock`` to ``path``, all of it or nothing. Raises ``AnswerError`` if that fails."""
    check_can_be_written(path)
    replace_document(path, dumps(lock).encode())


@contextlib.contextmanager
def alone(path: Path, patience: float = 10.0) -> Iterator[None]:
    """Keep other processes from changing the lock at ``path`` between reading and writing it.

    Its directory is locked, which leaves no file behind. A change takes milliseconds: raises ``AnswerError`` if another
    process takes more than ``patience`` seconds.
    """
    try:
        directory = system.Folder(os.path.dirname(os.path.realpath(path)))
    except OSError:
        directory = None  # The code that writes the file reports the error.
    try:
        if directory is not None:
            _wait_for(directory, path, patience)
        yield
    finally:
        if directory is not None:
            directory.close()


def _wait_for(directory: system.Folder, path: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            directory.lock()
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AnswerError(
                    f"{show(path)} cannot be written: another process has locked its directory for {patience:.0f} "
                    "seconds: end that process, and try again"
                ) from None
            time.sleep(_TICK)
        except OSError:
            # a file system without locks
            return


def dumps(lock: Lock) -> str:
    """Write the lock as text: cases sorted by name, keys always in the same order."""
    import tomli_w

    cases = {name: _document(snapshot) for name, snapshot in sorted(lock.cases.items())}
    fleet = {} if lock.fleet is None else {"fleet": wire.encode(lock.fleet)}
    return _HEAD + "\n" + tomli_w.dumps({"schema": SCHEMA, "cases": cases, **fleet})


def _safe_value(value: Any) -> Any:
    """Make a value of the file safe to show."""
    if isinstance(value, dict):
        return {printable(key): _safe_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_safe_value, value))
    return printable(value) if isinstance(value, str) else value


def _snapshot(path: Path, name: str, table: Any) -> Snapshot:
    if isinstance(table, dict):
        table = {key: item if key in _EXACT else _safe_value(item) for key, item in table.items()}
    try:
        snapshot: Snapshot = wire.decode(Snapshot, table)
    except (TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"{show(path)}: the case '{name}' is damaged ({why[:120]}): run 'fitter lock --update {name}'"
        ) from None
    return snapshot


def _document(snapshot: Snapshot) -> dict[str, Any]:
    document: dict[str, Any] = without_nothing(wire.encode(snapshot))
    return document


def without_nothing(value: Any) -> Any:
    """Remove ``None``, which TOML cannot express, and defaults that most plans have."""
    if isinstance(value, dict):
        nothing: tuple[tuple[str, Any], ...] = (("shared", 0), ("later", 0), ("more", []), ("cpu", ""), ("pools", {}))
        left = {key: item for key, item in value.items() if item is not None and (key, item) not in nothing}
        return {key: without_nothing(item) for key, item in left.items()}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value


_ANY = "*"
"""Stands for the number of the layer."""
_MOST_LAYERS = 4096


def header_digest(files: Sequence[Path], header_bytes: Sequence[int]) -> str:
    """Compute a digest of the first ``header_bytes`` of each file. Raises ``ModelError`` if a file cannot be read."""
    total = hashlib.sha256()
    for path, size in zip(files, header_bytes, strict=True):
        try:
            with path.open("rb") as file:
                total.update(file.read(size))
        except OSError as error:
            raise ModelError(f"{show(path)} cannot be read: {error.strerror}") from None
    return f"sha256:{total.hexdigest()}"


def summarize_types(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Sum up types of tensors by name, with ``*`` for the layer: ``q4_K``, or ``q4_K 0-2,4-31; q8_0 3`` by layer.

    The names are made printable, since they are only compared and shown.
    """
    types: dict[str, list[tuple[int | None, str]]] = {}
    for tensor in tensors:
        name = printable(tensor.name)
        stack, layer, rest = split_name(name)
        key = name if layer is None else f"{stack}blk.{_ANY}.{rest}"
        types.setdefault(key, []).append((layer, tensor.type))
    return {key: _types(types[key]) for key in sorted(types)}


def expand_types(summary: Mapping[str, str]) -> dict[str, str]:
    """Read the type of every tensor by its name, from what ``summarize_types`` wrote; anything else is ignored."""
    tensors = {}
    for key, text in summary.items():
        for part in text.split("; "):
            kind, _, layers = part.partition(" ")
            if not layers:
                tensors[key] = kind
            for first, last in re.findall(r"([0-9]+)(?:-([0-9]+))?", layers):
                for layer in range(int(first), min(int(last or first), _MOST_LAYERS) + 1):
                    tensors[key.replace(_ANY, str(layer), 1)] = kind
    return tensors


def _types(tensors: Iterable[tuple[int | None, str]]) -> str:
    by_type: dict[str, list[int]] = {}
    for layer, kind in tensors:
        by_type.setdefault(kind, []).extend([] if layer is None else [layer])
    return "; ".join(f"{kind} {_ranges(by_type[kind])}".rstrip() for kind in sorted(by_type))


def _ranges(numbers: Iterable[int]) -> str:
    """``0-2,4`` for 0, 1, 2 and 4."""
    ranges = []
    # Consecutive numbers all have the same distance from their position in the list.
    for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        consecutive = [number for _, number in run]
        ranges.append(str(consecutive[0]) if len(consecutive) == 1 else f"{consecutive[0]}-{consecutive[-1]}")
    return ",".join(ranges)
