"""Host memory that a program takes beside the load of a model: its process, outputs, what grows in use. Bytes.

``later.toml`` has the figures of a process, with their sources. A sequence's state has the size that llama.cpp writes:
a prompt in llama-server's cache, a saved slot, a checkpoint. Its rules are those of ``state_write`` in llama.cpp's
``src/llama-kv-cache*.cpp`` and ``src/llama-memory-*.cpp``. Every build must write an empty sequence as the rules say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from fitter.errors import LlamaCppError
from fitter.llama.types import Cache, Caches, CacheTensor
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


_STATE_HEADER = 8
"""The magic number of a state, and the sequence."""

_COUNT = 4
"""A number of cells, streams or layers, or the number of a layer."""

_OF_TENSOR = 12
"""A tensor's type, and the size of its rows."""

_WITHOUT_TYPE = 8
_OF_PLANES = 28
"""A DeepSeek-V4 tensor's type, its dimensions, and the size of its rows."""

_OF_COMPRESSED = 12
"""The beginning of a state of DeepSeek-V4's caches."""

_OF_COMPRESSED_CACHE = 16
_OF_COMPRESSOR = 24

_PLAIN_CELL = 12
"""Bytes of a cell whose position has one dimension."""


Removal = Literal["none", "any", "bounded", "whole"]


@dataclass(frozen=True)
class SequenceState:
    """The state of one sequence in a context with these ``caches``; ``state_of`` makes it.

    Attributes:
        caches: The context's caches.
        swa_full: Whether caches of sliding-window attention have full size.
    """

    caches: Caches
    swa_full: bool = False

    def full(self, n_tokens: int) -> int:
        """Compute the bytes of the whole state after ``n_tokens`` tokens (``llama_state_seq_get_size_ext`` without
        flags).
        """
        return _size(self.caches, n_tokens, _window)

    def checkpoint(self, n_tokens: int) -> int:
        """Compute the bytes of the part that cannot be rolled back (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``).

        Windows and recurrent states, which soon stop growing; the whole state or nothing if there are neither.
        """
        return _size(self.caches, n_tokens, _window, is_partial=True)

    @property
    def n_ctx(self) -> int:
        """Most tokens of one sequence; 1 if all states are recurrent, and so of constant size."""
        return max((each.cells for each in self.caches.caches if each.kind in ("kv", "swa")), default=1)

    @property
    def largest(self) -> int:
        """Most bytes of a sequence's whole state."""
        return _size(self.caches, self.n_ctx, _largest_window)

    @property
    def largest_checkpoint(self) -> int:
        """Most bytes of a sequence's checkpoint."""
        return _size(self.caches, self.n_ctx, _largest_window, is_partial=True)

    @property
    def removal(self) -> Removal:
        """How llama.cpp can remove the last tokens of a sequence (``common_context_can_seq_rm``), which llama-server
        tests at its start.

        ``whole``: only all of them; each drafting slot then has one more checkpoint. ``bounded``: some, from snapshots
        (``n_rs_seq``). ``none``: there is no cache.
        """
        kinds = {each.kind for each in self.caches.caches}
        if not kinds:
            return "none"
        if self.caches.n_rs_seq:
            return "bounded"
        return "whole" if kinds & {"recurrent", "compressor"} else "any"

    @property
    def needs_checkpoints(self) -> bool:
        """Whether llama-server makes context checkpoints, because prompts cannot be rolled back otherwise.

        The rule of ``do_checkpoint`` and ``n_swa`` in ``tools/server/server-context.cpp``.
        """
        has_window = self.removal == "any" and self.caches.n_swa > 0 and not self.swa_full
        return self.removal in ("whole", "bounded") or has_window


def state_of(caches: Caches, *, swa_full: bool = False) -> SequenceState:
    """Return the state of a sequence. Raises ``LlamaCppError`` if this build writes states in an unknown way."""
    state = SequenceState(caches, swa_full)
    for what, said, computed in (
        ("state", caches.empty, state.full(0)),
        ("checkpoint", caches.empty_partial, state.checkpoint(0)),
    ):
        if said != computed:
            raise LlamaCppError(
                f"this build of llama.cpp writes the state of a sequence in a way that fitter does not know (an empty "
                f"{what} has {said} bytes, not {computed}): plan with another build of llama.cpp"
            )
    return state


_Window = Callable[[Caches, Cache, int], int]
"""Cells of a sliding-window cache that are written after so many tokens."""


def _window(caches: Caches, cache: Cache, n_tokens: int) -> int:
    held = min(n_tokens, cache.cells)
    if not caches.leaves_out_masked:
        return held
    seen = (n_tokens - 1) % caches.n_swa + 1 if caches.is_chunked and n_tokens else caches.n_swa
    return min(held, seen)


def _largest_window(caches: Caches, cache: Cache, n_tokens: int) -> int:
    # tokens of an image share a position, so a window may have more tokens than positions
    is_exact = caches.leaves_out_masked and cache.cell_bytes <= _PLAIN_CELL
    return min(n_tokens, cache.cells, caches.n_swa) if is_exact else min(n_tokens, cache.cells)


def _size(caches: Caches, n_tokens: int, window: _Window, *, is_partial: bool = False) -> int:
    sizes = [_STATE_HEADER]
    if any(each.kind == "compressor" for each in caches.caches):
        sizes.append(_OF_COMPRESSED)
    # b11739 writes no cache that can be rolled back, b11549 did where there was no other
    is_left_out = caches.empty_partial == _STATE_HEADER
    has_others = any(each.kind in ("swa", "recurrent", "compressor") for each in caches.caches)
    can_leave_out = is_partial and (has_others or is_left_out)
    for cache in caches.caches:
        if can_leave_out and cache.kind in ("kv", "compressed"):
            continue
        if cache.kind == "kv":
            sizes.append(_of_cells(caches, cache, min(n_tokens, cache.cells)))
        elif cache.kind == "swa":
            sizes.append(_of_cells(caches, cache, window(caches, cache, n_tokens)))
        elif cache.kind == "recurrent":
            sizes.append(_of_recurrent(cache, min(n_tokens, 1)))
        elif cache.kind == "compressed":
            sizes.append(_OF_COMPRESSED_CACHE + _of_planes(cache, min(n_tokens // cache.ratio, cache.cells)))
        else:
            sizes.append(_OF_COMPRESSOR + _of_planes(cache, cache.cells))
    return sum(sizes)


def _of_cells(caches: Caches, cache: Cache, n_cells: int) -> int:
    """Compute ``llama_kv_cache::state_write``: only the sequence's stream has cells."""
    size = _COUNT + _COUNT * cache.n_stream
    if n_cells:
        size += (4 if caches.has_rotations else 2) * _COUNT + n_cells * cache.cell_bytes
        size += sum(_OF_TENSOR + n_cells * tensor.row_bytes for tensor in cache.tensors)
    return size


def _of_recurrent(cache: Cache, n_cells: int) -> int:
    """Compute ``llama_memory_recurrent::state_write``."""
    return 3 * _COUNT + n_cells * cache.cell_bytes + sum(_of_state(tensor, n_cells) for tensor in cache.tensors)


def _of_state(tensor: CacheTensor, n_cells: int) -> int:
    is_history = tensor.name.startswith("cache_ple_")
    return (_WITHOUT_TYPE if is_history else _OF_TENSOR) + n_cells * tensor.row_bytes


def _of_planes(cache: Cache, n_rows: int) -> int:
    """Compute ``dsv4_state_write_tensor_streams`` for all layers."""
    return _COUNT * cache.n_layer + sum(_OF_PLANES + n_rows * tensor.row_bytes for tensor in cache.tensors)
