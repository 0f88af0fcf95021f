"""Models with multi-head latent attention: keys and values are made of one small vector for each token."""

from __future__ import annotations

from fitter.model.shapes.common import (
    begin,
    ends,
    every,
    experts,
    feed_forward,
    following,
    is_tied,
    layers,
    norms,
    rope,
    rope_part,
)
from fitter.model.shapes.config import MOST_EXPERTS, Config
from fitter.model.shapes.moe import SIGMOID, SOFTMAX, predictor
from fitter.model.shapes.shape_header import Header


def deepseek2(c: Config) -> Header:
    """DeepSeek V2, V2-Lite, V3, R1 and V3.1, and Kimi K2; their layers for multi-token prediction are not converted."""
    c.value("num_nextn_predict_layers")
    return _latent(c, "deepseek2", next_layers=0)


def glm_lite(c: Config) -> Header:
    """GLM-4.7-Flash, with layers for multi-token prediction."""
    c.must_be("partial_rotary_factor", 1, 1.0)
    return _latent(c, "deepseek2", next_layers=following(c))


def glm_dsa(c: Config) -> Header:
    """GLM-5, whose attention first searches for relevant tokens, with layers for multi-token prediction."""
    c.value("indexer_rope_interleave", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    c.value("index_share_for_mtp_iteration")
    return _latent(c, "glm-dsa", next_layers=following(c), indexed=True)


def deepseek32(c: Config) -> Header:
    """DeepSeek V3.2, whose attention first searches for relevant tokens, with layers for multi-token prediction."""
    return _latent(c, "deepseek32", next_layers=following(c), indexed=True)


def _latent(c: Config, architecture: str, *, next_layers: int, indexed: bool = False) -> Header:
    c.must_be("hidden_act", "silu")
    c.must_be("attention_bias", False)
    c.must_be("moe_layer_freq", 1)
    n_head, n_layer, n_embd = c.count("num_attention_heads", most=1 << 16), layers(c), c.count("hidden_size")
    c.value("num_key_value_heads", "qk_head_dim", "head_dim", "ep_size", "rope_interleave", "moe_router_dtype")
    q_rank = c.count("q_lora_rank", least=1) if indexed else c.count("q_lora_rank", default=0, least=0)
    kv_rank, turned, plain = c.count("kv_lora_rank"), c.count("qk_rope_head_dim"), c.count("qk_nope_head_dim")
    h = begin(c, architecture)
    n_dense, n_expert = _leading_dense(c, n_layer), c.count("n_routed_experts", most=MOST_EXPERTS)
    h.keys(
        vocab_size=c.count("vocab_size"),
        block_count=n_layer + next_layers,
        context_length=c.count("max_position_embeddings"),
        embedding_length=n_embd,
        feed_forward_length=c.count("intermediate_size"),
        attention__head_count=n_head,
        attention__head_count_kv=1,
        attention__layer_norm_rms_epsilon=c.number("rms_norm_eps", default=1e-6),
        attention__key_length=kv_rank + turned,
        attention__value_length=kv_rank,
        attention__key_length_mla=plain + turned,
        attention__value_length_mla=c.count("v_head_dim"),
        attention__q_lora_rank=q_rank or None,
        attention__kv_lora_rank=kv_rank,
        rope__dimension_count=turned,
        leading_dense_block_count=n_dense,
        expert_count=n_expert,
        expert_used_count=c.count("num_experts_per_tok", most=n_expert),
        expert_group_count=c.count("n_group", default=0, least=0) or None,
        expert_group_used_count=c.count("topk_group", default=0, least=0) or None,
        expert_gating_func=_expert_weighting(c)[0],
        expert_feed_forward_length=c.count("moe_intermediate_size"),
        expert_shared_count=c.count("n_shared_experts", default=0, least=0),
        expert_weights_scale=c.number("routed_scaling_factor", default=1.0),
        expert_weights_norm=c.flag("norm_topk_prob", False),
        nextn_predict_layers=next_layers or None,
    )
    rope(c, h, turned)
    if (part := rope_part(c)) is not None and part.has("mscale_all_dim"):
        h.key("rope.scaling.yarn_log_multiplier", 0.1 * part.number("mscale_all_dim"))
    if indexed:
        _indexer(c, h, n_layer)
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer + next_layers):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        _attention(c, h, b)
        if indexed:
            # the files have an indexer even for layers that share another's
            _index(c, h, b, q_rank)
        if i < n_dense:
            feed_forward(c, h, b)
        else:
            _experts(c, h, b)
        if i >= n_layer:
            predictor(h, b, n_embd)
    return h


