"""A plan: parameters, and the memory that llama.cpp measured for them. Sizes in bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fitter.errors import PlanError
from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.explain import Bound, Choice
from fitter.planning.pricing import Price
from fitter.planning.request import MIB


@dataclass(frozen=True)
class ModelSummary:
    """What the plan is for. ``bytes``: all tensors of all split files."""

    path: str
    name: str
    architecture: str
    bytes: int


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


@dataclass(frozen=True)
class PlanData:
    """Parameters confirmed by a dummy load of the user's own file, with what that load measured.

    ``breakdown`` holds the rows per buffer type; ``problems`` is empty exactly when the plan fits.
    ``n_layer`` counts the repeating layers that llama.cpp can offload (without the output layer). ``estimate`` is what
    the plan takes in time, ``None`` where it does not fit. ``choices`` says what was chosen over what, ``bound`` what
    no placement is faster than, ``levers`` what was given up for it, of what the user allowed to be. ``shared`` is what
    else takes of the same memory; it is in no row of ``breakdown``. ``rpc`` has the rpc-servers (``host:port``) that
    were given, where the plan uses a device of theirs; their order decides how those are named. ``asked`` has what
    ``fit`` was called with, ``files`` what was fitted: to load what was planned, and to fit again. A plan is true where
    it fits.
    """

    model: ModelSummary
    params: Params
    breakdown: Breakdown
    devices: tuple[DeviceUse, ...]
    host: HostUse
    search: Search
    problems: tuple[Problem, ...]
    n_layer: int
    virtual: bool
    estimate: Price | None = None
    choices: tuple[Choice, ...] = ()
    bound: Bound | None = None
    levers: tuple[str, ...] = ()
    shared: tuple[SharedUse, ...] = ()
    rpc: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    files: tuple[FileStamp, ...] = field(default=(), compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Whether every device and the host keep their margin."""
        return not self.problems

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Devices without a byte beside their margin, and what is kept free with ``reserve``."""
        rows = [row for shared in self.shared if shared.kind != "reserve" for row in shared.rows if row.used]
        busy = {row.device for row in rows}
        return tuple(
            LeftOut(use.name, "margin", _why_left_out(use))
            for use in self.devices
            if use.used == use.shared and use.left <= use.margin and use.name not in busy
        )

    def __bool__(self) -> bool:
        return self.fits


def _why_left_out(use: DeviceUse) -> str:
    margin = f"its margin of {_mib_up(use.margin)} MiB"
    if use.margin > use.total:
        why = f"{margin} is more than its memory of {use.total // MIB} MiB"
    elif use.shared:
        why = f"{margin} and {_mib_up(use.shared)} MiB reserved leave nothing of its {use.free // MIB} MiB free"
    else:
        why = f"{margin} leaves nothing of its {use.free // MIB} MiB free"
    return f"{use.name} is left out: {why}; set a smaller margin with --fit-target"


def _mib_up(size: int) -> int:
    return -(-size // MIB)


def check_fits(plan: PlanData, remedy: str = "") -> None:
    """Raise ``PlanError`` for a plan that does not fit: nobody is to run it by accident. ``remedy`` is a way to."""
    if not plan.fits:
        more = f"; to get it anyway, use {remedy}" if remedy else ""
        raise PlanError(f"the plan does not fit: {plan.problems[0].message}{more}")


def resolved(plan: PlanData) -> Params:
    """The plan's parameters with what llama.cpp chose where they leave it the choice: context and devices."""
    params, found = plan.params, plan.breakdown
    devices = found.devices if params.devices is None else params.devices
    return replace(params, n_ctx=params.n_ctx or found.n_ctx, devices=devices)
