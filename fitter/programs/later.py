"""What a program takes of host memory after the load, as its users fill it. Bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitter.programs.facts import Facts
from fitter.text import MIB


@dataclass(frozen=True)
class Later:
    """Something that grows in host memory after the load, up to a limit."""

    kind: str
    """``prompt cache``, ``idle slots``, ``checkpoints`` or ``logits``."""
    bytes: int | None
    """The most bytes that it takes; ``None`` where it has no limit, 0 for what is a part of another one."""
    each: int
    """Bytes of one of those that it consists of: a full slot's state, a checkpoint."""
    count: int | None
    """How many of them there are at most; with a prompt cache, how many it has room for."""
    per_slot: int | None = None
    """How many there are for each slot."""


@dataclass(frozen=True)
class Keeps:
    """What a server keeps for its slots.

    ``state``: bytes of the whole state of one slot at most, ``checkpoint``: bytes of one context checkpoint, 0 where
    none are made. ``cache_ram`` (MiB) and ``ctx_checkpoints`` (for each slot) are as its options have them.
    ``saves_idle``: idle slots are saved in the prompt cache. ``drafting``: checkpoints that a slot has beyond those,
    for tokens that are drafted and taken back.
    """

    n_slots: int
    state: int
    checkpoint: int
    cache_ram: int
    ctx_checkpoints: int
    saves_idle: bool = False
    drafting: int = 0

    @property
    def prompt_cache(self) -> int | None:
        """Bytes of the prompt cache at most (``server_prompt_cache``), ``None`` without a limit."""
        return None if self.cache_ram < 0 else self.cache_ram * MIB

    @property
    def checkpoints(self) -> int:
        """Bytes of the checkpoints of all slots at most; those of saved prompts count in the prompt cache."""
        return self.n_slots * self.per_slot * self.checkpoint

    @property
    def per_draft(self) -> int:
        """Bytes of the checkpoints of all slots that are for tokens that are drafted and taken back."""
        return self.n_slots * self.drafting * self.checkpoint

    @property
    def per_slot(self) -> int:
        """How many checkpoints a slot has at most."""
        return self.ctx_checkpoints + self.drafting

    @property
    def bytes(self) -> int:
        """All of it that has a limit."""
        return (self.prompt_cache or 0) + self.checkpoints

    def lines(self) -> tuple[Later, ...]:
        """What there is to say, a line each; nothing of what is not kept."""
        found = []
        if self.cache_ram:
            cache = self.prompt_cache
            count = None if cache is None or not self.state else cache // self.state
            found.append(Later("prompt cache", cache, self.state, count))
            if self.saves_idle and self.state:
                found.append(Later("idle slots", 0, self.state, self.n_slots, 1))
        if self.checkpoints:
            count = self.n_slots * self.per_slot
            found.append(Later("checkpoints", self.checkpoints, self.checkpoint, count, self.per_slot))
        return tuple(found)


def keeps(
    facts: Facts,
    n_slots: int,
    state: int,
    checkpoint: int,
    cache_ram: int | None = None,
    ctx_checkpoints: int | None = None,
    cache_idle_slots: bool | None = None,
    drafting: int = 0,
) -> Keeps:
    """What a server of these ``facts`` keeps, with its own limits where none are given (``None``)."""
    return Keeps(
        n_slots,
        state,
        checkpoint,
        facts.cache_ram_mib if cache_ram is None else cache_ram,
        facts.n_ctx_checkpoints if ctx_checkpoints is None else ctx_checkpoints,
        facts.cache_idle_slots if cache_idle_slots is None else cache_idle_slots,
        drafting,
    )


def fitted(own: Keeps, room: int, *, is_cache_fixed: bool, are_checkpoints_fixed: bool) -> Keeps:
    """``own`` with limits that fit in ``room`` bytes, as large as its own or as that leaves them.

    What is fixed stays. Checkpoints have half of the room, and what the prompt cache leaves of the rest: without any, a
    prompt that changes is computed again from its beginning.
    """
    one = own.n_slots * own.checkpoint
    fixed = (own.prompt_cache or 0 if is_cache_fixed else 0) + one * own.drafting
    fixed += one * own.ctx_checkpoints if are_checkpoints_fixed else 0
    left = max(0, room - fixed)
    found = own
    if not are_checkpoints_fixed and one:
        half = left if is_cache_fixed else left // 2
        found = replace(found, ctx_checkpoints=min(own.ctx_checkpoints, half // one))
    if not is_cache_fixed:
        mine = left - (0 if are_checkpoints_fixed else one * found.ctx_checkpoints)
        own_cache = own.cache_ram if own.cache_ram >= 0 else mine // MIB
        found = replace(found, cache_ram=min(own_cache, mine // MIB))
        if not are_checkpoints_fixed and one:
            rest = left - (found.prompt_cache or 0)
            found = replace(found, ctx_checkpoints=min(own.ctx_checkpoints, rest // one))
    return found
