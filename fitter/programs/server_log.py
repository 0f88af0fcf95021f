"""Read the memory of a llama-server from its log. Bytes.

The log has MiB with some decimals. Other versions' words are further patterns; what no pattern finds is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from fitter.text import MIB

Kind = Literal["model", "context", "compute", "lora", "output"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Figure:
    """A rounded number of bytes; the true one may differ by up to ``rounding``."""

    bytes: int
    rounding: int

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.bytes + other.bytes, self.rounding + other.rounding)


@dataclass(frozen=True)
class Buffer:
    """A buffer. ``context`` counts contexts from 0; a model's weights come before its context."""

    context: int
    buffer_type: str
    kind: Kind
    is_mapped: bool
    size: Figure


@dataclass(frozen=True)
class Checkpoint:
    """A context checkpoint; ``tokens`` is ``None`` if the log does not say."""

    tokens: int | None
    size: Figure


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt in the prompt cache: its tokens, its checkpoints, and the bytes of both."""

    tokens: int
    checkpoints: int
    size: Figure


@dataclass(frozen=True)
class CacheState:
    """The prompt cache: number of prompts, their bytes, and the limit (``None`` for none)."""

    prompts: int
    size: Figure
    limit: Figure | None


@dataclass(frozen=True)
class ExpertLookups:
    """Experts that tokens used: found in the cache of experts, or uploaded into it; ``size`` of the uploads."""

    hits: int
    misses: int
    size: Figure

    def __add__(self, other: ExpertLookups) -> ExpertLookups:
        return ExpertLookups(self.hits + other.hits, self.misses + other.misses, self.size + other.size)


@dataclass(frozen=True)
class Said:
    """All figures of a log."""

    buffers: tuple[Buffer, ...] = ()
    """Buffers of the load; a compute buffer that was allocated again has its largest size."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Context checkpoints, each combination of size and tokens once."""
    n_checkpoints: int = 0
    """Number of checkpoints made."""
    held: Figure = Figure(0, 0)
    """Bytes of the most checkpoints that the slots had, each slot at its peak."""
    cache: CacheState | None = None
    """The prompt cache at its peak; ``None`` if the log does not have it."""
    cached: tuple[CachedPrompt, ...] = ()
    """Prompts in the cache, each kind once."""
    can_bind: bool = True
    """Whether it could listen on its port."""
    lookups: ExpertLookups | None = None
    """Uses of the cache of experts until the server's end; ``None`` without any."""
    reallocations: int | None = None
    """Graphs whose memory was allocated again with another size; ``None`` if the log does not say."""

    @property
    def largest_checkpoint(self) -> Figure | None:
        """Bytes of the largest checkpoint; ``None`` if there was none."""
        return max((each.size for each in self.checkpoints), key=lambda size: size.bytes, default=None)


_N = r"\d{1,18}"
"""A number, as ``log_file.NUMBER``."""
_SIZE = rf"= *({_N}(?:\.{_N})?) MiB"
_OF_A_PROJECTOR = re.compile(r"\b(?:alloc_compute_meta|clip|warmup|mtmd)\b")
_NEW_CONTEXT = re.compile(r"constructing llama_context")
_OF_KINDS: dict[Kind, str] = {
    "model": "model",
    "context": r"(?:KV|RS|\S+ \S+ state)",
    "compute": "compute",
    "output": "output",
    "lora": "LoRA",
}
_BUFFERS = tuple(
    (kind, re.compile(rf"(?<!\S)(\S+) +{words} buffer size *{_SIZE}")) for kind, words in _OF_KINDS.items()
)
_CHECKPOINT = re.compile(rf"created (?:context|SWA|swa) checkpoint (?:{_N} of {_N} )?\(.*?\bsize {_SIZE}")
_N_TOKENS = re.compile(rf"\bn_tokens = ({_N})")
_OF_SLOT = re.compile(rf"\bid +({_N}) +\|.*checkpoint ({_N}) of {_N}")
_CACHE = re.compile(rf"cache state: ({_N}) prompts, ({_N}\.{_N}) MiB(?: \(limits: ({_N}\.{_N}) MiB)?")
_CACHED = re.compile(rf"- prompt \S+: +({_N}) tokens, checkpoints: +({_N}), +({_N}\.{_N}) MiB")
_LOOKUPS = re.compile(rf"llama_moe_cache: .*\bhits = ({_N}), misses = ({_N}), .*\buploaded {_SIZE}")
_REALLOCATIONS = re.compile(rf"graph reallocs = +{_N} +/ +({_N})")
_LISTENING = re.compile(r"listening on \S+")
_NOT_BOUND = re.compile(r"couldn't bind|failed to bind|address already in use|HTTP server error", re.IGNORECASE)

_MAPPED = "_Mapped"
_MOST_KEPT = 4096
"""Most checkpoints, and most cached prompts, to remember."""


def figure(text: str) -> Figure:
    """Parse MiB with some decimals."""
    decimals = len(text.partition(".")[2])
    half = MIB / 2 / 10**decimals
    return Figure(round(float(text) * MIB), int(half) + 1)


