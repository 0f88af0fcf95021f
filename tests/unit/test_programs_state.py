"""The size of a sequence's state, by hand: each part as llama.cpp's ``state_write`` has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.errors import LlamaCppError
from fitter.llama.types import Cache, Caches, CacheTensor
from fitter.programs.later import SequenceState, output_bytes, state_of
from tests.support.cases import named_cases

K, V = CacheTensor("cache_k_l0", 64, 512, 1), CacheTensor("cache_v_l0", 32, 512, 1)
PLAIN = Cache("kv", 512, 1, 1, (K, V), cell_bytes=12)
WINDOW = Cache("swa", 256, 1, 1, (K,), cell_bytes=12)
STATES = Cache(
    "recurrent",
    *(4, 1, 2),
    tensors=tuple(CacheTensor(f"cache_{name}_l0", 100, 4, 1) for name in ("r", "ple_r", "s")),
    cell_bytes=8,
)
COMPRESSED = Cache("compressed", 64, 1, 1, (K,), ratio=4, cell_bytes=12)
COMPRESSOR = Cache("compressor", 8, 1, 1, (K, K), ratio=4)


def of(*caches: Cache, n_swa: int = 0, is_chunked: bool = False, leaves_out_masked: bool = True) -> Caches:
    return Caches(caches, n_swa, is_chunked, leaves_out_masked, n_seq_max=1, n_rs_seq=0, empty=0, empty_partial=0)


def plain(n: int) -> int:
    # streams, cells; how V is, layers; type and row size of K and V
    return 8 + (8 + 12 * n + 12 + 64 * n + 12 + 32 * n if n else 0)


def window(n: int) -> int:
    return 8 + (8 + 12 * n + 12 + 64 * n if n else 0)


@named_cases(
    ("no cache", of(), 100, 8, 8),
    ("dense, empty", of(PLAIN), 0, 8 + plain(0), 8 + plain(0)),
    ("dense", of(PLAIN), 100, 8 + plain(100), 8 + plain(100)),
    ("dense, four streams", of(replace(PLAIN, n_stream=4)), 100, 20 + plain(100), 20 + plain(100)),
    ("b11413, empty", replace(of(PLAIN), has_rotations=True), 0, 8 + plain(0), 8 + plain(0)),
    ("b11413", replace(of(PLAIN), has_rotations=True), 9, 16 + plain(9), 16 + plain(9)),
    ("no checkpoint of what can be cut", replace(of(PLAIN), empty_partial=8), 9, 8 + plain(9), 8),
    ("in the window", of(PLAIN, WINDOW, n_swa=32), 31, 8 + plain(31) + window(31), 8 + window(31)),
    ("behind it", of(PLAIN, WINDOW, n_swa=32), 100, 8 + plain(100) + window(32), 8 + window(32)),
    (
        "all that the cache has room for",
        of(PLAIN, WINDOW, n_swa=32, leaves_out_masked=False),
        *(300, 8 + plain(300) + window(256), 8 + window(256)),
    ),
    (
        "at the end of a chunk",
        of(PLAIN, WINDOW, n_swa=32, is_chunked=True),
        *(64, 8 + plain(64) + window(32), 8 + window(32)),
    ),
    (
        "at the beginning of a chunk",
        of(PLAIN, WINDOW, n_swa=32, is_chunked=True),
        *(65, 8 + plain(65) + window(1), 8 + window(1)),
    ),
    ("hybrid, empty", of(PLAIN, STATES), 0, 8 + plain(0) + 44, 8 + 44),
    ("hybrid", of(PLAIN, STATES), 9, 8 + plain(9) + 44 + 308, 8 + 44 + 308),
    ("recurrent", of(STATES), 9, 8 + 44 + 308, 8 + 44 + 308),
    (
        "compressed",
        of(WINDOW, COMPRESSED, COMPRESSOR, n_swa=32),
        *(103, 20 + window(32) + 16 + 4 + 28 + 25 * 64 + 24 + 4 + 2 * (28 + 8 * 64), 20 + window(32) + 28 + 2 * 540),
    ),
)
def test_a_state_is_the_sum_of_its_parts(caches: Caches, n_tokens: int, full: int, checkpoint: int) -> None:
    state = SequenceState(caches)
    assert (state.full(n_tokens), state.checkpoint(n_tokens)) == (full, checkpoint)


@named_cases(
    ("dense", of(PLAIN), 8 + plain(512), 8 + plain(512)),
    ("window", of(PLAIN, WINDOW, n_swa=32), 8 + plain(512) + window(32), 8 + window(32)),
    (
        "a whole chunk, though the context ends within one",
        of(PLAIN, WINDOW, n_swa=30, is_chunked=True),
        *(8 + plain(512) + window(30), 8 + window(30)),
    ),
    (
        "images, whose tokens share positions",
        of(PLAIN, replace(WINDOW, cell_bytes=24), n_swa=32),
        *(8 + plain(512) + window(256) + 12 * 256, 8 + window(256) + 12 * 256),
    ),
    ("recurrent", of(STATES), 8 + 44 + 308, 8 + 44 + 308),
)
def test_the_largest_state_is_that_of_a_full_context(caches: Caches, full: int, checkpoint: int) -> None:
    state = SequenceState(caches)
    assert (state.largest, state.largest_checkpoint) == (full, checkpoint)


@named_cases(
    ("no cache", of(), False, "none", False),
    ("dense", of(PLAIN), False, "any", False),
    ("window", of(PLAIN, WINDOW, n_swa=32), False, "any", True),
    ("window in full", of(PLAIN, WINDOW, n_swa=32), True, "any", False),
    ("hybrid", of(PLAIN, STATES), True, "whole", True),
    ("hybrid with snapshots", replace(of(PLAIN, STATES), n_rs_seq=3), True, "bounded", True),
    ("compressed", of(WINDOW, COMPRESSED, COMPRESSOR, n_swa=32), True, "whole", True),
    ("window without a cache", of(n_swa=32), False, "none", False),
)
def test_who_needs_checkpoints(caches: Caches, swa_full: bool, removal: str, needed: bool) -> None:
    state = SequenceState(caches, swa_full)
    assert (state.removal, state.needs_checkpoints) == (removal, needed)


def test_an_empty_state_of_another_size_is_one_of_an_unknown_build() -> None:
    known = replace(of(PLAIN), empty=16, empty_partial=16)
    assert state_of(known, swa_full=True) == SequenceState(known, True)
    with pytest.raises(LlamaCppError) as error:
        state_of(replace(known, empty=12))
    assert str(error.value) == (
        "this build of llama.cpp writes the state of a sequence in a way that fitter does not know (an empty state has "
        "12 bytes, not 16): plan with another build of llama.cpp"
    )


def test_outputs_of_a_vocabulary() -> None:
    assert output_bytes(4, 1000) == 16000
    assert output_bytes(4, 1000, n_embd=10) == 16160
    assert output_bytes(4, 1000, has_samplers=True) == 16000 + 4 * (8000 + 4004)
    assert output_bytes(4, 1000, n_embd_of_batch=10, n_batch=8) == 16320
