"""Host memory that a program takes after the load, while it is used. Bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitter.programs.facts import Facts
from fitter.text import MIB


@dataclass(frozen=True)
class Later:
    """Host memory that grows after the load, up to a limit."""

    kind: str
    """``prompt cache``, ``idle slots``, ``checkpoints`` or ``logits``."""
    bytes: int | None
    """Most bytes; ``None`` without a limit, 0 if they are part of another entry."""
    each: int
    """Bytes of one element: a full slot's state, a checkpoint."""
    count: int | None
    """Most elements; with a prompt cache, those that it has room for."""
    per_slot: int | None = None
    """Elements for each slot."""


@dataclass(frozen=True)
class ServerCaches:
    """The caches of a server for its slots.

    Attributes:
        n_slots: Number of slots.
        state: Most bytes of one slot's whole state.
        checkpoint: Bytes of one context checkpoint; 0 if the server makes none.
        cache_ram: Limit of the prompt cache in MiB, as its option has it.
        ctx_checkpoints: Most checkpoints of a slot, as its option has it.
        saves_idle: Whether idle slots are saved in the prompt cache.
        drafting: Further checkpoints of a slot, to take drafted tokens back.
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
        """Most bytes of the prompt cache (``server_prompt_cache``); ``None`` without a limit."""
        return None if self.cache_ram < 0 else self.cache_ram * MIB

    @property
    def checkpoints(self) -> int:
        """Most bytes of all slots' checkpoints; checkpoints of saved prompts count in the prompt cache."""
        return self.n_slots * self.per_slot * self.checkpoint

    @property
    def per_draft(self) -> int:
        """Bytes of all slots' checkpoints for drafted tokens."""
        return self.n_slots * self.drafting * self.checkpoint

    @property
    def per_slot(self) -> int:
        """Most checkpoints of a slot."""
        return self.ctx_checkpoints + self.drafting

    @property
    def bytes(self) -> int:
        """Bytes of everything with a limit."""
        return (self.prompt_cache or 0) + self.checkpoints

    def lines(self) -> tuple[Later, ...]:
        """List the caches in use."""
        lines = []
        if self.cache_ram:
            cache = self.prompt_cache
            count = None if cache is None or not self.state else cache // self.state
            lines.append(Later("prompt cache", cache, self.state, count))
            if self.saves_idle and self.state:
                lines.append(Later("idle slots", 0, self.state, self.n_slots, 1))
        if self.checkpoints:
            count = self.n_slots * self.per_slot
            lines.append(Later("checkpoints", self.checkpoints, self.checkpoint, count, self.per_slot))
        return tuple(lines)


def server_caches(
    facts: Facts,
    n_slots: int,
    state: int,
    checkpoint: int,
    cache_ram: int | None = None,
    ctx_checkpoints: int | None = None,
    cache_idle_slots: bool | None = None,
    drafting: int = 0,
) -> ServerCaches:
    """Build the caches of a server, with its own limits where none are set (``None``)."""
    return ServerCaches(
        n_slots,
        state,
        checkpoint,
        facts.cache_ram_mib if cache_ram is None else cache_ram,
        facts.n_ctx_checkpoints if ctx_checkpoints is None else ctx_checkpoints,
        facts.cache_idle_slots if cache_idle_slots is None else cache_idle_slots,
        drafting,
    )


def reduce_to(wanted: ServerCaches, room: int, *, is_cache_fixed: bool, are_checkpoints_fixed: bool) -> ServerCaches:
    """Reduce the limits of ``wanted`` to ``room`` bytes.

    Fixed limits stay. Checkpoints get half of the room, and the rest that the prompt cache leaves: without checkpoints,
    a changed prompt is computed again from its beginning.
    """
    one = wanted.n_slots * wanted.checkpoint
    fixed = (wanted.prompt_cache or 0 if is_cache_fixed else 0) + one * wanted.drafting
    fixed += one * wanted.ctx_checkpoints if are_checkpoints_fixed else 0
    left = max(0, room - fixed)
    reduced = wanted
    if not are_checkpoints_fixed and one:
        half = left if is_cache_fixed else left // 2
        reduced = replace(reduced, ctx_checkpoints=min(wanted.ctx_checkpoints, half // one))
    if not is_cache_fixed:
        mine = left - (0 if are_checkpoints_fixed else one * reduced.ctx_checkpoints)
        own_cache = wanted.cache_ram if wanted.cache_ram >= 0 else mine // MIB
        reduced = replace(reduced, cache_ram=min(own_cache, mine // MIB))
        if not are_checkpoints_fixed and one:
            rest = left - (reduced.prompt_cache or 0)
            reduced = replace(reduced, ctx_checkpoints=min(wanted.ctx_checkpoints, rest // one))
    return reduced
