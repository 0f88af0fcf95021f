"""A plan loaded for real: what llama.cpp said that it would take, beside what it takes. Bytes.

What loads is handed in, so that everything here works without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fitter.errors import PlanError
from fitter.llama.types import Breakdown, DeviceInfo, Params, Row
from fitter.planning.calibration import Process
from fitter.planning.plan import DeviceUse, HostUse, ModelSummary, Problem, SharedUse

Kind = Literal["model", "context", "compute"]
KINDS: tuple[Kind, ...] = ("model", "context", "compute")


@dataclass(frozen=True)
class Prediction:
    """What a plan says: parameters, and the bytes of each buffer type; ``problems`` says why it does not fit."""

    model: ModelSummary
    params: Params
    rows: tuple[Row, ...]
    devices: tuple[DeviceUse, ...]
    host: HostUse
    problems: tuple[Problem, ...] = ()
    shared: tuple[SharedUse, ...] = ()


@dataclass(frozen=True)
class VerifiedDifference:
    """Bytes of one kind in one buffer type that are not those predicted."""

    buffer_type: str
    kind: Kind
    predicted: int
    real: int

    @property
    def more(self) -> int:
        """Real bytes beyond the predicted ones; negative where there are fewer."""
        return self.real - self.predicted


@dataclass(frozen=True)
class VerifiedRow:
    """One buffer type: ``predicted`` and ``real`` are rows of it, of zeros where one side has none."""

    predicted: Row
    real: Row

    @property
    def differences(self) -> Iterator[VerifiedDifference]:
        """Those of its bytes that differ."""
        for kind in KINDS:
            predicted, real = getattr(self.predicted, kind), getattr(self.real, kind)
            if predicted != real:
                yield VerifiedDifference(self.real.buffer_type, kind, predicted, real)


@dataclass(frozen=True)
class MemoryUse:
    """Free memory of a device (or ``host``) before the load and with it; ``counted`` is what llama.cpp counts there."""

    name: str
    before: int
    after: int
    counted: int

    @property
    def unaccounted(self) -> int | None:
        """Bytes that went and that llama.cpp does not count; negative where other memory was freed meanwhile.

        ``None`` where the device's report stands still, as that of a CPU behind RPC does.
        """
        return None if self.counted and self.before == self.after else self.before - self.after - self.counted


@dataclass(frozen=True)
class Verification:
    """The answer: nothing was loaded where there are ``problems``, and ``rows`` and ``memory`` are empty then.

    ``memory`` has the devices in order, and the host last. ``shared`` is what the plan has beside the model, which is
    not loaded. ``tolerance``: bytes by which each number may exceed its prediction.
    """

    model: ModelSummary
    params: Params
    tolerance: int
    rows: tuple[VerifiedRow, ...] = ()
    memory: tuple[MemoryUse, ...] = ()
    shared: tuple[SharedUse, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the plan fits, and could be loaded."""
        return not self.problems

    @property
    def differences(self) -> tuple[VerifiedDifference, ...]:
        """Every number that is not the predicted one, in either direction."""
        return tuple(difference for row in self.rows for difference in row.differences)

    @property
    def exceeding(self) -> tuple[VerifiedDifference, ...]:
        """Those that exceed their prediction by more than the tolerance."""
        return tuple(difference for difference in self.differences if difference.more > self.tolerance)

    @property
    def holds(self) -> bool:
        """Whether it was loaded and nothing exceeds its prediction."""
        return self.fits and not self.exceeding


def verify(
    prediction: Prediction, path: Path, loader: Process, host_free: Callable[[], int], tolerance: int
) -> Verification:
    """Load ``path`` in ``loader``, a fresh process on the real devices, as ``prediction`` says, and compare.

    ``host_free`` says what the host has available. A plan that does not fit, or not any more, is not loaded. Raises
    ``PlanError`` where a device of the plan is not here.
    """
    answer = Verification(prediction.model, prediction.params, tolerance, shared=prediction.shared)
    if prediction.problems:
        return replace(answer, problems=prediction.problems)
    # The process uses the devices from this question on: what it takes of them for itself is gone before and after.
    before = loader.memory()
    _check_devices(prediction, before)
    host_before = host_free()
    if problems := tuple(_problems_now(prediction, before, host_before)):
        return replace(answer, problems=problems)
    loaded = loader.load(path, prediction.params)
    host_after = host_free()
    real = loaded.breakdown
    memory = [
        MemoryUse(use.name, _free(before, use.name), _free(loaded.devices, use.name), real.on(use.name).used)
        for use in prediction.devices
    ]
    memory.append(MemoryUse("host", host_before, host_after, real.host.used))
    return replace(answer, rows=compare(prediction.rows, real), memory=tuple(memory))


def compare(predicted: Sequence[Row], real: Breakdown) -> tuple[VerifiedRow, ...]:
    """Every buffer type that either side has, in the order of the real load."""
    expected = {(row.buffer_type, row.device): row.real for row in predicted}
    found = {(row.buffer_type, row.device): row for row in real.rows}
    return tuple(
        VerifiedRow(expected.get(key) or _empty(found[key]), found.get(key) or _empty(expected[key]))
        for key in dict.fromkeys([*found, *expected])
    )


def _empty(row: Row) -> Row:
    return replace(row, model=0, context=0, compute=0)


def _check_devices(prediction: Prediction, here: Sequence[DeviceInfo]) -> None:
    known = {device.name: device.description for device in here}
    names = ", ".join(known) or "no device"
    for use in prediction.devices:
        if use.name not in known:
            raise PlanError(
                f"the plan is for {use.name} ({use.description}), but llama.cpp has {names} here: fit again"
            )
        if use.description != known[use.name]:
            raise PlanError(
                f"the plan's {use.name} is '{use.description}', but here it is '{known[use.name]}': fit again"
            )


def _problems_now(prediction: Prediction, here: Sequence[DeviceInfo], host_free: int) -> Iterator[Problem]:
    """What the plan needs and is not free at this moment: loading it would take others' memory, or fail."""
    limits = [(use.name, use.used - use.shared, _free(here, use.name)) for use in prediction.devices]
    limits.append(("host", prediction.host.used - prediction.host.shared, host_free))
    for name, needed, free in limits:
        if needed > free:
            message = f"the plan takes {needed} bytes on {name}, but only {free} are free there now: fit again"
            yield Problem(name, needed - free, message)


def _free(devices: Sequence[DeviceInfo], name: str) -> int:
    return next(device.free for device in devices if device.name == name)
