"""Models with routed experts."""

from __future__ import annotations

from fitter.model.shapes.common import (
    ShapeHeader,
    attention,
    begin,
    blocks,
    dimensions,
    ends,
    every,
    experts,
    feed_forward,
    following,
    heads,
    is_tied,
    layers,
    norms,
    rope,
    rotary,
    routed,
    start,
)
from fitter.model.shapes.config import Config
from fitter.model.shapes.llama import FULL, SLIDING, scales, seeing

SOFTMAX, SIGMOID = 1, 2
"""Numbers of llama.cpp's for how a router weighs experts."""


def qwen2moe(c: Config) -> ShapeHeader:
    """Qwen1.5-MoE and Qwen2-57B-A14B, with one shared expert that is gated."""
    return _qwen(c, "qwen2moe", bias=True)


def qwen3moe(c: Config) -> ShapeHeader:
    """Qwen3 with experts."""
    c.must_be(attention_bias=False)
    return _qwen(c, "qwen3moe", bias=False)


def qwen3vlmoe(c: Config) -> ShapeHeader:
    """The text part of Qwen3-VL with experts, whose first layers also take features of images."""
    c.must_be(attention_bias=False)
    return seeing(c, _qwen(c, "qwen3vlmoe", bias=False))


def _qwen(c: Config, architecture: str, *, bias: bool) -> ShapeHeader:
    c.must_be(decoder_sparse_step=1, mlp_only_layers=[], qkv_bias=bias)
    c.value("sliding_window", "max_window_layers", "norm_topk_prob", "use_qk_norm", "shared_expert_intermediate_size")
    if c.flag("use_sliding_window", False):
        raise c.unknown("use_sliding_window true")
    every(c, "layer_types", layers(c), (FULL,))
    h = start(c, architecture, writes_turned=False)
    n_expert, n_ff = routed(c, h)
    n_embd = c.count("hidden_size")
    shared = c.count("shared_expert_intermediate_size", default=0, least=0) if bias else 0
    h.key("expert_shared_feed_forward_length", shared or None)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        attention(c, h, b, qkv_bias=bias, head_norm=not bias)
        experts(c, h, b, n_expert, n_ff)
        if shared:
            h.weight(f"{b}.ffn_gate_inp_shexp", n_embd)
            feed_forward(c, h, b, shared, suffix="_shexp")
    return h


def olmoe(c: Config) -> ShapeHeader:
    """OLMoE, with norms of queries and keys over all heads."""
    c.must_be(attention_bias=False, clip_qkv=())
    c.value("norm_topk_prob")
    h = start(c, "olmoe", writes_turned=False)
    n_expert, n_ff = routed(c, h)
    n_head, n_head_kv, head = heads(c)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b)
        h.weight(f"{b}.attn_q_norm", n_head * head)
        h.weight(f"{b}.attn_k_norm", n_head_kv * head)
        experts(c, h, b, n_expert, n_ff)
    return h


def minimax_m2(c: Config) -> ShapeHeader:
    """MiniMax-M2, with norms of queries and keys over all heads."""
    c.must_be(scoring_func="sigmoid")
    c.value("use_mtp", "mtp_transformer_layers", "num_mtp_modules")
    c.must_be(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, shared_intermediate_size=0)
    c.value("shared_moe_mode", "mlp_intermediate_size")
    n_head, n_head_kv, head = heads(c)
    if any(each != 1 for each in c.numbers("attn_type_list") or ()):
        raise c.unknown("an attn_type_list with other attention")
    h = begin(c, "minimax-m2")
    c.must_be(hidden_act="silu")
    dimensions(c, h)
    size = c.count("rotary_dim", default=rotary(c, head))
    h.keys(rope__dimension_count=size, expert_gating_func=SIGMOID)
    rope(c, h, size)
    n_expert, n_ff = routed(c, h)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b)
        h.weight(f"{b}.attn_q_norm", n_head * head)
        h.weight(f"{b}.attn_k_norm", n_head_kv * head)
        experts(c, h, b, n_expert, n_ff, probability_bias=True)
    return h


