"""What a plan says, part by part: the model, what is used of each device and of the host, and what is wrong. Bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fitter.llama.types import Row
from fitter.model.header import Model


@dataclass(frozen=True)
class ModelSummary:
    """What the plan is for. ``bytes``: all tensors of all split files."""

    path: str
    name: str
    architecture: str
    bytes: int

    @classmethod
    def of(cls, model: Model) -> ModelSummary:
        """What a plan says of ``model``."""
        return cls(str(model.path), model.name, model.architecture, model.bytes)


@dataclass(frozen=True)
class SharedUse:
    """What something beside the model takes of the same memory, in a plan.

    ``kind``: ``projector``, ``draft``, ``mtp``, ``lora`` or ``reserve``. ``name``: its file, or what it is reserved
    for. ``rows``: by device or host, ``device`` being ``None`` on the host. ``arguments`` are llama-server's for it,
    which take what was measured.
    """

    kind: str
    name: str
    rows: tuple[Row, ...]
    arguments: tuple[str, ...] = ()

    def on(self, device: str | None) -> int:
        """Bytes on a device, or on the host (``None``)."""
        return sum(row.used for row in self.rows if row.device == device)


@dataclass(frozen=True)
class DeviceUse:
    """What a plan takes of one device, by llama.cpp's measurement; ``shared`` is what else is there (``SharedUse``)."""

    name: str
    description: str
    total: int
    free: int
    margin: int
    model: int
    context: int
    compute: int
    shared: int = 0

    @property
    def used(self) -> int:
        """Bytes that llama.cpp allocates there, and what shares the device with it."""
        return self.model + self.context + self.compute + self.shared

    @property
    def left(self) -> int:
        """Free bytes less used ones; negative where the plan does not fit."""
        return self.free - self.used

    @property
    def fits(self) -> bool:
        """Whether at least the margin is left."""
        return self.left >= self.margin


@dataclass(frozen=True)
class HostUse:
    """What a plan takes of host memory. ``total`` and ``free`` are ``None`` where the host is unlimited.

    ``shared`` is what else is there (``SharedUse``).
    """

    total: int | None
    free: int | None
    margin: int
    model: int
    context: int
    compute: int
    shared: int = 0

    @property
    def used(self) -> int:
        """Bytes that llama.cpp allocates there, every host buffer type counted, and what shares it."""
        return self.model + self.context + self.compute + self.shared

    @property
    def left(self) -> int | None:
        """Free bytes less used ones, ``None`` where the host is unlimited."""
        return None if self.free is None else self.free - self.used

    @property
    def fits(self) -> bool:
        """Whether at least the margin is left."""
        return self.left is None or self.left >= self.margin


@dataclass(frozen=True)
class Problem:
    """Why a plan does not fit: ``missing`` bytes on ``device`` (a device's name, or ``host``)."""

    device: str
    missing: int
    message: str


@dataclass(frozen=True)
class LeftOut:
    """A device that a plan puts nothing on, whatever its speed. ``reason``: ``margin``, which leaves no room there."""

    device: str
    reason: str
    message: str


@dataclass(frozen=True)
class Search:
    """What finding the plan took: dummy loads (another context of a loaded model is none) and seconds.

    ``shared_loads`` are those of what shares the memory, counted apart. One that ``is_cut_short`` ended with the time
    limit, so that there may be a better plan.
    """

    dummy_loads: int
    seconds: float
    shared_loads: int = 0
    is_cut_short: bool = False


@dataclass(frozen=True)
class FileStamp:
    """What a file of the model was when it was read: bytes, and nanoseconds of its last change."""

    path: str
    bytes: int
    changed: int


def stamp_of(path: str | os.PathLike[str]) -> FileStamp:
    """The stamp of the file at ``path`` as it is now. Raises ``OSError``."""
    found = os.stat(path)
    return FileStamp(os.fspath(path), found.st_size, found.st_mtime_ns)
