"""What a llama-server said and took that was started with a plan, beside what the plan says. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.llama.types import Row
from fitter.planning.plan import Plan
from fitter.planning.verified import KINDS, Kind, LaterUse, ServerUse, VerifiedRow
from fitter.programs.finding import ServerProgram
from fitter.programs.prompts import Fed
from fitter.programs.resident import Resident
from fitter.programs.said import Buffer, CachedPrompt, Figure, Said

DRAFTS = ("draft", "mtp")
"""Kinds of what is beside a model that have a context of their own, in the same server."""


@dataclass(frozen=True)
class PlannedLater:
    """What a plan says that a llama-server takes in host memory after the load; ``None`` where it says nothing of it.

    ``checkpoint``: the largest context checkpoint. ``prompt``: the state of a prompt of so many tokens in the prompt
    cache, without checkpoints. ``prompt_cache``: all that it may have. ``total``: of everything that comes later.
    """

    checkpoint: int | None = None
    prompt: Callable[[int], int] | None = None
    prompt_cache: int | None = None
    total: int = 0


def compare_rows(plan: Plan, said: Said) -> tuple[VerifiedRow, ...]:
    """Every buffer type that either side has; what the server says of no buffer type is ``unsaid`` of all."""
    own = [buffer for buffer in said.buffers if buffer.context == 0 or buffer.kind == "lora"]
    found = _by_type(own)
    expected = {row.buffer_type: row.real for row in plan.breakdown.rows}
    known = {buffer.kind for buffer in own}
    unsaid = tuple(kind for kind in KINDS if kind not in known and any(getattr(row, kind) for row in expected.values()))
    names = dict.fromkeys([*expected, *found])
    rows = [_row(expected.get(name), name, found.get(name, {}), unsaid) for name in names]
    return tuple(row for row in (*rows, *_drafts(plan, said)) if row.predicted.used or row.real.used)


def _by_type(buffers: Iterable[Buffer]) -> dict[str, dict[Kind, Figure]]:
    """What was said of each buffer type. Mapped weights are as many as were planned at most: see ``_row``."""
    found: dict[str, dict[Kind, Figure]] = {}
    for buffer in buffers:
        if buffer.kind not in KINDS or buffer.is_mapped:
            continue
        sizes = found.setdefault(buffer.buffer_type, {})
        sizes[buffer.kind] = sizes.get(buffer.kind, Figure(0, 0)) + buffer.size
    return found
