"""The result of a real load, beside the plan's prediction. Bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fitter.llama.types import Params, Row
from fitter.planning.request.summary import ModelSummary, Problem, SharedUse
from fitter.text import LONGEST_NAME, printable

Kind = Literal["model", "context", "compute"]
KINDS: tuple[Kind, ...] = ("model", "context", "compute")


@dataclass(frozen=True)
class VerifiedDifference:
    """A number of bytes that differs from its prediction."""

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
        """Real bytes minus predicted ones."""
        return self.real - self.predicted


@dataclass(frozen=True)
class VerifiedRow:
    """One buffer type, predicted and real."""

    predicted: Row
    """The prediction; zeros if the plan has no such row."""
    real: Row
    """The real load; zeros if it has no such row."""
    rounding: Row | None = None
    """Possible error of the real bytes, which a llama-server's log rounds to MiB with some decimals; ``None`` if exact.
    """
    unsaid: tuple[Kind, ...] = ()
    """Kinds that a llama-server's log does not have, or has only for the whole mapped file."""

    @property
    def differences(self) -> Iterator[VerifiedDifference]:
        """Numbers that differ by more than their rounding."""
        for kind in KINDS:
            predicted, real = getattr(self.predicted, kind), getattr(self.real, kind)
            rounding = 0 if self.rounding is None else getattr(self.rounding, kind)
            if kind not in self.unsaid and abs(predicted - real) > rounding:
                yield VerifiedDifference(self.real.buffer_type, kind, predicted, real)


@dataclass(frozen=True)
class MemoryUse:
    """Free memory of a device or of the host, before and after a load."""

    name: str
    """A device's name, or ``host``."""
    before: int
    """Free bytes before the load."""
    after: int
    """Free bytes with the model loaded."""
    counted: int
    """Bytes by llama.cpp's count."""

    @property
    def unaccounted(self) -> int | None:
        """Used bytes beyond llama.cpp's count; negative if other memory was freed meanwhile.

        ``None`` if the device's report does not change, as for a CPU behind RPC.
        """
        return None if self.counted and self.before == self.after else self.before - self.after - self.counted


