"""Memory that grows while a llama-server answers prompts, and while it waits. Bytes; seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitter.planning.plan.verified import MemoryGrowth


@dataclass(frozen=True)
class Reading:
    """What was in use at a moment: by device, and ``host`` for the process without what it keeps of prompts.

    ``answered``: prompts with an answer until then.
    """

    answered: int
    at: float
    used: Mapping[str, int]


def growth_of(readings: Sequence[Reading], idle: Reading | None = None) -> tuple[MemoryGrowth, ...]:
    """Compare readings: the first half of the prompts, the second half, and a wait after them.

    A server allocates some memory with its first prompts, and then no more; what grows with every prompt shows in the
    second half.

    Args:
        readings: In order; the first one before any prompt. Without a prompt there is no growth to tell.
        idle: A reading after a wait without prompts.
    """
    if not readings or not readings[-1].answered:
        return ()
    first, last = readings[0], readings[-1]
    middle = next(each for each in readings if each.answered * 2 >= last.answered)
    after = idle or last
    return tuple(
        MemoryGrowth(
            name,
            middle.used[name] - used,
            last.used[name] - middle.used[name],
            last.answered - middle.answered,
            after.used[name] - last.used[name],
            after.at - last.at,
        )
        for name, used in first.used.items()
        if all(name in each.used for each in (middle, last, after))
    )
