"""Host memory that a program takes beside the load of a model: its process, outputs, what grows in use. Bytes.

``later.toml`` has the figures of a process, with their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from fitter.programs.facts import Facts
from fitter.storage import read_data
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


_FLOAT = _TOKEN = 4


def output_bytes(
    n_outputs: int,
    n_vocab: int,
    *,
    n_embd: int = 0,
    n_embd_of_batch: int = 0,
    n_batch: int = 0,
    has_samplers: bool = False,
) -> int:
    """Compute the bytes for logits and embeddings of a batch, which the breakdown of a load does not have.

    A context starts with a row for each sequence, and allocates a larger buffer when a batch needs more
    (``llama_context::output_reserve``).

    Args:
        n_outputs: Tokens with an output; at least the number of sequences.
        n_vocab: Tokens of the vocabulary.
        n_embd: Elements of each embedding, if requested.
        n_embd_of_batch: Elements for each token of the batch, if the model's own layers draft
            (``llama_set_embeddings_nextn``).
        n_batch: Tokens of the batch.
        has_samplers: Whether samplers run on the device (``--backend-sampling``, by default for the model's own
            drafts): probabilities and candidates then have buffers too.
    """
    row = _FLOAT * (n_vocab + n_embd)
    if has_samplers:
        row += 2 * _FLOAT * n_vocab + _TOKEN * (1 + n_vocab)
    return n_outputs * row + _FLOAT * n_embd_of_batch * n_batch


ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""Variables with which the figures hold: without them the C library keeps freed states of slots."""


def process_bytes(
    *, n_vocab: int, n_slots: int, n_ctx: int, state: int, counted: int, backends: Collection[str] = ()
) -> int:
    """Return the most bytes of a llama-server's process.

    Args:
        n_vocab: Tokens of the vocabulary.
        n_slots: Its slots.
        n_ctx: Tokens of all slots' contexts.
        state: Bytes of one slot's whole state, if it has a prompt cache; a state is saved before an old one goes.
        counted: Bytes that the plan counts on the host.
        backends: Kinds of its devices, such as ``CUDA``.
    """
    data = _data()
    each_token = data["per_token"] + data["per_token_and_slot"] * n_slots
    size = (data["base_mib"] + data["per_slot_mib"] * n_slots) * MIB + each_token * n_vocab
    size += data["per_context_token"] * n_ctx + state * data["states"]
    size += sum(data["backend_mib"].get(backend, 0) for backend in backends) * MIB
    return int(size + (size + counted) * data["page_tables"])


@functools.cache
def _data() -> dict[str, Any]:
    return read_data(__file__)