def minimax_m3(c: Config) -> ShapeHeader:
    """MiniMax-M3, whose attention reads the blocks that an indexer chooses; the first layers are dense."""
    c.must_be(hidden_act="swigluoai", scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_head")
    c.must_be(use_routing_bias=True, use_gemma_norm=True, attention_output_gate=False)
    # the converter has no layers for multi-token prediction
    c.value("num_mtp_modules", "num_nextn_predict_layers", "use_mtp", "swiglu_alpha", "swiglu_limit")
    n_layer, n_embd = layers(c), c.count("hidden_size")
    sparse = [each != 0 for each in c.counts("moe_layer_freq", n_layer)]
    if sparse != sorted(sparse):
        raise c.unknown("dense layers that are not the first ones")
    n_dense, part = sparse.count(False), c.part("sparse_attention_config")
    if part is None or [each != 0 for each in part.counts("sparse_attention_freq", n_layer)] != sparse:
        raise c.unknown("layers with experts and without sparse attention")
    part.must_be(use_sparse_attention=True)
    part.value("sparse_disable_index_value", "sparse_score_type", "sparse_init_block")
    h = begin(c, "minimax-m3")
    dimensions(c, h)
    n_head_index, index = part.count("sparse_num_index_heads"), part.count("sparse_index_dim")
    size = c.count("rotary_dim", default=rotary(c, heads(c)[2]))
    rope(c, h, size)
    n_expert, n_ff = routed(c, h)
    n_shared = c.count("n_shared_experts")
    c.must_be(shared_intermediate_size=n_shared * n_ff)
    h.keys(
        feed_forward_length=c.count("dense_intermediate_size"),
        rope__dimension_count=size,
        leading_dense_block_count=n_dense,
        expert_gating_func=SIGMOID,
        expert_shared_count=n_shared,
        expert_weights_scale=c.number("routed_scaling_factor"),
        expert_weights_norm=True,
        attention__indexer__head_count=n_head_index,
        attention__indexer__key_length=index,
        attention__indexer__top_k=part.count("sparse_topk_blocks"),
        attention__indexer__block_size=part.count("sparse_block_size"),
        attention__indexer__local_blocks=part.count("sparse_local_block"),
    )
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        attention(c, h, b, head_norm=True)
        if i < n_dense:
            feed_forward(c, h, b, c.count("dense_intermediate_size"))
            continue
        experts(c, h, b, n_expert, n_ff, probability_bias=True)
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")
        h.weight(f"{b}.indexer.q_proj", n_embd, n_head_index * index, type="f32")
        h.weight(f"{b}.indexer.k_proj", n_embd, index, type="f32")
        norms(h, b, index, "indexer.q_norm", "indexer.k_norm")
    return h


def gpt_oss(c: Config) -> ShapeHeader:
    """gpt-oss, whose experts are published and kept in MXFP4; every other layer has a sliding window."""
    c.must_be(hidden_act="silu", attention_bias=True)
    c.value("swiglu_limit", "swiglu_alpha", "experts_per_token", "initial_context_length")
    n_layer = layers(c)
    kinds = every(c, "layer_types", n_layer, (SLIDING, FULL))
    if kinds is not None and kinds != [FULL if i % 2 else SLIDING for i in range(n_layer)]:
        raise c.unknown("layer_types in another order than one with a window and one without")
    h = begin(c, "gpt-oss")
    dimensions(c, h)
    n_head, _, head = heads(c)
    rope(c, h, head)
    h.key("attention.sliding_window", c.count("sliding_window"))
    n_expert, n_ff = routed(c, h)
    n_embd = c.count("hidden_size")
    is_packed = _is_mxfp4(c)
    if is_packed and (n_embd % 32 or n_ff % 32):
        raise c.error("has experts in MXFP4 whose rows are no multiple of 32: give the dimensions of a real model")
    kind = "mxfp4" if is_packed else None
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(n_layer):
        norms(h, b, n_embd, "attn_norm", "post_attention_norm")
        attention(c, h, b, qkv_bias=True, out_bias=True)
        h.weight(f"{b}.attn_sinks", n_head)
        h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert)
        h.bias(f"{b}.ffn_gate_inp", n_expert)
        for name, row, rows in (("gate", n_embd, n_ff), ("up", n_embd, n_ff), ("down", n_ff, n_embd)):
            h.weight(f"{b}.ffn_{name}_exps", row, rows, n_expert, type=kind)
            h.bias(f"{b}.ffn_{name}_exps", rows, n_expert)
    return h


def _is_mxfp4(c: Config) -> bool:
    packed = c.part("quantization_config")
    return packed is not None and packed.text("quant_method", "") == "mxfp4"


def llama4(c: Config) -> ShapeHeader:
    """Llama 4: experts with a shared one, in every layer or in every other one."""
    c.must_be(hidden_act="silu", attention_bias=False, attention_chunk_size=8192)
    c.value(
        "attn_scale",
        "attn_temperature_tuning",
        "no_rope_layer_interval",
        "floor_scale",
        "for_llm_compressor",
        "use_qk_norm",
    )
    n_layer, step = layers(c), c.count("interleave_moe_layer_step")
    every(c, "layer_types", n_layer, ("chunked_attention", FULL))
    c.must_be(moe_layers=list(range(step - 1, n_layer, step)))
    if (no_rope := c.value("no_rope_layers")) and no_rope != [int(i % 4 != 3) for i in range(n_layer)]:
        raise c.unknown("no_rope_layers in another order than every fourth")
    h = begin(c, "llama4")
    dimensions(c, h)
    head = heads(c)[2]
    n_ff, n_ff_dense, n_embd = c.count("intermediate_size"), c.count("intermediate_size_mlp"), c.count("hidden_size")
    n_expert = c.count("num_local_experts", most=1024)
    h.keys(
        feed_forward_length=n_ff_dense,
        rope__dimension_count=head,
        expert_count=n_expert,
        expert_used_count=c.count("num_experts_per_tok", most=n_expert),
        interleave_moe_layer_step=step,
        expert_feed_forward_length=n_ff,
    )
    rope(c, h, head)
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        attention(c, h, b)
        if (i + 1) % step:
            feed_forward(c, h, b, n_ff_dense)
        else:
            experts(c, h, b, n_expert, n_ff)
            feed_forward(c, h, b, n_ff, suffix="_shexp")
    return h


