"""What was found when a plan was loaded for real, beside what it predicts. Bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fitter.llama.types import Params, Row
from fitter.planning.summary import ModelSummary, Problem, SharedUse

Kind = Literal["model", "context", "compute"]
KINDS: tuple[Kind, ...] = ("model", "context", "compute")


@dataclass(frozen=True)
class VerifiedDifference:
    """Bytes of one kind in one buffer type that are not those predicted."""

    buffer_type: str
    """The buffer type."""
    kind: Kind
    """``model``, ``context`` or ``compute``."""
    predicted: int
    """Bytes that the plan predicts."""
    real: int
    """Bytes that the real load took."""

    @property
    def more(self) -> int:
        """Real bytes beyond the predicted ones; negative where there are fewer."""
        return self.real - self.predicted


@dataclass(frozen=True)
class VerifiedRow:
    """One buffer type, predicted and real."""

    predicted: Row
    """What the plan predicts; zeros where it has no such row."""
    real: Row
    """What the real load took; zeros where it has no such row."""

    @property
    def differences(self) -> Iterator[VerifiedDifference]:
        """Those of its bytes that differ."""
        for kind in KINDS:
            predicted, real = getattr(self.predicted, kind), getattr(self.real, kind)
            if predicted != real:
                yield VerifiedDifference(self.real.buffer_type, kind, predicted, real)


@dataclass(frozen=True)
class MemoryUse:
    """Free memory of a device or of the host before a load and with it."""

    name: str
    """A device's name, or ``host``."""
    before: int
    """Free bytes before the load."""
    after: int
    """Free bytes with the model loaded."""
    counted: int
    """Bytes that llama.cpp counts there."""

    @property
    def unaccounted(self) -> int | None:
        """Bytes that went and that llama.cpp does not count; negative where other memory was freed meanwhile.

        ``None`` where the device's report stands still, as that of a CPU behind RPC does.
        """
        return None if self.counted and self.before == self.after else self.before - self.after - self.counted


@dataclass(frozen=True)
class Verification:
    """The answer of a real load. Where there are ``problems``, nothing was loaded: no ``rows``, no ``memory``."""

    model: ModelSummary
    """The model."""
    params: Params
    """The parameters that it was loaded with."""
    tolerance: int
    """Bytes by which each number may exceed its prediction."""
    rows: tuple[VerifiedRow, ...] = ()
    """Each buffer type, predicted and real."""
    memory: tuple[MemoryUse, ...] = ()
    """The devices in order, and the host last."""
    shared: tuple[SharedUse, ...] = ()
    """What the plan has beside the model, which is not loaded."""
    problems: tuple[Problem, ...] = ()
    """Why it was not loaded."""

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
