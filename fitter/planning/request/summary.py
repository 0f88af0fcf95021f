"""What a plan says, part by part: the model, what is used of each device and of the host, and what is wrong. Bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fitter.llama.types import Row
from fitter.model.header import Model


@dataclass(frozen=True)
class ModelSummary:
    """What the plan is for."""

    path: str
    """The path of the model, or its address without credentials; of the first file if it is split."""
    name: str
    """The name in its header."""
    architecture: str
    """llama.cpp's name of its architecture."""
    bytes: int
    """Bytes of all tensors of all split files."""

    @classmethod
    def of(cls, model: Model) -> ModelSummary:
        """What a plan says of ``model``."""
        return cls(model.called, model.name, model.architecture, model.bytes)


@dataclass(frozen=True)
class SharedUse:
    """What something beside the model takes of the same memory, in a plan."""

    kind: str
    """``projector``, ``draft``, ``mtp``, ``ngram``, ``lora`` or ``reserve``."""
    name: str
    """Its file, or what it is reserved for."""
    rows: tuple[Row, ...]
    """Bytes by device, ``device`` being ``None`` on the host."""
    arguments: tuple[str, ...] = ()
    """llama-server's arguments for it, which take what was measured."""

    def on(self, device: str | None) -> int:
        """Bytes on a device, or on the host (``None``)."""
        return sum(row.used for row in self.rows if row.device == device)


@dataclass(frozen=True)
class DeviceUse:
    """What a plan takes of one device, by llama.cpp's measurement."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """What the driver calls it."""
    total: int
    """Its memory in bytes."""
    free: int
    """What is free of it without the plan, in bytes."""
    margin: int
    """Bytes that must stay free."""
    model: int
    """Bytes of weights."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers."""
    shared: int = 0
    """Bytes of what is beside the model (``SharedUse``)."""

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
    """What a plan takes of host memory, every host buffer type counted."""

    total: int | None
    """Bytes of memory; ``None`` where the host is unlimited."""
    free: int | None
    """Bytes that are available without the plan; ``None`` where the host is unlimited."""
    margin: int
    """Bytes that must stay free."""
    model: int
    """Bytes of weights, mapped ones too."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers."""
    shared: int = 0
    """Bytes of what is beside the model (``SharedUse``)."""
    later: int = 0
    """Bytes that the program takes after the load at most (``Later``), as far as they have a limit."""

    @property
    def used(self) -> int:
        """Bytes that llama.cpp allocates there, every host buffer type counted, what shares it and what comes later."""
        return self.model + self.context + self.compute + self.shared + self.later

    @property
    def left(self) -> int | None:
        """Free bytes less used ones, ``None`` where the host is unlimited."""
        return None if self.free is None else self.free - self.used

    @property
    def fits(self) -> bool:
        """Whether at least the margin is left."""
        return self.left is None or self.left >= self.margin


@dataclass(frozen=True)
class Setting:
    """A setting of the system that lets a GPU use more of the memory that it shares with the host."""

    command: str
    """What makes it: a command, or what to add to one."""
    bytes: int
    """What the GPU may then use."""
    message: str
    """One sentence: what it would be good for, how long it holds, what it risks."""


@dataclass(frozen=True)
class PoolUse:
    """What a plan takes of memory that devices and the host share."""

    name: str
    """What shares it, such as ``MTL0+host``."""
    total: int
    """Bytes of memory."""
    free: int
    """Bytes that are available to all of them without the plan."""
    margin: int
    """Bytes that must stay free."""
    used: int
    """Bytes that the plan takes on its devices and on the host together, weights that both map counted once."""
    members: tuple[str, ...]
    """Its devices and ``host``."""
    mapped_twice: int = 0
    """Bytes of weights that both a device and the host have, and that are the same pages of the model's file."""
    mapped_between: int = 0
    """Bytes of the host's weights that lie between those of a device in the file, so that it maps them as well: they
    are in the margin of the device."""
    load_mode: str | None = None
    """``none`` where the file must not be mapped for the plan to hold, which its arguments say; ``None``: as it is."""
    setting: Setting | None = None
    """A setting of the system that would help; ``None`` where none would, or none is known."""

    @property
    def left(self) -> int:
        """Free bytes less used ones; negative where the plan does not fit."""
        return self.free - self.used

    @property
    def fits(self) -> bool:
        """Whether at least the margin is left."""
        return self.left >= self.margin


@dataclass(frozen=True)
class Problem:
    """Why a plan does not fit."""

    device: str
    """The name of a device or of a pool, or ``host``."""
    missing: int
    """Bytes that are missing there."""
    message: str
    """One sentence: what is missing, and what would help."""


@dataclass(frozen=True)
class LeftOut:
    """A device that a plan puts nothing on, whatever its speed."""

    device: str
    """Its name."""
    reason: str
    """``margin``: its margin leaves no room there."""
    message: str
    """One sentence that says so, and what to do."""


@dataclass(frozen=True)
class Search:
    """What finding the plan took."""

    dummy_loads: int
    """Loads of the model that allocate nothing; another context of a loaded model is none."""
    seconds: float
    """Seconds of the whole search."""
    shared_loads: int = 0
    """Dummy loads of what is beside the model, counted apart."""
    is_cut_short: bool = False
    """Whether it ended with the time limit, so that there may be a better plan."""


@dataclass(frozen=True)
class FileStamp:
    """What a file of the model was when it was read."""

    path: str
    """Its path."""
    bytes: int
    """Its size."""
    changed: int
    """When it was last changed, in nanoseconds."""


def stamp_of(path: str | os.PathLike[str]) -> FileStamp:
    """The stamp of the file at ``path`` as it is now. Raises ``OSError``."""
    found = os.stat(path)
    return FileStamp(os.fspath(path), found.st_size, found.st_mtime_ns)