def glm4moe(c: Config) -> ShapeHeader:
    """GLM-4.5 to 4.7: the first layers are dense, and layers for multi-token prediction follow the last."""
    c.must_be(use_qk_norm=(True, False))
    h = start(c, "glm4moe", turned=0.5)
    n_expert, n_ff = routed(c, h)
    n_embd, n_vocab, n_layer = c.count("hidden_size"), c.count("vocab_size"), layers(c)
    n_dense, n_next = c.count("first_k_dense_replace", least=0), following(c)
    n_shared = c.count("n_shared_experts", default=1)
    h.keys(
        block_count=n_layer + n_next,
        expert_group_count=c.count("n_group"),
        expert_group_used_count=c.count("topk_group"),
        expert_shared_count=n_shared,
        leading_dense_block_count=n_dense,
        expert_gating_func=SIGMOID,
        expert_weights_scale=c.number("routed_scaling_factor"),
        expert_weights_norm=c.flag("norm_topk_prob"),
        nextn_predict_layers=n_next or None,
    )
    bias, norm = c.flag("attention_bias", False), c.flag("use_qk_norm", False)
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer + n_next):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "post_attention_norm")
        attention(c, h, b, qkv_bias=bias, head_norm=norm)
        if i < n_dense:
            feed_forward(c, h, b)
            continue
        experts(c, h, b, n_expert, n_ff, probability_bias=True)
        feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")
        if i >= n_layer:
            predictor(h, b, n_embd, n_vocab)
    return h


def predictor(h: ShapeHeader, b: str, n_embd: int, n_vocab: int = 0) -> None:
    """Add the further tensors of a layer for multi-token prediction; ``n_vocab``: with own embedding and head."""
    h.weight(f"{b}.nextn.eh_proj", 2 * n_embd, n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        h.weight(f"{b}.nextn.{name}", n_embd)
    if n_vocab:
        h.weight(f"{b}.nextn.embed_tokens", n_embd, n_vocab)
        h.weight(f"{b}.nextn.shared_head_head", n_embd, n_vocab)


def ernie_moe(c: Config) -> ShapeHeader:
    """ERNIE 4.5 with experts."""
    c.must_be(use_bias=False, moe_layer_interval=1, use_rmsnorm=True, moe_use_aux_free=True)
    # the converter drops layers for multi-token prediction
    c.value("moe_capacity", "moe_gate", "num_nextn_predict_layers")
    n_layer = layers(c)
    n_dense, last = c.count("moe_layer_start_index", least=0), c.value("moe_layer_end_index")
    if last not in (None, -1, n_layer - 1):
        raise c.unknown("a moe_layer_end_index before the last layer")
    h = start(c, "ernie4_5-moe", writes_turned=False)
    n_expert, n_ff = c.count("moe_num_experts", most=1024), c.count("moe_intermediate_size")
    n_shared = c.count("moe_num_shared_experts", default=0, least=0)
    h.keys(
        expert_count=n_expert,
        expert_used_count=c.count("moe_k", most=n_expert),
        interleave_moe_layer_step=1,
        leading_dense_block_count=n_dense,
        expert_feed_forward_length=n_ff,
        expert_shared_count=n_shared,
    )
    if n_shared:
        h.key("expert_shared_feed_forward_length", n_shared * n_ff)
    ends(c, h, tied=is_tied(c, True))
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b)
        if i < n_dense:
            feed_forward(c, h, b)
            continue
        experts(c, h, b, n_expert, n_ff, probability_bias=True)
        if n_shared:
            feed_forward(c, h, b, n_shared * n_ff, suffix="_shexp")
    return h


def granite_moe(c: Config) -> ShapeHeader:
    """Granite 3 with experts."""
    c.must_be(attention_bias=False)
    h = start(c, "granitemoe")
    scales(c, h)
    n_expert, n_ff = routed(c, h)
    shared = c.count("shared_intermediate_size", default=0, least=0)
    h.key("expert_shared_feed_forward_length", shared or None)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b)
        experts(c, h, b, n_expert, n_ff)
        if shared:
            feed_forward(c, h, b, shared, suffix="_shexp")
    return h
