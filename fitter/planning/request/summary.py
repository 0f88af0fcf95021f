"""The parts of a plan: its model, the memory of each device and of the host, and its problems. Bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from fitter.llama.types import Row
from fitter.model.header import Model


@dataclass(frozen=True)
class ModelSummary:
    """The model of a plan."""

    path: str
    """Path, or address without credentials; the first file of a split model."""
    name: str
    """Name in the header."""
    architecture: str
    """llama.cpp's name of the architecture."""
    bytes: int
    """Bytes of all tensors of all split files."""

    @classmethod
    def of(cls, model: Model) -> ModelSummary:
        """Summarize ``model``."""
        return cls(model.called, model.name, model.architecture, model.bytes)


@dataclass(frozen=True)
class SharedUse:
    """Memory of something beside the model: a draft model, a projector, adapters, a reservation, or another plan."""

    kind: str
    """``projector``, ``draft``, ``mtp``, ``ngram``, ``lora``, ``reserve`` or ``beside``."""
    name: str
    """Its file, or the purpose of a reservation."""
    rows: tuple[Row, ...]
    """Bytes by device; ``device`` is ``None`` for the host."""
    arguments: tuple[str, ...] = ()
    """llama-server's arguments that reproduce the measured memory."""

    @property
    def is_of_others(self) -> bool:
        """Whether another process has it."""
        return self.kind in ("reserve", "beside")

    def on(self, device: str | None) -> int:
        """Add up its bytes on a device, or on the host (``None``)."""
        return sum(row.used for row in self.rows if row.device == device)


@dataclass(frozen=True)
class DeviceUse:
    """Memory of a plan on one device, as measured by llama.cpp."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """The driver's name for it."""
    total: int
    """Its memory in bytes."""
    free: int
    """Free bytes without the plan."""
    margin: int
    """Bytes that must stay free."""
    model: int
    """Bytes of weights."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers."""
    shared: int = 0
    """Bytes of ``SharedUse`` on it."""
    more_in_use: int = 0
    """Bytes of compute buffers that a real load takes beyond ``compute``; the margin may have them."""

    @property
    def used(self) -> int:
        """Bytes of the model and of everything beside it."""
        return self.model + self.context + self.compute + self.shared

    @property
    def left(self) -> int:
        """Free bytes minus used ones; negative if the plan does not fit."""
        return self.free - self.used

    @property
    def loaded(self) -> DeviceUse:
        """Its memory when the model is loaded for real: ``compute`` with ``more_in_use``."""
        return replace(self, compute=self.compute + self.more_in_use, more_in_use=0)

    @property
    def fits(self) -> bool:
        """Whether at least the margin stays free."""
        return self.left >= self.margin


@dataclass(frozen=True)
class HostUse:
    """Host memory of a plan, with all host buffer types."""

    total: int | None
    """Bytes of memory; ``None`` if unlimited."""
    free: int | None
    """Available bytes without the plan; ``None`` if unlimited."""
    margin: int
    """Bytes that must stay free."""
    model: int
    """Bytes of weights, mapped ones included."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers."""
    shared: int = 0
    """Bytes of ``SharedUse`` on the host."""
    later: int = 0
    """Most bytes that the program takes after the load (``Later``), of those with a limit."""
    more_in_use: int = 0
    """Bytes of compute buffers that a real load takes beyond ``compute``; the margin may have them."""

    @property
    def used(self) -> int:
        """Bytes of the model, of everything beside it, and of the program's use after the load."""
        return self.model + self.context + self.compute + self.shared + self.later

    @property
    def left(self) -> int | None:
        """Free bytes minus used ones; ``None`` if unlimited."""
        return None if self.free is None else self.free - self.used

    @property
    def loaded(self) -> HostUse:
        """Its memory when the model is loaded for real: ``compute`` with ``more_in_use``."""
        return replace(self, compute=self.compute + self.more_in_use, more_in_use=0)

    @property
    def fits(self) -> bool:
        """Whether at least the margin stays free."""
        return self.left is None or self.left >= self.margin


@dataclass(frozen=True)
class Setting:
    """A setting of the system that gives a GPU more of the memory that it shares with the host."""

    command: str
    """The command, or an addition to one."""
    bytes: int
    """Bytes that the GPU may use then."""
    message: str
    """Its benefit, its duration and its risk, in one sentence."""


@dataclass(frozen=True)
class PoolUse:
    """Memory of a plan in a pool that devices and the host share."""

    name: str
    """Name of the pool, such as ``MTL0+host``."""
    total: int
    """Bytes of memory."""
    free: int
    """Available bytes without the plan."""
    margin: int
    """Bytes that must stay free."""
    used: int
    """Bytes on devices and host together; weights that both map count once."""
    members: tuple[str, ...]
    """Its devices and ``host``."""
    mapped_twice: int = 0
    """Bytes of weights that device and host map from the same pages of the file."""
    mapped_between: int = 0
    """Bytes of the host's weights between a device's weights in the file; the device maps them too, within its margin.
    """
    load_mode: str | None = None
    """``none`` if the plan holds only without mapping the file, as its arguments say; else ``None``."""
    setting: Setting | None = None
    """A setting of the system that helps; ``None`` if none is known."""
    more_in_use: int = 0
    """Bytes of compute buffers that a real load takes beyond ``used``; the margin may have them."""

    @property
    def left(self) -> int:
        """Free bytes minus used ones; negative if the plan does not fit."""
        return self.free - self.used

    @property
    def loaded(self) -> PoolUse:
        """Its memory when the model is loaded for real: ``used`` with ``more_in_use``."""
        return replace(self, used=self.used + self.more_in_use, more_in_use=0)

    @property
    def fits(self) -> bool:
        """Whether at least the margin stays free."""
        return self.left >= self.margin


@dataclass(frozen=True)
class Problem:
    """A reason why a plan does not fit."""

    device: str
    """Name of a device or pool, or ``host``."""
    missing: int
    """Bytes that it lacks."""
    message: str
    """The problem and its remedies, in one sentence."""


@dataclass(frozen=True)
class LeftOut:
    """A device without any part of the plan, whatever its speed."""

    device: str
    """Its name."""
    reason: str
    """``margin``: its margin leaves no room there."""
    message: str
    """The reason and the remedy, in one sentence."""


@dataclass(frozen=True)
class Search:
    """The effort of a search."""

    dummy_loads: int
    """Loads without allocation; another context of a loaded model does not count."""
    seconds: float
    """Seconds of the whole search."""
    shared_loads: int = 0
    """Dummy loads of draft models and projectors."""
    is_cut_short: bool = False
    """Whether the time limit ended the search, so that a better plan may exist."""


@dataclass(frozen=True)
class FileStamp:
    """Path, size and time of a model file when it was read."""

    path: str
    """Its path."""
    bytes: int
    """Its size."""
    changed: int
    """Time of its last change, in nanoseconds."""


def stamp_of(path: str | os.PathLike[str]) -> FileStamp:
    """Stamp the file at ``path``. Raises ``OSError``."""
    status = os.stat(path)
    return FileStamp(os.fspath(path), status.st_size, status.st_mtime_ns)