def _experts(c: Config, h: Header, b: str) -> None:
    n_ff, n_shared = c.count("moe_intermediate_size"), c.count("n_shared_experts", default=0, least=0)
    experts(c, h, b, c.count("n_routed_experts"), n_ff, probability_bias=_expert_weighting(c)[1])
    if n_shared:
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")


def _attention(c: Config, h: Header, b: str) -> None:
    n_embd, n_head, q_rank = c.count("hidden_size"), c.count("num_attention_heads"), h.number("attention.q_lora_rank")
    kv_rank, turned, plain = c.count("kv_lora_rank"), c.count("qk_rope_head_dim"), c.count("qk_nope_head_dim")
    n_v = c.count("v_head_dim")
    if q_rank:
        h.weight(f"{b}.attn_q_a", n_embd, q_rank)
        h.weight(f"{b}.attn_q_a_norm", q_rank)
        h.weight(f"{b}.attn_q_b", q_rank, n_head * (plain + turned))
    else:
        h.weight(f"{b}.attn_q", n_embd, n_head * (plain + turned))
    h.weight(f"{b}.attn_kv_a_mqa", n_embd, kv_rank + turned)
    h.weight(f"{b}.attn_kv_a_norm", kv_rank)
    h.weight(f"{b}.attn_k_b", plain, kv_rank, n_head)
    h.weight(f"{b}.attn_v_b", kv_rank, n_v, n_head)
    h.weight(f"{b}.attn_output", n_head * n_v, n_embd)


def _expert_weighting(c: Config) -> tuple[int, bool]:
    """Return llama.cpp's number for how the router weighs experts, and whether a bias corrects it."""
    how = c.text("scoring_func", "softmax" if c.text("topk_method", "greedy") != "noaux_tc" else "sigmoid")
    if how not in ("softmax", "sigmoid"):
        raise c.unknown(f"a scoring_func '{how}'")
    has_bias = c.text("topk_method", "noaux_tc" if how == "sigmoid" else "greedy") == "noaux_tc"
    return (SIGMOID if how == "sigmoid" else SOFTMAX), has_bias


def _leading_dense(c: Config, n_layer: int) -> int:
    """Return how many of the first layers have no experts."""
    kinds = every(c, "mlp_layer_types", n_layer, ("dense", "sparse"))
    if kinds is None:
        return c.count("first_k_dense_replace", default=0, least=0)
    n_dense = kinds.count("dense")
    if kinds != sorted(kinds) or c.count("first_k_dense_replace", default=n_dense, least=0) != n_dense:
        raise c.unknown("dense layers that are not the first ones")
    return n_dense


def _indexer(c: Config, h: Header, n_layer: int) -> None:
    """Write the metadata of the search for relevant tokens."""
    h.keys(
        attention__indexer__head_count=c.count("index_n_heads"),
        attention__indexer__key_length=c.count("index_head_dim"),
        attention__indexer__top_k=c.count("index_topk"),
    )
    if (kinds := every(c, "indexer_types", n_layer, ("full", "shared"))) is not None:
        h.key("attention.indexer.types", [each == "full" for each in kinds])


def _index(c: Config, h: Header, b: str, q_rank: int) -> None:
    n_embd, n_head, size = c.count("hidden_size"), c.count("index_n_heads"), c.count("index_head_dim")
    h.weight(f"{b}.indexer.attn_k", n_embd, size)
    h.weight(f"{b}.indexer.attn_q_b", q_rank, n_head * size)
    h.weight(f"{b}.indexer.k_norm", size)
    h.bias(f"{b}.indexer.k_norm", size)
    h.weight(f"{b}.indexer.proj", n_embd, n_head)
