"""Which caches a context has: lines of logs as builds write them, and the tensors that belong to them."""

from __future__ import annotations

import pytest

from fitter.errors import LlamaCppError
from fitter.llama.build.functions import leaves_out_what_is_masked, position_bytes
from fitter.llama.build.log import lines_of_context
from fitter.llama.load.caches import CellBytes, matched
from fitter.llama.types import Cache, CacheTensor
from tests.support.cases import cases, named_cases

CELL = CellBytes(indexer=12, other=24)


def cells(cells: int, layers: int, streams: int = 1, of: int = 1) -> str:
    return (
        f"llama_kv_cache: size =    0.12 MiB ({cells:6} cells, {layers:3} layers, {of:2}/{streams} seqs), K (f16):    1"
    )


def kv(name: str, rows: int, planes: int = 1, row_bytes: int = 64) -> CacheTensor:
    return CacheTensor(name, row_bytes, rows, planes)


def test_a_plain_cache_has_all_tensors() -> None:
    tensors = [kv("cache_k_l0", 512), kv("cache_v_l0", 512), kv("cache_k_l1", 512), kv("cache_v_l1", 512)]
    assert matched([cells(512, 2)], tensors, CELL) == (Cache("kv", 512, 1, 2, tuple(tensors), cell_bytes=24),)


def test_a_window_has_a_cache_of_its_own_and_either_may_have_no_layers() -> None:
    log = [
        "llama_kv_cache_iswa: creating non-SWA KV cache, size = 512 cells",
        cells(512, 0, streams=4, of=4),
        "llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells",
        cells(256, 1, streams=4, of=4),
    ]
    own = kv("cache_k_l0", 256, 4)
    assert matched(log, [own], CELL) == (
        Cache("kv", 512, 4, 0, cell_bytes=24),
        Cache("swa", 256, 4, 1, (own,), cell_bytes=24),
    )


def test_layers_of_the_same_number_belong_to_the_cache_that_was_made_first() -> None:
    log = [
        "llama_kv_cache_dsa: creating main KV cache, size = 512 cells",
        cells(512, 2),
        "llama_kv_cache_dsa: creating indexer KV cache, size = 512 cells",
        cells(512, 1),
    ]
    tensors = [kv("cache_k_l0", 512), kv("cache_k_l1", 512), kv("cache_k_l1", 512, row_bytes=32)]
    assert [(each.tensors, each.cell_bytes) for each in matched(log, tensors, CELL)] == [
        (tuple(tensors[:2]), 24),
        (tuple(tensors[2:]), 12),
    ]


def test_states_are_of_the_recurrent_cache_whatever_was_recorded_first() -> None:
    log = [
        cells(512, 1),
        "llama_memory_recurrent: size =    1.00 MiB (     4 cells,   6 layers,  4 seqs  3 rs_seq), R (f32): 1",
    ]
    states = [kv("cache_r_l0", 16), kv("cache_s_l0", 16), kv("cache_ple_r_l0", 16)]
    own = kv("cache_k_l1", 512)
    assert matched(log, [*states, own], CELL) == (
        Cache("kv", 512, 1, 1, (own,), cell_bytes=24),
        Cache("recurrent", 4, 1, 6, tuple(states), cell_bytes=8),
    )


def test_a_compressed_cache_has_the_ratio_of_its_compressor() -> None:
    log = [
        "llama_kv_cache_dsv4: creating DSV4 HCA compressed KV cache, size = 4 cells",
        cells(256, 1),
        "llama_kv_cache_dsv4: creating DSV4 HCA compressor state",
        "llama_dsv4_comp_state: hca ratio = 128, state = 128 x 64, streams = 1, rs_seq = 0, layers = 1, size = 1",
    ]
    state, own = kv("dsv4_hca_state_kv_l3", 128), kv("cache_k_l3", 256)
    assert matched(log, [state, own], CELL) == (
        Cache("compressed", 256, 1, 1, (own,), ratio=128, cell_bytes=24),
        Cache("compressor", 128, 1, 1, (state,), ratio=128),
    )


K0, K1 = kv("cache_k_l0", 512), kv("cache_k_l1", 512)


@named_cases(
    ("no cache", [], [K0], "cache_k_l0 is of no cache that its log names"),
    ("more layers", [cells(512, 1)], [K0, K1], "cache_k_l1 is of no cache that its log names"),
    ("another size", [cells(256, 1)], [K0], "cache_k_l0 is not of the cache of 256 cells that its log names"),
    ("name", [cells(512, 1)], [kv("cache_x_l0", 512)], "cache_x_l0 is none of the tensors of its caches"),
)
def test_what_does_not_belong_together_is_an_error(log: list[str], tensors: list[CacheTensor], what: str) -> None:
    with pytest.raises(LlamaCppError) as error:
        matched(log, tensors, CELL)
    assert str(error.value) == f"the caches of this build of llama.cpp are not known: {what}"


def test_only_the_last_context_counts() -> None:
    log = ["llama_context: constructing llama_context\n", "a", "llama_context: constructing llama_context\n", "b"]
    assert lines_of_context(log)[1:] == ["b"]
    assert lines_of_context(["a"]) == ["a"]


@cases(
    ("0.12.9", (0, False)), ("0.13.1", (8, False)), ("0.15.1", (8, True)), ("0.20.0", (8, True)), ("0.23.0", (12, True))
)
def test_what_a_version_writes_of_a_cell(ggml: str, expected: tuple[int, bool]) -> None:
    assert (position_bytes(ggml), leaves_out_what_is_masked(ggml)) == expected
