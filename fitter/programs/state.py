"""Size of a sequence's state as llama.cpp writes it: a prompt in llama-server's cache, a saved slot, a checkpoint.
Bytes.

The rules are those of ``state_write`` in llama.cpp's ``src/llama-kv-cache*.cpp`` and ``src/llama-memory-*.cpp``. Every
build must write an empty sequence as the rules say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fitter.errors import LlamaCppError
from fitter.llama.types import Cache, Caches, CacheTensor

_HEADER = 8
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
    sizes = [_HEADER]
    if any(each.kind == "compressor" for each in caches.caches):
        sizes.append(_OF_COMPRESSED)
    # b11739 writes no cache that can be rolled back, b11549 did where there was no other
    is_left_out = caches.empty_partial == _HEADER
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
