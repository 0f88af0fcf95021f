"""What was found when a plan was loaded for real, beside what it predicts. Bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fitter.llama.types import Params, Row
from fitter.planning.request.summary import ModelSummary, Problem, SharedUse

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
    rounding: Row | None = None
    """How far off what was taken may be, since a llama-server says it in MiB with some decimals; ``None`` where every
    byte is known.
    """
    unsaid: tuple[Kind, ...] = ()
    """What a llama-server did not say of it, or only of the whole model's file where that is mapped."""

    @property
    def differences(self) -> Iterator[VerifiedDifference]:
        """Those of its bytes that differ, by more than their rounding."""
        for kind in KINDS:
            predicted, real = getattr(self.predicted, kind), getattr(self.real, kind)
            rounding = 0 if self.rounding is None else getattr(self.rounding, kind)
            if kind not in self.unsaid and abs(predicted - real) > rounding:
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
class LaterUse:
    """Something that a llama-server takes in host memory after the load."""

    kind: str
    """``checkpoint`` (the largest one), ``prompt`` (the largest one in the prompt cache, with its checkpoints) or
    ``prompt cache`` (all of it).
    """
    count: int
    """How many there were: checkpoints that were made, or prompts that the cache had."""
    tokens: int | None
    """Tokens of that one; ``None`` for all, and where the server does not say them."""
    predicted: int | None
    """Bytes for so many tokens, as llama.cpp writes them; ``None`` where that is not known. A prompt's checkpoints are
    counted as large as one of all its tokens.
    """
    real: int | None
    """Bytes that the server says; ``None`` where it does not say any, or there was none."""
    rounding: int
    """How far off ``real`` may be, in bytes."""
    most: int | None
    """Bytes that the plan allows it to have; ``None`` where there is no limit."""

    @property
    def more(self) -> int:
        """Bytes beyond what the plan says for certain; 0 where there are none."""
        limits = [limit for limit in (self.predicted, self.most) if limit is not None]
        return max(0, self.real - self.rounding - min(limits)) if limits and self.real is not None else 0


@dataclass(frozen=True)
class ServerUse:
    """What a llama-server took that was started with the plan and answered prompts."""

    path: str
    """The path of the llama-server."""
    version: str
    """Its version, as it says it; empty where it says none."""
    prompts: int
    """Prompts that were to be sent."""
    answered: int
    """Those that were answered."""
    tokens: int
    """Tokens of those."""
    slots: int
    """How many were sent at a time."""
    refused: str
    """The first answer that was an error; empty without one."""
    later: tuple[LaterUse, ...]
    """What it took after the load."""
    resident: int | None
    """Bytes that its process had in memory when it had the most of its own; ``None`` where the system does not say."""
    of_files: int
    """Those of them that are pages of files, as the model's is."""
    counted: int
    """Bytes of host memory that the plan counts for the load, without weights that are mapped from the file, and of
    checkpoints and prompt cache what they were.
    """
    planned: int | None
    """Bytes that the plan says at most, with checkpoints and prompt cache as large as they may be; ``None`` where those
    have no limit.
    """
    margin: int
    """Bytes beyond them that the plan keeps free."""

    @property
    def own(self) -> int | None:
        """Resident bytes without those of files."""
        return None if self.resident is None else self.resident - self.of_files

    @property
    def unaccounted(self) -> int | None:
        """Its own bytes beyond the counted ones: its code's, its vocabulary's, those of its threads."""
        return None if self.own is None else self.own - self.counted

    @property
    def is_within(self) -> bool:
        """Whether its process had no more than the plan says and keeps free."""
        return self.own is None or self.planned is None or self.own <= self.planned + self.margin


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
    """What the plan has beside the model; only a llama-server loads it."""
    problems: tuple[Problem, ...] = ()
    """Why it was not loaded."""
    server: ServerUse | None = None
    """The llama-server that loaded it; ``None`` where llama.cpp's library alone did."""

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
    def exceeding_later(self) -> tuple[LaterUse, ...]:
        """What a llama-server takes later than the load, where it exceeds its prediction by more than the tolerance."""
        later = () if self.server is None else self.server.later
        return tuple(use for use in later if use.more > self.tolerance)

    @property
    def holds(self) -> bool:
        """Whether it was loaded and nothing exceeds its prediction."""
        is_within = self.server is None or self.server.is_within
        return self.fits and is_within and not (self.exceeding or self.exceeding_later)
