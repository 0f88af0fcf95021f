"""How large the state of a sequence is as llama.cpp writes it. Bytes.

That is a prompt in llama-server's cache, a saved slot, a context checkpoint.

The rules are those of ``state_write`` in llama.cpp's ``src/llama-kv-cache*.cpp`` and ``src/llama-memory-*.cpp``. What a
sequence without tokens takes is asked of every build itself, and has to be what the rules say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fitter.errors import LlamaCppError
from fitter.llama.types import Cache, Caches, CacheTensor

_HEADER = 8
"""A number by which a state is known, and the sequence."""

_COUNT = 4
"""How many cells, streams or layers there are, or the number of a layer."""

_OF_TENSOR = 12
"""The type of a tensor and the size of its rows."""

_WITHOUT_TYPE = 8
_OF_PLANES = 28
"""The type of a tensor of DeepSeek-V4's, its dimensions, and the size of its rows."""

_OF_COMPRESSED = 12
"""What begins a state of DeepSeek-V4's caches."""

_OF_COMPRESSED_CACHE = 16
_OF_COMPRESSOR = 24

_PLAIN_CELL = 12
"""What is written of a cell whose position has one dimension."""


Removal = Literal["none", "any", "bounded", "whole"]


@dataclass(frozen=True)
class SequenceState:
    """The state of one sequence of a context with these ``caches``, made with ``state_of``.

    ``swa_full``: whether the caches of sliding-window attention are as large as the others.
    """

    caches: Caches
    swa_full: bool = False

    def full(self, n_tokens: int) -> int:
        """Bytes of the whole state after ``n_tokens`` tokens (``llama_state_seq_get_size_ext`` with no flag)."""
        return _size(self.caches, n_tokens, _window)

    def checkpoint(self, n_tokens: int) -> int:
        """Bytes of what of it cannot be rolled back (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``).

        Those are windows and recurrent states, which soon grow no more. Where a context has neither, it is all of it.
        """
        return _size(self.caches, n_tokens, _window, is_partial=True)

    @property
    def n_ctx(self) -> int:
        """The most tokens that one sequence can have; 1 where all states are recurrent, and so of one size."""
        return max((each.cells for each in self.caches.caches if each.kind in ("kv", "swa")), default=1)

    @property
    def largest(self) -> int:
        """The most bytes that the whole state of a sequence can have."""
        return _size(self.caches, self.n_ctx, _largest_window)

    @property
    def largest_checkpoint(self) -> int:
        """The most bytes that a checkpoint of a sequence can have."""
        return _size(self.caches, self.n_ctx, _largest_window, is_partial=True)

    @property
    def removal(self) -> Removal:
        """How the last tokens of a sequence can be taken back, which llama-server tries out when it starts.

        ``whole``: only all of them; then each slot that drafts has one more checkpoint of its own. ``bounded``: some of
        them, from snapshots (``n_rs_seq``). ``none``: there is no cache. It is ``common_context_can_seq_rm``.
        """
        kinds = {each.kind for each in self.caches.caches}
        if not kinds:
            return "none"
        if self.caches.n_rs_seq:
            return "bounded"
        return "whole" if kinds & {"recurrent", "compressor"} else "any"

    @property
    def needs_checkpoints(self) -> bool:
        """Whether llama-server makes context checkpoints, as its prompts cannot be taken back otherwise.

        The rule is that of ``do_checkpoint`` and ``n_swa`` in ``tools/server/server-context.cpp``.
        """
        has_window = self.removal == "any" and self.caches.n_swa > 0 and not self.swa_full
        return self.removal in ("whole", "bounded") or has_window


def state_of(caches: Caches, *, swa_full: bool = False) -> SequenceState:
    """The state of a sequence of a context with these ``caches``.

    Raises ``LlamaCppError`` if the build of llama.cpp that made them writes states in another way than is known here.
    """
    state = SequenceState(caches, swa_full)
    for what, said, own in (
        ("state", caches.empty, state.full(0)),
        ("checkpoint", caches.empty_partial, state.checkpoint(0)),
    ):
        if said != own:
            raise LlamaCppError(
                f"this build of llama.cpp writes the state of a sequence in a way that fitter does not know (an empty "
                f"{what} has {said} bytes, not {own}): plan with another build of llama.cpp"
            )
    return state


_Window = Callable[[Caches, Cache, int], int]
"""How many cells of a cache of sliding-window attention are written after so many tokens."""


def _window(caches: Caches, cache: Cache, n_tokens: int) -> int:
    held = min(n_tokens, cache.cells)
    if not caches.leaves_out_masked:
        return held
    seen = (n_tokens - 1) % caches.n_swa + 1 if caches.is_chunked and n_tokens else caches.n_swa
    return min(held, seen)


def _largest_window(caches: Caches, cache: Cache, n_tokens: int) -> int:
    # the tokens of an image can share a position, so that a window has more of them than it has positions
    is_exact = caches.leaves_out_masked and cache.cell_bytes <= _PLAIN_CELL
    return min(n_tokens, cache.cells, caches.n_swa) if is_exact else min(n_tokens, cache.cells)


def _size(caches: Caches, n_tokens: int, window: _Window, *, is_partial: bool = False) -> int:
    sizes = [_HEADER]
    if any(each.kind == "compressor" for each in caches.caches):
        sizes.append(_OF_COMPRESSED)
    can_leave_out = is_partial and any(each.kind in ("swa", "recurrent", "compressor") for each in caches.caches)
    for cache in caches.caches:
        if can_leave_out and cache.kind in ("kv", "compressed"):
            continue
        if cache.kind == "kv":
            sizes.append(_of_cells(cache, min(n_tokens, cache.cells)))
        elif cache.kind == "swa":
            sizes.append(_of_cells(cache, window(caches, cache, n_tokens)))
        elif cache.kind == "recurrent":
            sizes.append(_of_recurrent(cache, min(n_tokens, 1)))
        elif cache.kind == "compressed":
            sizes.append(_OF_COMPRESSED_CACHE + _of_planes(cache, min(n_tokens // cache.ratio, cache.cells)))
        else:
            sizes.append(_OF_COMPRESSOR + _of_planes(cache, cache.cells))
    return sum(sizes)


def _of_cells(cache: Cache, n_cells: int) -> int:
    """``llama_kv_cache::state_write``: only the stream of the sequence has any cells."""
    size = _COUNT + _COUNT * cache.n_stream
    if n_cells:
        size += 2 * _COUNT + n_cells * cache.cell_bytes
        size += sum(_OF_TENSOR + n_cells * tensor.row_bytes for tensor in cache.tensors)
    return size


def _of_recurrent(cache: Cache, n_cells: int) -> int:
    """``llama_memory_recurrent::state_write``."""
    return 3 * _COUNT + n_cells * cache.cell_bytes + sum(_of_state(tensor, n_cells) for tensor in cache.tensors)


def _of_state(tensor: CacheTensor, n_cells: int) -> int:
    is_history = tensor.name.startswith("cache_ple_")
    return (_WITHOUT_TYPE if is_history else _OF_TENSOR) + n_cells * tensor.row_bytes


def _of_planes(cache: Cache, n_rows: int) -> int:
    """``dsv4_state_write_tensor_streams``, of all layers."""
    return _COUNT * cache.n_layer + sum(_OF_PLANES + n_rows * tensor.row_bytes for tensor in cache.tensors)
