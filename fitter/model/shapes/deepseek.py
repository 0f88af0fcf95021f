"""Models with latent attention: keys and values are one small vector for each token, or are made of it."""

from __future__ import annotations

from collections.abc import Sequence

from fitter.model.shapes.common import (
    ShapeHeader,
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


def deepseek2(c: Config) -> ShapeHeader:
    """DeepSeek V2, V2-Lite, V3, R1 and V3.1, and Kimi K2; their layers for multi-token prediction are not converted."""
    c.value("num_nextn_predict_layers")
    return _latent(c, "deepseek2", next_layers=0)


def glm_lite(c: Config) -> ShapeHeader:
    """GLM-4.7-Flash, with layers for multi-token prediction."""
    c.must_be(partial_rotary_factor=1)
    return _latent(c, "deepseek2", next_layers=following(c))


def glm_dsa(c: Config) -> ShapeHeader:
    """GLM-5, whose attention first searches for relevant tokens, with layers for multi-token prediction."""
    c.value("indexer_rope_interleave", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    c.value("index_share_for_mtp_iteration")
    return _latent(c, "glm-dsa", next_layers=following(c), indexed=True)


def deepseek32(c: Config) -> ShapeHeader:
    """DeepSeek V3.2, whose attention first searches for relevant tokens, with layers for multi-token prediction."""
    return _latent(c, "deepseek32", next_layers=following(c), indexed=True)


def _latent(c: Config, architecture: str, *, next_layers: int, indexed: bool = False) -> ShapeHeader:
    c.must_be(hidden_act="silu", attention_bias=False, moe_layer_freq=1)
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


def _experts(c: Config, h: ShapeHeader, b: str) -> None:
    n_ff, n_shared = c.count("moe_intermediate_size"), c.count("n_shared_experts", default=0, least=0)
    experts(c, h, b, c.count("n_routed_experts"), n_ff, probability_bias=_expert_weighting(c)[1])
    if n_shared:
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")


def _attention(c: Config, h: ShapeHeader, b: str) -> None:
    n_embd, n_head, q_rank = c.count("hidden_size"), c.count("num_attention_heads"), h.number("attention.q_lora_rank")
    kv_rank, plain = c.count("kv_lora_rank"), c.count("qk_nope_head_dim")
    turned = c.count("qk_rope_head_dim", least=0)
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


def _indexer(c: Config, h: ShapeHeader, n_layer: int) -> None:
    """Write the metadata of the search for relevant tokens."""
    h.keys(
        attention__indexer__head_count=c.count("index_n_heads"),
        attention__indexer__key_length=c.count("index_head_dim"),
        attention__indexer__top_k=c.count("index_topk"),
    )
    if (kinds := every(c, "indexer_types", n_layer, ("full", "shared"))) is not None:
        h.key("attention.indexer.types", [each == "full" for each in kinds])


def _index(c: Config, h: ShapeHeader, b: str, q_rank: int) -> None:
    n_embd, n_head, size = c.count("hidden_size"), c.count("index_n_heads"), c.count("index_head_dim")
    h.weight(f"{b}.indexer.attn_k", n_embd, size)
    h.weight(f"{b}.indexer.attn_q_b", q_rank, n_head * size)
    h.weight(f"{b}.indexer.k_norm", size)
    h.bias(f"{b}.indexer.k_norm", size)
    h.weight(f"{b}.indexer.proj", n_embd, n_head)


_SQRT_SOFTPLUS = 4
"""llama.cpp's number for how the router of DeepSeek V4 weighs experts."""
_OF_FP8 = "q8_0"
"""What the converter makes of DeepSeek V4's matrices in FP8."""


def deepseek4(c: Config) -> ShapeHeader:
    """DeepSeek V4, published with experts in MXFP4 and most other matrices in FP8.

    Its layer for multi-token prediction makes a file of its own.
    """
    c.must_be(hidden_act="silu", attention_bias=False, num_key_value_heads=1, topk_method="noaux_tc")
    c.must_be(scoring_func="sqrtsoftplus", expert_dtype="fp4")
    c.value("num_nextn_predict_layers")
    n_layer, n_embd, head = layers(c), c.count("hidden_size"), c.count("head_dim")
    n_head, q_rank, turned = c.count("num_attention_heads", most=1 << 16), c.count("q_lora_rank"), _turned(c)
    n_expert, n_vocab = c.count("n_routed_experts", most=MOST_EXPERTS), c.count("vocab_size")
    n_used, n_hashed = c.count("num_experts_per_tok", most=n_expert), c.count("num_hash_layers", least=0, most=n_layer)
    ratios = c.counts("compress_ratios", len(c.numbers("compress_ratios") or ()))
    if len(ratios) < n_layer or set(ratios) - {0, 4, 128}:
        raise c.unknown("compress_ratios other than 0, 4 or 128 for each layer")
    n_group, o_rank, n_stream = c.count("o_groups", most=n_head), c.count("o_lora_rank"), c.count("hc_mult", most=64)
    n_ff, n_shared = c.count("moe_intermediate_size"), c.count("n_shared_experts")
    h = begin(c, "deepseek4")
    h.keys(
        vocab_size=n_vocab,
        block_count=n_layer,
        context_length=c.count("max_position_embeddings"),
        embedding_length=n_embd,
        embedding_length_out=n_embd * n_stream,
        attention__head_count=n_head,
        attention__head_count_kv=1,
        attention__layer_norm_rms_epsilon=c.number("rms_norm_eps", default=1e-6),
        attention__key_length=head,
        attention__value_length=head,
        attention__q_lora_rank=q_rank,
        attention__sliding_window=c.count("sliding_window"),
        attention__output_group_count=n_group,
        attention__output_lora_rank=o_rank,
        attention__compress_ratios=ratios,
        attention__compress_rope_freq_base=c.number("compress_rope_theta"),
        rope__dimension_count=turned,
        expert_count=n_expert,
        expert_used_count=n_used,
        expert_gating_func=_SQRT_SOFTPLUS,
        expert_feed_forward_length=n_ff,
        expert_shared_count=n_shared,
        expert_weights_scale=c.number("routed_scaling_factor"),
        expert_weights_norm=c.flag("norm_topk_prob"),
        hash_layer_count=n_hashed,
    )
    _streams_and_clamps(c, h, n_layer)
    rope(c, h, turned)
    _indexer(c, h, n_layer)
    ends(c, h, tied=is_tied(c, False))
    h.weight("output_hc_fn", n_stream * n_embd, n_stream, type="f32")
    h.weight("output_hc_base", n_stream)
    h.weight("output_hc_scale", 1)
    n_index, index = c.count("index_n_heads"), c.count("index_head_dim")
    for i, ratio in enumerate(ratios[:n_layer]):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        _streams(h, b, n_embd, n_stream)
        h.weight(f"{b}.attn_sinks", n_head)
        h.weight(f"{b}.attn_q_a", n_embd, q_rank, type=_OF_FP8)
        h.weight(f"{b}.attn_q_a_norm", q_rank)
        h.weight(f"{b}.attn_q_b", q_rank, n_head * head, type=_OF_FP8)
        h.weight(f"{b}.attn_kv", n_embd, head, type=_OF_FP8)
        h.weight(f"{b}.attn_kv_a_norm", head)
        h.weight(f"{b}.attn_output_a", n_head * head // n_group, n_group * o_rank, type=_OF_FP8)
        h.weight(f"{b}.attn_output_b", n_group * o_rank, n_embd, type=_OF_FP8)
        if ratio:
            _compressor(h, f"{b}.attn_compressor", n_embd, head, ratio)
        if ratio == 4:
            _compressor(h, f"{b}.indexer_compressor", n_embd, index, ratio)
            h.weight(f"{b}.indexer.attn_q_b", q_rank, n_index * index, type=_OF_FP8)
            h.weight(f"{b}.indexer.proj", n_embd, n_index, type=h.type)
        # published in BF16, which this converter keeps
        h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert, type=h.type)
        if i < n_hashed:
            h.weight(f"{b}.ffn_gate_tid2eid", n_used, n_vocab, type="i32")
        else:
            h.bias(f"{b}.exp_probs_b", n_expert)
        for name, row, rows in (("gate", n_embd, n_ff), ("up", n_embd, n_ff), ("down", n_ff, n_embd)):
            h.weight(f"{b}.ffn_{name}_exps", row, rows, n_expert, type="mxfp4")
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp", type=_OF_FP8)
    return h


def _turned(c: Config) -> int:
    return c.count("qk_rope_head_dim", most=c.count("head_dim"))


def _compressor(h: ShapeHeader, name: str, n_embd: int, size: int, ratio: int) -> None:
    """Add what makes one vector of ``ratio`` tokens; with few tokens, of those before them too."""
    rows = 2 * size if ratio == 4 else size
    h.weight(f"{name}_kv", n_embd, rows)
    h.weight(f"{name}_gate", n_embd, rows)
    h.weight(f"{name}_ape", rows, ratio, type="f32")
    h.weight(f"{name}_norm", size)


def _streams(h: ShapeHeader, b: str, n_embd: int, n_stream: int) -> None:
    """Add what mixes the streams of residuals (hyper-connections) of a layer."""
    n_mix = (2 + n_stream) * n_stream
    for name in ("attn", "ffn"):
        h.weight(f"{b}.hc_{name}_fn", n_stream * n_embd, n_mix, type="f32")
        h.weight(f"{b}.hc_{name}_base", n_mix)
        h.weight(f"{b}.hc_{name}_scale", 3)


def _streams_and_clamps(c: Config, h: ShapeHeader, n_layer: int) -> None:
    clamps = [c.number("swiglu_limit")] * n_layer
    h.keys(
        hyper_connection__count=c.count("hc_mult", most=64),
        hyper_connection__sinkhorn_iterations=c.count("hc_sinkhorn_iters"),
        hyper_connection__epsilon=c.number("hc_eps"),
        swiglu_clamp_exp=clamps,
        swiglu_clamp_shexp=clamps,
    )


_SPARSE, _LINEAR = "deepseek_sparse_attention", "linear_attention"


def glm5_next(c: Config) -> ShapeHeader:
    """GLM-5.3-Flash: three layers of four have a state, the fourth searches for relevant tokens."""
    c.must_be(hidden_act="silu", attention_bias=False, mla_use_nope=True, mhc=True, index_kpool_compress=True)
    c.must_be(moe_layer_freq=1)
    c.value("num_key_value_heads", "qk_head_dim", "head_dim", "indexer_rope_interleave", "rope_interleave")
    c.value("moe_router_dtype", "rope_parameters", "rope_theta", "index_topk_freq", "index_skip_topk_offset")
    n_layer, n_next, n_embd = layers(c), following(c), c.count("hidden_size")
    n_head = c.count("num_attention_heads")
    kinds = every(c, "layer_types", n_layer, (_SPARSE, _LINEAR))
    if kinds is None:
        raise c.error("has no layer_types: add them")
    has_state = [*(each == _LINEAR for each in kinds), *([False] * n_next)]
    # multi-token prediction shares the indexer's metadata, which has no entry for its layer
    if any(each == "shared" for each in every(c, "indexer_types", n_layer, ("full", "shared")) or ()):
        raise c.unknown("indexer_types with shared ones")
    kpool, n_stream, index = c.count("index_kpool"), c.count("hc_mult", most=64), c.count("index_head_dim")
    h = begin(c, "glm5-next")
    _linear_part(c, h, has_state)
    h.keys(
        expert_group_count=c.count("n_group"),
        expert_group_used_count=c.count("topk_group"),
        expert_shared_count=c.count("n_shared_experts"),
        expert_weights_norm=c.flag("norm_topk_prob"),
        leading_dense_block_count=_leading_dense(c, n_layer),
        attention__layer_norm_epsilon=1e-6,
        attention__indexer__kpool=kpool,
        attention__indexer__kpool_select_tail=c.flag("index_kpool_always_select_tail", False),
        nextn_predict_layers=n_next or None,
    )
    _streams_and_clamps(c, h, n_layer + n_next)
    _indexer(c, h, n_layer)
    ends(c, h, tied=is_tied(c, False))
    for i, is_linear in enumerate(has_state):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        if i < n_layer:
            _streams(h, b, n_embd, n_stream)
        if is_linear:
            _delta(c, h, b)
            for name in ("f", "g"):
                _low_rank(h, f"{b}.ssm_{name}", n_embd, n_head * h.number("kda.head_dim"))
        else:
            _attention(c, h, b)
            _index(c, h, b, h.number("attention.q_lora_rank"))
            h.weight(f"{b}.indexer_compressor_gate", n_embd, index, type="f32")
            h.weight(f"{b}.indexer_compressor_ape", index, kpool, type="f32")
        if i < h.number("leading_dense_block_count"):
            feed_forward(c, h, b)
        else:
            _experts(c, h, b)
        if i >= n_layer:
            predictor(h, b, n_embd)
    return h


def kimi_k3(c: Config) -> ShapeHeader:
    """The text part of Kimi K3: experts between smaller vectors, in MXFP4, and residuals over several layers."""
    c.must_be(hidden_act="situ", mla_use_nope=True, mla_use_output_gate=True, latent_moe_use_norm=True)
    c.must_be(moe_layer_freq=1, moe_router_activation_func="sigmoid", num_nextn_predict_layers=0)
    c.value("num_key_value_heads", "num_expert_group", "topk_group", "topk_method", "use_grouped_topk")
    n_layer, n_embd, n_head = layers(c), c.count("hidden_size"), c.count("num_attention_heads")
    part = c.part("linear_attn_config")
    full = (part.numbers("full_attn_layers") if part is not None else None) or ()
    if part is None or part.flag("use_full_rank_gate", False) is False:
        raise c.unknown("no linear_attn_config with use_full_rank_gate")
    has_state = [i + 1 not in full for i in range(n_layer)]
    h = begin(c, "kimi-k3")
    _linear_part(c, h, has_state)
    n_expert, n_ff = c.count("num_experts", most=MOST_EXPERTS), c.count("moe_intermediate_size")
    n_shared, n_dense = c.count("num_shared_experts"), c.count("first_k_dense_replace", least=0)
    latent, packed = c.count("routed_expert_hidden_size"), c.part("quantization_config")
    kind = "mxfp4" if packed is not None and packed.text("format", "") == "mxfp4-pack-quantized" else None
    h.keys(
        expert_shared_count=n_shared,
        expert_weights_norm=c.flag("moe_renormalize"),
        expert_latent_length=latent,
        leading_dense_block_count=n_dense,
        activation__situ_beta=c.number("activation_situ_beta"),
        activation__situ_linear_beta=c.number("activation_situ_linear_beta"),
        attn_res__block_size=c.count("attn_res_block_size"),
    )
    ends(c, h, tied=is_tied(c, False))
    h.weight("output_res_score", n_embd)
    for i, is_linear in enumerate(has_state):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm", "attn_res_score", "ffn_res_score")
        if is_linear:
            _delta(c, h, b)
            _low_rank(h, f"{b}.ssm_f", n_embd, n_head * h.number("kda.head_dim"))
            h.weight(f"{b}.ssm_g", n_embd, n_head * h.number("kda.head_dim"))
        else:
            _attention(c, h, b)
            h.weight(f"{b}.attn_gate", n_embd, n_head * c.count("v_head_dim"))
        if i < n_dense:
            feed_forward(c, h, b)
            continue
        h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert)
        h.bias(f"{b}.exp_probs_b", n_expert)
        for name, row, rows in (("gate", latent, n_ff), ("up", latent, n_ff), ("down", n_ff, latent)):
            h.weight(f"{b}.ffn_{name}_exps", row, rows, n_expert, type=kind)
        h.weight(f"{b}.ffn_routed_down", n_embd, latent)
        h.weight(f"{b}.ffn_routed_up", latent, n_embd)
        h.weight(f"{b}.ffn_routed_norm", latent)
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")
    return h


def _linear_part(c: Config, h: ShapeHeader, has_state: Sequence[bool]) -> None:
    """Write the metadata of models that describe their layers with a state in an object."""
    part = c.part("linear_attn_config")
    if part is None:
        raise c.error("has no linear_attn_config: add it")
    part.value("kda_layers", "full_attn_layers", "num_heads", "use_full_rank_gate")
    part.must_be(num_heads=c.count("num_attention_heads", most=1 << 16))
    _mixed(c, h, has_state, conv=part.count("short_conv_kernel_size"), size=part.count("head_dim"))
    h.key("kda.gate_lower_bound", part.number("gate_lower_bound") if part.has("gate_lower_bound") else None)


def _mixed(c: Config, h: ShapeHeader, has_state: Sequence[bool], *, conv: int, size: int) -> None:
    """Write the metadata of models with latent attention in some layers and a state in the others."""
    kv_rank, turned, plain = c.count("kv_lora_rank"), c.count("qk_rope_head_dim", least=0), c.count("qk_nope_head_dim")
    n_expert = c.count("n_routed_experts", "num_experts", most=MOST_EXPERTS)
    h.keys(
        vocab_size=c.count("vocab_size"),
        block_count=len(has_state),
        context_length=c.count("max_position_embeddings"),
        embedding_length=c.count("hidden_size"),
        feed_forward_length=c.count("intermediate_size"),
        attention__head_count=c.count("num_attention_heads"),
        attention__head_count_kv=[0 if each else 1 for each in has_state],
        attention__layer_norm_rms_epsilon=c.number("rms_norm_eps", default=1e-6),
        attention__key_length=kv_rank + turned,
        attention__value_length=kv_rank,
        attention__key_length_mla=plain + turned,
        attention__value_length_mla=c.count("v_head_dim"),
        attention__q_lora_rank=c.count("q_lora_rank"),
        attention__kv_lora_rank=kv_rank,
        rope__dimension_count=turned,
        ssm__conv_kernel=conv,
        kda__head_dim=size,
        expert_count=n_expert,
        expert_used_count=c.count("num_experts_per_tok", "num_experts_per_token", most=n_expert),
        expert_feed_forward_length=c.count("moe_intermediate_size"),
        expert_gating_func=SIGMOID,
        expert_weights_scale=c.number("routed_scaling_factor"),
    )


def _delta(c: Config, h: ShapeHeader, b: str, *, rows: tuple[int, ...] = ()) -> None:
    """Add a layer with a state that decays by channel (KDA), but for its gates; ``rows``: first sizes of ``ssm_a``."""
    n_embd, n_head = c.count("hidden_size"), c.count("num_attention_heads")
    size, conv = h.number("kda.head_dim"), h.number("ssm.conv_kernel")
    inner = n_head * size
    for name in "qkv":
        h.weight(f"{b}.ssm_conv1d_{name}", conv, 1, inner)
        h.weight(f"{b}.attn_{name}", n_embd, inner)
    h.weight(f"{b}.ssm_beta", n_embd, n_head)
    h.tensor(f"{b}.ssm_a", *rows, n_head)
    h.bias(f"{b}.ssm_dt", inner)
    h.weight(f"{b}.ssm_norm", size)
    h.weight(f"{b}.attn_output", inner, n_embd)


def _low_rank(h: ShapeHeader, name: str, n_embd: int, inner: int) -> None:
    h.weight(f"{name}_a", n_embd, h.number("kda.head_dim"))
    h.weight(f"{name}_b", h.number("kda.head_dim"), inner)


def bailing_moe3(c: Config) -> ShapeHeader:
    """Ling 3.0: three layers of four have a state."""
    c.must_be(hidden_act="silu", use_qkv_bias=False, use_bias=False, no_kda_lora=True, kda_safe_gate=True)
    c.must_be(gated_attention_proj_granularity_type="head_wise", scoring_func="sigmoid", topk_method="noaux_tc")
    c.must_be(moe_router_enable_expert_bias=True, num_nextn_predict_layers=0)
    c.value("num_key_value_heads", "qk_head_dim", "rope_interleave")
    n_layer, n_embd, n_head = layers(c), c.count("hidden_size"), c.count("num_attention_heads", most=1 << 16)
    group = c.count("layer_group_size")
    has_state = [(i + 1) % group != 0 and i < n_layer // group * group for i in range(n_layer)]
    h = begin(c, "bailingmoe3")
    _mixed(c, h, has_state, conv=c.count("short_conv_kernel_size"), size=c.count("head_dim"))
    n_dense, n_expert = c.count("first_k_dense_replace", least=0), c.count("num_experts", most=MOST_EXPERTS)
    n_shared = c.count("num_shared_experts", default=1)
    shared = c.count("moe_shared_expert_intermediate_size")
    h.keys(
        attention__value_length=c.count("v_head_dim"),
        kda__safe_gate=True,
        kda__gate_lower_bound=c.number("kda_lower_bound"),
        expert_group_count=c.count("n_group"),
        expert_group_used_count=c.count("topk_group"),
        expert_shared_count=n_shared,
        expert_shared_feed_forward_length=shared,
        expert_weights_norm=c.flag("norm_topk_prob", True),
        leading_dense_block_count=n_dense,
    )
    rope(c, h, h.number("rope.dimension_count"))
    ends(c, h, tied=is_tied(c, False))
    for i, is_linear in enumerate(has_state):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        if is_linear:
            _delta(c, h, b, rows=(1,))
            for name in ("f", "g"):
                h.weight(f"{b}.ssm_{name}_a", n_embd, n_head * h.number("kda.head_dim"))
        else:
            _attention(c, h, b)
            h.weight(f"{b}.attn_gate", n_embd, n_head)
        if i < n_dense:
            feed_forward(c, h, b)
        else:
            experts(c, h, b, n_expert, c.count("moe_intermediate_size"), probability_bias=True)
            feed_forward(c, h, b, shared, suffix="_shexp")
    return h