@dataclass
class Listener:
    """Reads a log line by line; ``said`` has the figures until now."""

    _buffers: dict[tuple[int, str, Kind, bool], list[Figure]] = field(default_factory=dict)
    _compute: dict[tuple[int, str], Figure] = field(default_factory=dict)
    _checkpoints: dict[Checkpoint, None] = field(default_factory=dict)
    _cached: dict[CachedPrompt, None] = field(default_factory=dict)
    _n_checkpoints: int = 0
    _held: dict[str, int] = field(default_factory=dict)
    _contexts: int = 0
    _cache: CacheState | None = None
    _lookups: ExpertLookups | None = None
    _reallocations: int | None = None
    _listens: bool = False
    _can_bind: bool = True

    def hear(self, line: str) -> None:
        """Read one line."""
        if " MiB" in line:
            self._hear_size(line)
        elif _NEW_CONTEXT.search(line):
            self._contexts += 1
        elif match := _REALLOCATIONS.search(line):
            self._reallocations = max(self._reallocations or 0, int(match[1]))
        elif _LISTENING.search(line):
            self._listens = True
        elif not self._listens and _NOT_BOUND.search(line):
            self._can_bind = False

    def _hear_size(self, line: str) -> None:
        if match := _LOOKUPS.search(line):
            lookups = ExpertLookups(int(match[1]), int(match[2]), figure(match[3]))
            self._lookups = lookups if self._lookups is None else self._lookups + lookups
        elif match := _CACHED.search(line):
            self._keep(self._cached, CachedPrompt(int(match[1]), int(match[2]), figure(match[3])))
        elif match := _CACHE.search(line):
            # a limit of 0 is none
            limit = figure(match[3]) if match[3] and float(match[3]) else None
            now = CacheState(int(match[1]), figure(match[2]), limit)
            if self._cache is None or now.size.bytes >= self._cache.size.bytes:
                self._cache = now
        elif match := _CHECKPOINT.search(line):
            self._n_checkpoints += 1
            tokens = _N_TOKENS.search(line)
            if slot := _OF_SLOT.search(line):
                self._held[slot[1]] = max(self._held.get(slot[1], 0), int(slot[2]))
            self._keep(self._checkpoints, Checkpoint(int(tokens[1]) if tokens else None, figure(match[1])))
        elif not _OF_A_PROJECTOR.search(line):
            self._hear_buffer(line)

    def _hear_buffer(self, line: str) -> None:
        for kind, pattern in _BUFFERS:
            if match := pattern.search(line):
                name, size = match[1].removesuffix(_MAPPED), figure(match[2])
                # weights come before the context that is made with them
                context = self._contexts if kind == "model" else max(0, self._contexts - 1)
                if kind == "compute":
                    # a context may reserve again, for other graphs
                    before = self._compute.get((context, name))
                    if before is None or before.bytes < size.bytes:
                        self._compute[context, name] = size
                else:
                    self._buffers.setdefault((context, name, kind, match[1] != name), []).append(size)
                return

    @staticmethod
    def _keep(values: dict[_Value, None], value: _Value) -> None:
        if len(values) < _MOST_KEPT:
            values[value] = None

    @property
    def said(self) -> Said:
        """The figures until now."""
        said = Said(
            tuple(self._every_buffer()),
            tuple(self._checkpoints),
            self._n_checkpoints,
            cache=self._cache,
            cached=tuple(self._cached),
            can_bind=self._can_bind,
            lookups=self._lookups,
            reallocations=self._reallocations,
        )
        one = said.largest_checkpoint
        number = sum(self._held.values())
        return said if one is None else replace(said, held=Figure(number * one.bytes, number * one.rounding))

    def _every_buffer(self) -> Iterator[Buffer]:
        for (context, name, kind, is_mapped), sizes in self._buffers.items():
            yield Buffer(context, name, kind, is_mapped, total(sizes))
        for (context, name), size in self._compute.items():
            yield Buffer(context, name, "compute", False, size)


def is_host(buffer_type: str) -> bool:
    """Return whether a buffer type is host memory: ``CPU``, ``CPU_REPACK``, ``CUDA_Host``."""
    return buffer_type.startswith("CPU") or buffer_type.endswith("_Host")


def total(sizes: Iterable[Figure]) -> Figure:
    """Add up ``sizes``."""
    return sum(sizes, Figure(0, 0))


# time since the start, and a letter for an error; older versions have neither
_ERROR = re.compile(r"^[\d.]+ E (?:\S+ +\S+: )?(?:\w+: )?(.*)$")
_WORDS = re.compile(r"\b(?:error|failed|fatal|cannot|unable|abort|assert|terminate)", re.IGNORECASE)
_CONSEQUENCES = re.compile(
    r"failed to load model|exiting due to|failed to initialize|failed to read|"
    r"failed to create (?:the )?context|model loading error"
)
_BEGINNINGS = re.compile(r"^(?:\w+: )?(?:error loading model: )?(?:llama_model_loader: )?")


def reason(lines: Iterable[str]) -> str:
    """Return the reason of a server's failure: the last error in these lines that is not a consequence of another.

    Without an error, the last line; empty without any line.
    """
    lines = [line.strip() for line in lines if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    errors = errors or [line for line in lines if _WORDS.search(line)]
    causes = [line for line in errors if not _CONSEQUENCES.search(line)]
    last = (causes or errors or lines or [""])[-1]
    return _BEGINNINGS.sub("", last, count=1) or last
