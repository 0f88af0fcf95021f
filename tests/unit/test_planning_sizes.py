"""What layers weigh by a recorded layout."""

from __future__ import annotations

from fitter.llama.types import LAYOUT_DEVICE, Layout, LayoutEntry
from fitter.planning.placing.layer_sizes import HOST, Item, Unit, units_of


def entry(name: str, size: int, kind: str = "model", where: str = LAYOUT_DEVICE) -> LayoutEntry:
    return LayoutEntry(where, name, kind, size)  # type: ignore[arg-type]


WEIGHTS = {
    "token_embd.weight": 5,
    "output.weight": 100,
    "rope_freqs.weight": 1,
    "enc.layer.0.weight": 9,
    "blk.0.attn_q.weight": 10,
    "blk.0.attn_q.bias": 3,
    "blk.0.ffn_up.weight": 33,
    "blk.0.ffn_up.bias": 1,
    "blk.1.ffn_down.weight": 64,
    "blk.1.ssm_in.weight": 20,
    "blk.1.scale": 8,
}
CACHES = {
    "cache_k_l0": 40,
    "cache_v_l0": 32,
    "cache_r_l1": 31,
    "cache_s_l1": 64,
    "cache_k_l1": 1,
    "cache_v_l1 (view)": 2,
    "cache_idx": 5,
}


def test_units_of_a_layout() -> None:
    """In steps of 32 bytes, without what is on the host; what is not named as tensors of a layer are is fixed there."""
    on_host = (entry("token_embd.weight", 7, where="CPU"), entry("cache_k_l0", 999, "context", "CPU"))
    weights = (entry(name, size) for name, size in WEIGHTS.items())
    caches = (entry(name, size, "context") for name, size in CACHES.items())
    pinned = {"blk.1.ffn_down.weight": HOST}
    found = units_of(Layout((*on_host, *weights, *caches), 32, 512), 2, lambda name: "ffn_" in name, pinned)
    query = Item(0, "blk.0.attn_q", ("weight", "bias"), 64)
    up = Item(0, "blk.0.ffn_up", ("weight", "bias"), 96)
    assert found == (Unit(0, 64, 96, (up,), 0, (query,)), Unit(1, 64, 160, (), 96, ()), Unit(2, 224, 32))


# --- what is left


# --- what is said