@dataclass(frozen=True)
class LaterUse:
    """Host memory that a llama-server takes after the load."""

    kind: str
    """``checkpoint`` (the largest), ``prompt`` (the largest in the prompt cache, with its checkpoints) or ``prompt
    cache`` (all of it).
    """
    count: int
    """Number of checkpoints that were made, or of prompts in the cache."""
    tokens: int | None
    """Its tokens; ``None`` for the whole cache, or if the server does not say."""
    predicted: int | None
    """Bytes of so many tokens, as llama.cpp writes them; ``None`` if unknown. Checkpoints of a prompt count as large as
    one of all its tokens.
    """
    real: int | None
    """Bytes in the server's log; ``None`` without any."""
    rounding: int
    """Possible error of ``real``."""
    most: int | None
    """Bytes that the plan allows; ``None`` if unlimited."""

    @property
    def more(self) -> int:
        """Bytes that certainly exceed the plan; 0 if none."""
        limits = [limit for limit in (self.predicted, self.most) if limit is not None]
        return max(0, self.real - self.rounding - min(limits)) if limits and self.real is not None else 0


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory that grew after the load, while a llama-server answered prompts.

    Other programs' memory counts on a device; what the server keeps of prompts does not count on the host.
    """

    name: str
    """A device's name, or ``host`` for the server's process."""
    first: int
    """Bytes more after the first half of the prompts."""
    second: int
    """Bytes more after the second half."""
    requests: int
    """Answered prompts of the second half."""
    idle: int
    """Bytes more after a wait without prompts."""
    seconds: float
    """Seconds of that wait."""

    @property
    def per_request(self) -> float:
        """Bytes more with each prompt of the second half; 0 without one."""
        return self.second / self.requests if self.requests else 0.0

    @property
    def per_minute(self) -> float:
        """Bytes more in each minute without prompts; 0 without a wait."""
        return self.idle * 60 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class ServerUse:
    """Memory of a llama-server that ran the plan and answered prompts."""

    path: str
    """The path of the llama-server."""
    version: str
    """Its version; empty if unknown."""
    prompts: int
    """Prompts to send."""
    answered: int
    """Prompts with an answer."""
    tokens: int
    """Tokens of the answered prompts."""
    slots: int
    """Prompts at a time."""
    refused: str
    """The first error; empty if none."""
    later: tuple[LaterUse, ...]
    """Memory taken after the load."""
    resident: int | None
    """Resident bytes of its process at the peak of its own memory; ``None`` if the system does not say."""
    of_files: int
    """Resident bytes that are pages of files, such as the model's."""
    counted: int
    """Host bytes that the plan counts for the load, without mapped weights, plus the real checkpoints and prompt cache.
    """
    planned: int | None
    """Most bytes by the plan, with the largest checkpoints and prompt cache; ``None`` if they have no limit."""
    margin: int
    """Bytes that the plan keeps free in addition."""
    growth: tuple[MemoryGrowth, ...] = ()
    """Memory that grew after the load: by the prompts, and while the server waited."""
    expert_hits: int = 0
    """Experts that tokens found in the cache of experts."""
    expert_misses: int = 0
    """Experts that had to be uploaded into it."""
    reallocations: int | None = None
    """Graphs whose memory was allocated again with another size; ``None`` if the server does not say (b11669 does)."""

    @property
    def expert_hit_rate(self) -> float | None:
        """The part of the used experts that the cache had; ``None`` if none was used."""
        used = self.expert_hits + self.expert_misses
        return self.expert_hits / used if used else None

    @property
    def own(self) -> int | None:
        """Resident bytes without pages of files."""
        return None if self.resident is None else self.resident - self.of_files

    @property
    def unaccounted(self) -> int | None:
        """Its own bytes beyond ``counted``: code, vocabulary, threads."""
        return None if self.own is None else self.own - self.counted

    @property
    def is_within(self) -> bool:
        """Whether its process stayed within the plan and its margin."""
        return self.own is None or self.planned is None or self.own <= self.planned + self.margin


@dataclass(frozen=True)
class Verification:
    """The result of a real load; with ``problems``, nothing was loaded."""

    model: ModelSummary
    """The model."""
    params: Params
    """The parameters of the load."""
    tolerance: int
    """Bytes by which each number may exceed its prediction."""
    rows: tuple[VerifiedRow, ...] = ()
    """Each buffer type, predicted and real."""
    memory: tuple[MemoryUse, ...] = ()
    """The devices in order, then the host."""
    shared: tuple[SharedUse, ...] = ()
    """Models and reservations beside the model; only a llama-server loads them."""
    problems: tuple[Problem, ...] = ()
    """Why nothing was loaded."""
    server: ServerUse | None = None
    """The llama-server that loaded the plan; ``None`` for llama.cpp's library."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits."""
        return not self.problems

    @property
    def differences(self) -> tuple[VerifiedDifference, ...]:
        """All numbers that differ, in either direction."""
        return tuple(difference for row in self.rows for difference in row.differences)

    @property
    def exceeding(self) -> tuple[VerifiedDifference, ...]:
        """Numbers that exceed their prediction by more than the tolerance."""
        return tuple(difference for difference in self.differences if difference.more > self.tolerance)

    @property
    def exceeding_later(self) -> tuple[LaterUse, ...]:
        """Memory after the load that exceeds its prediction by more than the tolerance."""
        later = () if self.server is None else self.server.later
        return tuple(use for use in later if use.more > self.tolerance)

    @property
    def holds(self) -> bool:
        """Whether the plan was loaded and nothing exceeds its prediction."""
        is_within = self.server is None or self.server.is_within
        return self.fits and is_within and not (self.exceeding or self.exceeding_later)

    def __repr__(self) -> str:
        found = "as predicted" if self.holds else "does not fit" if not self.fits else "not as predicted"
        return f"<Verification: {printable(self.model.name, LONGEST_NAME)} {found}>"
