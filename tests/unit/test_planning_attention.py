"""Attention of a layer, from the caches of a recorded layout and the header."""

from __future__ import annotations

import pytest

from fitter.llama.types import LAYOUT_DEVICE, Array, Layout, LayoutEntry, MetadataValue
from fitter.planning.attention import attentions
from fitter.planning.cost import Attention

N_CTX = 4096


def layout(*caches: tuple[str, int]) -> Layout:
    weight = LayoutEntry(LAYOUT_DEVICE, "blk.0.attn_k.weight", "model", 12345)
    return Layout((weight, *(LayoutEntry(LAYOUT_DEVICE, name, "context", size) for name, size in caches)), 128, N_CTX)


def header(**keys: MetadataValue) -> dict[str, MetadataValue]:
    named = {f"a.{key.replace('__', '.')}": value for key, value in keys.items()}
    return {"general.architecture": "a", "a.embedding_length": 1024, **named}


GROUPED = {"attention__head_count": 8, "attention__head_count_kv": 2}


def test_grouped_query_attention() -> None:
    # 2 KV heads of 128 in f16 are 512 bytes a token, for K and for V
    found = attentions(layout(("cache_k_l0", 512 * N_CTX), ("cache_v_l0", 512 * N_CTX)), header(**GROUPED), 1)
    assert found == (Attention(kv_bytes=1024, flops=2 * 8 * 256, sharing=4),)


def test_quantized_without_flash_attention() -> None:
    size = 2 * 128 * 34 // 32 * N_CTX
    caches = layout(("cache_k_l0", size), ("cache_v_l0", size))
    (found,) = attentions(caches, header(**GROUPED), 1, "q8_0", "q8_0", flash_attn=False)
    assert found == Attention(kv_bytes=2 * 272, flops=2 * 8 * 256, sharing=4, quantized=True, flash=False)


def test_latent_attention_shares_no_head() -> None:
    keys = {"attention__key_length": 576, "attention__value_length": 512}
    caches = layout(("cache_k_l0", 1152 * N_CTX))
    (found,) = attentions(caches, header(attention__head_count=16, attention__head_count_kv=1, **keys), 1)
    assert found == Attention(kv_bytes=1152, flops=2 * 16 * 1088, sharing=1)


@pytest.mark.parametrize(("cells", "window"), [(N_CTX - 1, 1024), (N_CTX, 0)])
def test_a_short_cache_is_a_window(cells: int, window: int) -> None:
    caches = layout(("cache_k_l0", 512 * cells), ("cache_v_l0", 512 * cells))
    (found,) = attentions(caches, header(attention__sliding_window=1024, **GROUPED), 1)
    assert found is not None
    assert (found.window, found.kv_bytes) == (window, 1024)


def test_layers_without_a_kv_cache() -> None:
    heads = Array("i32", 3, (8, 8, 8))
    kv_heads = Array("i32", 3, (0, 4, 0))
    caches = layout(
        ("cache_r_l0", 999), ("cache_s_l0", 999), ("cache_k_l1", 1024 * N_CTX), ("cache_v_l1", 1024 * N_CTX)
    )
    found = attentions(caches, header(attention__head_count=heads, attention__head_count_kv=kv_heads), 3)
    assert found == (None, Attention(kv_bytes=2048, flops=2 * 8 * 256, sharing=2), None)


def test_a_header_that_says_nothing() -> None:
    assert attentions(layout(("cache_k_l0", 512)), {}, 1) == (None,)
