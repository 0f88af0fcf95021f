"""Models some or all of whose layers have a state instead of keys and values."""

from __future__ import annotations

import math

from fitter.llama.header.gguf_writer import Longs
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
    sections,
)
from fitter.model.shapes.config import Config
from fitter.model.shapes.llama import FULL, granite, scales
from fitter.model.shapes.moe import granite_moe, predictor
from fitter.model.shapes.states import ANY_CONTEXT, mamba2_layer

LINEAR = "linear_attention"


def qwen3next(c: Config) -> ShapeHeader:
    """Qwen3-Next and Qwen3-Coder-Next; only the first has a layer for multi-token prediction.

    Neither file says so: the converter counts the layers in the weights.
    """
    if not c.has("mtp_num_hidden_layers"):
        raise c.error(
            "does not say how many layers for multi-token prediction its weights have: add mtp_num_hidden_layers, 1 "
            "if there are tensors named mtp, as in Qwen3-Next-80B-A3B, and otherwise 0"
        )
    return _delta(c, "qwen3next", split=False, has_experts=True)


def qwen35(c: Config) -> ShapeHeader:
    """The text part of Qwen3.5 and 3.6, dense."""
    return _delta(c, "qwen35", split=True, has_experts=False)


def qwen35moe(c: Config) -> ShapeHeader:
    """The text part of Qwen3.5 and 3.6 with experts."""
    return _delta(c, "qwen35moe", split=True, has_experts=True)


def _delta(c: Config, architecture: str, *, split: bool, has_experts: bool) -> ShapeHeader:
    """Gated delta nets in three layers of four; ``split``: alpha and beta have two tensors."""
    c.must_be(hidden_act="silu", attention_bias=False, attn_output_gate=True, mlp_only_layers=[], decoder_sparse_step=1)
    c.must_be(mtp_use_dedicated_embeddings=False)
    c.value("mamba_ssm_dtype", "norm_topk_prob", "output_gate_type", "language_model_only")
    n_layer, n_embd = layers(c), c.count("hidden_size")
    interval = c.count("full_attention_interval", default=4)
    usual = [FULL if i % interval == interval - 1 else LINEAR for i in range(n_layer)]
    kinds = every(c, "layer_types", n_layer, (FULL, LINEAR)) or usual
    if kinds != usual:
        raise c.unknown("layer_types in another order than every full_attention_interval-th")
    n_next = following(c, "mtp_num_hidden_layers")
    h = begin(c, architecture)
    dimensions(c, h, n_layer=n_layer + n_next)
    size = rotary(c, heads(c)[2], 0.25)
    rope(c, h, size)
    h.key("rope.dimension_sections", sections(c))
    n_v = c.count("linear_num_value_heads")
    if n_v % (n_k := c.count("linear_num_key_heads")):
        raise c.error(f"has {n_v} linear_num_value_heads for {n_k} linear_num_key_heads: give a multiple")
    n_expert, n_ff, shared = (*routed(c, h), c.count("shared_expert_intermediate_size")) if has_experts else (0, 0, 0)
    h.keys(
        expert_shared_feed_forward_length=shared or None,
        rope__dimension_count=size,
        ssm__conv_kernel=c.count("linear_conv_kernel_dim"),
        ssm__state_size=c.count("linear_key_head_dim"),
        ssm__group_count=c.count("linear_num_key_heads"),
        ssm__time_step_rank=n_v,
        ssm__inner_size=c.count("linear_value_head_dim") * n_v,
        full_attention_interval=interval,
        attention__recurrent_layers=[each == LINEAR for each in kinds] + [False] * n_next,
        nextn_predict_layers=n_next or None,
    )
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer + n_next):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "post_attention_norm")
        if i < n_layer and kinds[i] == LINEAR:
            _delta_layer(c, h, b, split=split)
        else:
            attention(c, h, b, head_norm=True, gated=True)
        if has_experts:
            experts(c, h, b, n_expert, n_ff)
            h.weight(f"{b}.ffn_gate_inp_shexp", n_embd)
            feed_forward(c, h, b, shared, suffix="_shexp")
        else:
            feed_forward(c, h, b)
        if i >= n_layer:
            predictor(h, b, n_embd)
    return h


def _delta_layer(c: Config, h: ShapeHeader, b: str, *, split: bool) -> None:
    n_embd, n_v = c.count("hidden_size"), c.count("linear_num_value_heads")
    inner = c.count("linear_value_head_dim") * n_v
    wide = 2 * c.count("linear_key_head_dim") * c.count("linear_num_key_heads") + inner
    h.weight(f"{b}.attn_qkv", n_embd, wide)
    h.weight(f"{b}.attn_gate", n_embd, inner)
    h.weight(f"{b}.ssm_conv1d", c.count("linear_conv_kernel_dim"), wide)
    h.bias(f"{b}.ssm_dt", n_v)
    h.tensor(f"{b}.ssm_a", n_v)
    for name, rows in (("beta", n_v), ("alpha", n_v)) if split else (("ba", 2 * n_v),):
        h.weight(f"{b}.ssm_{name}", n_embd, rows)
    h.weight(f"{b}.ssm_norm", c.count("linear_value_head_dim"))
    h.weight(f"{b}.ssm_out", inner, n_embd)


def qwen4exp(c: Config) -> ShapeHeader:
    """The text part of Qwen3.8-Flash-Next: several streams of residuals, and one large table of n-grams.

    Its layer for multi-token prediction is not converted.
    """
    c.must_be(hidden_act="silu", attention_bias=False, indexer_kv_heads=1, tie_word_embeddings=False)
    c.value(
        "mtp_num_hidden_layers", "mamba_ssm_dtype", "output_gate_type", "norm_topk_prob", "split_ngram_parts", "seed"
    )
    n_layer, n_embd = layers(c), c.count("hidden_size")
    interval = c.count("full_attention_interval", default=4)
    kinds = [FULL if i % interval == interval - 1 else LINEAR for i in range(n_layer)]
    if every(c, "layer_types", n_layer, (FULL, LINEAR)) not in (None, kinds):
        raise c.unknown("layer_types in another order than every full_attention_interval-th")
    h = begin(c, "qwen4exp")
    dimensions(c, h)
    size = rotary(c, heads(c)[2], 0.25)
    rope(c, h, size)
    n_expert, n_ff = routed(c, h)
    shared, n_stream, low = (
        c.count("shared_expert_intermediate_size"),
        c.count("hc_count", most=64),
        c.count("hc_lowrank"),
    )
    n_head, index, ratio = c.count("indexer_n_heads"), c.count("indexer_head_dim"), c.count("indexer_compress_ratio")
    n_v = c.count("linear_num_value_heads")
    h.keys(
        rope__dimension_sections=sections(c),
        rope__dimension_count=size,
        expert_shared_feed_forward_length=shared,
        ssm__conv_kernel=c.count("linear_conv_kernel_dim"),
        ssm__state_size=c.count("linear_key_head_dim"),
        ssm__group_count=c.count("linear_num_key_heads"),
        ssm__time_step_rank=n_v,
        ssm__inner_size=c.count("linear_value_head_dim") * n_v,
        full_attention_interval=interval,
        attention__recurrent_layers=[each == LINEAR for each in kinds],
        hyper_connection__count=n_stream,
        hyper_connection__low_rank=low,
        attention__indexer__head_count=n_head,
        attention__indexer__key_length=index,
        attention__indexer__top_k=c.count("indexer_budget"),
        attention__compress_ratios=[0 if each == LINEAR else ratio for each in kinds],
    )
    h.weight("token_embd", n_embd, c.count("vocab_size"))
    h.weight("output", n_embd, c.count("vocab_size"))
    wide = n_stream * n_embd

    def mixer(name: str) -> None:
        h.weight(f"{name}_norm", wide)
        h.weight(f"{name}_down", wide, low)
        h.weight(f"{name}_up", low, wide)

    mixer("output_hc")
    for i, kind in enumerate(kinds):
        b = f"blk.{i}"
        for name in ("attn", "ffn"):
            mixer(f"{b}.hc_{name}")
            h.weight(f"{b}.hc_{name}_inject", wide, n_stream)
        if kind == LINEAR:
            _delta_layer(c, h, b, split=True)
        else:
            attention(c, h, b, head_norm=True, gated=True)
            h.weight(f"{b}.indexer.q_proj", n_embd, n_head * index)
            h.weight(f"{b}.indexer.k_proj", n_embd, index)
            norms(h, b, index, "indexer.q_norm", "indexer.k_norm")
        experts(c, h, b, n_expert, n_ff)
        h.weight(f"{b}.ffn_gate_inp_shexp", n_embd)
        feed_forward(c, h, b, shared, suffix="_shexp")
    if at := c.numbers("ple_layer_ids"):
        _ngrams(c, h, [int(each) - 1 for each in at], wide)
    return h


def _ngrams(c: Config, h: ShapeHeader, at: list[int], wide: int) -> None:
    """Add the table of n-grams, whose parts have the next prime numbers of rows, and the layer that reads it."""
    if len(at) != 1 or not 0 <= at[0] < layers(c):
        raise c.unknown("ple_layer_ids other than one layer")
    b, n_embd, conv = f"blk.{at[0]}", c.count("hidden_size"), c.count("ple_conv_kernel_size")
    n_gram, n_part = c.count("ngram_size", least=2, most=8), c.count("heads_per_ngram", most=64)
    divisor, n_part = c.count("make_ngram_vocab_size_divisible_by"), (n_gram - 1) * n_part
    row = c.count("ple_embed_dim") // n_part
    rows = _primes(c.count("ngram_vocab_size_base", least=2, most=1 << 26), n_part)
    h.keys(
        embedding_length_per_layer_input=row,
        ple__layers=at,
        ple__ngram_size=n_gram,
        ple__heads_per_ngram=c.count("heads_per_ngram"),
        ple__conv_kernel=conv,
        ple__eos_token_id=c.count("eos_token_id", least=0),
        # they decide which row is read, and no size
        ple__layer_multipliers=Longs([1] * n_gram),
        ple__head_offsets=Longs(sum(rows[:i]) for i in range(n_part)),
        ple__head_vocab_sizes=Longs(rows),
    )
    h.weight("per_layer_token_embd", row, divisor * -(-sum(rows) // divisor))
    h.weight(f"{b}.ple_key", c.count("ple_embed_dim"), wide)
    h.weight(f"{b}.ple_value", c.count("ple_embed_dim"), n_embd)
    h.weight(f"{b}.ple_conv1d", conv, wide)
    norms(h, b, wide, "ple_norm_key", "ple_norm_query", "ple_norm_conv")


def _primes(least: int, n: int) -> list[int]:
    """Return the first ``n`` prime numbers that are ``least`` or more."""
    found: list[int] = []
    while len(found) < n:
        if all(least % each for each in range(2, math.isqrt(least) + 1)):
            found.append(least)
        least += 1
    return found


def nemotron_h(c: Config) -> ShapeHeader:
    """Nemotron-H and Nemotron 3: each layer is a state, attention, or a feed-forward network, dense or with experts."""
    _check_nemotron(c)
    pattern = _pattern(c, "hybrid_override_pattern", "layers_block_type")
    n_embd = c.count("hidden_size")
    n_layer = c.count("num_hidden_layers", default=max(1, len(pattern)), most=512)
    has_experts = c.has("num_experts_per_tok") and "E" in pattern
    if len(pattern) != n_layer or set(pattern) - set("M*E" if has_experts else "M*-"):
        raise c.unknown(f"a hybrid_override_pattern '{pattern[:40]}' for {n_layer} layers")
    n_next = c.count("num_nextn_predict_layers", default=0, least=0) if has_experts else 0
    _check_following(c, n_next)
    n_head, n_head_kv = c.count("num_attention_heads"), c.count("num_key_value_heads")
    head = c.count("head_dim", "attention_head_dim")
    state, n_group, conv = c.count("ssm_state_size"), c.count("n_groups"), c.count("conv_kernel")
    inner = (n_head_ssm := c.count("mamba_num_heads")) * c.count("mamba_head_dim")
    h = begin(c, "nemotron_h_moe" if has_experts else "nemotron_h")
    every_layer = pattern + "A" * n_next
    wide = c.count("moe_intermediate_size") if has_experts else c.count("intermediate_size")
    eps = c.number("layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5)
    h.keys(
        vocab_size=c.count("vocab_size"),
        block_count=n_layer + n_next,
        context_length=ANY_CONTEXT,
        embedding_length=n_embd,
        feed_forward_length=[wide if each in "-EA" else 0 for each in every_layer],
        attention__head_count=n_head,
        attention__head_count_kv=[n_head_kv if each in "*A" else 0 for each in every_layer],
        attention__key_length=head,
        attention__value_length=head,
        attention__layer_norm_rms_epsilon=eps,
        attention__layer_norm_epsilon=eps,
        rope__dimension_count=max(1, n_embd // n_head),
        rope__freq_base=c.number("rope_theta", default=0.0) or None,
        rope__scaling__finetuned=False,
        ssm__conv_kernel=conv,
        ssm__state_size=state,
        ssm__group_count=n_group,
        ssm__inner_size=inner,
        ssm__time_step_rank=n_head_ssm,
        nextn_predict_layers=n_next or None,
    )
    if has_experts:
        _nemotron_experts(c, h)
    ends(c, h, tied=is_tied(c, False))
    for i, kind in enumerate(every_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm")
        if kind == "M":
            mamba2_layer(h, b, n_embd, inner, n_group, state, n_head_ssm, conv)
        elif kind == "-":
            feed_forward(c, h, b, gated=False)
        elif kind == "*":
            attention(c, h, b, sizes=(n_head, n_head_kv, head))
        elif kind == "E":
            _nemotron_layer(c, h, b)
        else:
            attention(c, h, b, sizes=(n_head, n_head_kv, head))
            norms(h, b, n_embd, "post_attention_norm")
            predictor(h, b, n_embd)
            _nemotron_layer(c, h, b)
    return h


def _check_following(c: Config, n_next: int) -> None:
    following = _pattern(c, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if n_next not in (0, 1) or (n_next and following not in ("", "*E")):
        raise c.unknown("layers for multi-token prediction other than one with attention and experts")


def _check_nemotron(c: Config) -> None:
    c.must_be(mlp_hidden_act="relu2", attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False)
    c.must_be(use_conv_bias=True, mamba_hidden_act="silu")
    c.value("expand", "chunk_size", "head_dim", "attention_head_dim", "sliding_window", "norm_eps")
    c.value(
        "max_position_embeddings", "partial_rotary_factor", "rms_norm_eps", "layer_norm_epsilon", "intermediate_size"
    )


_LETTERS = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}


def _pattern(c: Config, name: str, listed: str) -> str:
    """Return a letter for each layer, as older files have it; newer files have words."""
    words = c.texts(listed)
    return c.text(name, "" if words is None else "".join(_LETTERS.get(each, "?") for each in words))


def _nemotron_experts(c: Config, h: ShapeHeader) -> None:
    n_expert = c.count("n_routed_experts", most=1024)
    h.keys(
        expert_count=n_expert,
        expert_used_count=c.count("num_experts_per_tok", most=n_expert),
        expert_feed_forward_length=c.count("moe_intermediate_size"),
        expert_shared_feed_forward_length=c.count("moe_shared_expert_intermediate_size"),
        expert_shared_count=c.count("n_shared_experts"),
        expert_weights_norm=c.flag("norm_topk_prob"),
        expert_weights_scale=c.number("routed_scaling_factor"),
        expert_group_count=c.count("n_group"),
        expert_group_used_count=c.count("topk_group"),
        moe_latent_size=c.count("moe_latent_size", default=0, least=0) or None,
    )
    c.value("moe_shared_expert_overlap")


def _nemotron_layer(c: Config, h: ShapeHeader, b: str) -> None:
    n_embd, n_expert, n_ff = c.count("hidden_size"), c.count("n_routed_experts"), c.count("moe_intermediate_size")
    latent = c.count("moe_latent_size", default=0, least=0)
    h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert)
    h.bias(f"{b}.exp_probs_b", n_expert)
    h.weight(f"{b}.ffn_up_exps", latent or n_embd, n_ff, n_expert)
    h.weight(f"{b}.ffn_down_exps", n_ff, latent or n_embd, n_expert)
    if latent:
        h.weight(f"{b}.ffn_latent_down", n_embd, latent)
        h.weight(f"{b}.ffn_latent_up", latent, n_embd)
    shared = c.count("moe_shared_expert_intermediate_size")
    feed_forward(c, h, b, shared, gated=False, suffix="_shexp")


def falcon_h1(c: Config) -> ShapeHeader:
    """Falcon-H1: each layer has a state and attention, side by side."""
    c.must_be(hidden_act="silu")
    c.must_be(attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False, mamba_rms_norm=False)
    c.must_be(mamba_conv_bias=True, attn_layer_indices=())
    c.value("mamba_expand", "mamba_chunk_size", "mamba_use_mlp", "mamba_norm_before_gate", "expansion_factor")
    c.value("mlp_expansion_factor")
    c.value("head_dim", "key_multiplier", "lm_head_multiplier", "embedding_multiplier", "attention_in_multiplier")
    c.value("attention_out_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers")
    h = begin(c, "falcon-h1")
    dimensions(c, h)
    rope(c, h, heads(c)[2])
    inner, n_group, state = c.count("mamba_d_ssm"), c.count("mamba_n_groups"), c.count("mamba_d_state")
    n_head, conv = inner // c.count("mamba_d_head"), c.count("mamba_d_conv")
    c.value("mamba_n_heads")
    h.keys(
        ssm__conv_kernel=conv,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=n_head,
        ssm__group_count=n_group,
    )
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm")
        h.tensor(f"{b}.ffn_norm", c.count("hidden_size"))
        attention(c, h, b)
        mamba2_layer(h, b, c.count("hidden_size"), inner, n_group, state, n_head, conv)
        h.tensors = [each for each in h.tensors if not each.name.endswith("ssm_norm.weight")]
        feed_forward(c, h, b)
    return h


def granite_hybrid(c: Config) -> ShapeHeader:
    """Granite 4, with or without experts, and its models with attention in all layers."""
    c.must_be(hidden_act="silu", attention_bias=False, mamba_proj_bias=False)
    c.must_be(mamba_conv_bias=True, normalization_function="rmsnorm")
    c.value("mamba_expand", "mamba_chunk_size", "position_embedding_type", "init_method")
    n_layer, n_embd = layers(c), c.count("hidden_size")
    kinds = every(c, "layer_types", n_layer, ("mamba", "attention", LINEAR, FULL))
    if kinds is None:
        raise c.error("has no layer_types: add them")
    has_state = [each in ("mamba", LINEAR) for each in kinds]
    n_expert = c.count("num_local_experts", default=0, least=0, most=1024)
    if not any(has_state):
        return _granite_without_state(c, n_expert)
    if not n_expert and c.count("shared_intermediate_size") != c.count("intermediate_size"):
        raise c.unknown("a shared_intermediate_size that is not the intermediate_size, without experts")
    h = begin(c, "granitehybrid")
    dimensions(c, h)
    _, n_head_kv, head = heads(c)
    inner = c.count("mamba_n_heads") * c.count("mamba_d_head")
    n_group, state, conv = c.count("mamba_n_groups"), c.count("mamba_d_state"), c.count("mamba_d_conv")
    shared, n_ff = c.count("shared_intermediate_size", default=0, least=0), c.count("intermediate_size")
    rope(c, h, head)
    h.keys(
        context_length=ANY_CONTEXT,
        attention__head_count_kv=[0 if each else n_head_kv for each in has_state],
        rope__dimension_count=head,
        rope__scaling__finetuned=c.text("position_embedding_type", "nope") == "rope",
        ssm__conv_kernel=conv,
        ssm__state_size=state,
        ssm__group_count=n_group,
        ssm__inner_size=inner,
        ssm__time_step_rank=c.count("mamba_n_heads"),
        expert_shared_feed_forward_length=shared or None,
    )
    scales(c, h)
    used = c.count("num_experts_per_tok", default=0, least=0)
    if n_expert:
        h.keys(expert_count=n_expert, expert_used_count=used)
    else:
        h.keys(feed_forward_length=shared or n_ff, expert_used_count=0)
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        if has_state[i]:
            mamba2_layer(h, b, n_embd, inner, n_group, state, c.count("mamba_n_heads"), conv)
        else:
            attention(c, h, b)
        if n_expert:
            experts(c, h, b, n_expert, n_ff)
            if shared:
                feed_forward(c, h, b, shared, suffix="_shexp")
        else:
            feed_forward(c, h, b, shared or n_ff)
    return h


def _granite_without_state(c: Config, n_expert: int) -> ShapeHeader:
    """Models such as Granite 4.0 Micro, which the converter writes as Granite 3."""
    # parameters of layers with a state, which it does not have
    c.value("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")
    if not c.has("shared_intermediate_size"):
        raise c.error("has no shared_intermediate_size: add it")
    if n_expert:
        return granite_moe(c)
    if c.count("num_experts_per_tok", default=0, least=0):
        raise c.unknown("num_experts_per_tok without experts")
    c.value("num_local_experts")
    return granite(c.replaced("intermediate_size", c.value("shared_intermediate_size")))


def lfm2(c: Config) -> ShapeHeader:
    """LFM2, whose other layers have a short convolution."""
    c.must_be(conv_bias=False, block_use_swiglu=True)
    c.value(
        "full_attn_idxs", "conv_dim", "conv_dim_out", "block_mlp_init_scale", "block_norm_eps", "block_use_xavier_init"
    )
    c.value(
        "block_out_init_scale",
        "conv_use_xavier_init",
        "use_pos_enc",
        "block_dim",
        "num_heads",
        "theta",
        "tie_embedding",
    )
    n_ff = _lfm2_width(c)
    h = begin(c, "lfm2")
    dimensions(c, h)
    h.key("feed_forward_length", n_ff)
    ends_of_lfm2(c, h)
    for i, kind in enumerate(_lfm2_layers(c, h)):
        b = f"blk.{i}"
        _lfm2_layer(c, h, b, kind)
        feed_forward(c, h, b, n_ff)
    return h


def _lfm2_width(c: Config) -> int:
    n_ff = c.count("block_ff_dim", "intermediate_size")
    c.value("intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim", True):
        return n_ff
    n_ff = int(c.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n_ff / 3))
    multiple = c.count("block_multiple_of", default=256)
    return multiple * -(-n_ff // multiple)


def ends_of_lfm2(c: Config, h: ShapeHeader) -> None:
    """Add the embedding, which is the output too, and the norm that LFM2 names after it."""
    rope(c, h, heads(c)[2])
    if not is_tied(c, True):
        raise c.unknown("tie_word_embeddings false")
    n_embd = c.count("hidden_size")
    h.weight("token_embd", n_embd, c.count("vocab_size"))
    h.weight("token_embd_norm", n_embd)


def _lfm2_layers(c: Config, h: ShapeHeader) -> list[str]:
    kinds = every(c, "layer_types", layers(c), ("conv", FULL))
    indices = c.numbers("full_attn_idxs")
    if kinds is None and indices is not None:
        kinds = [FULL if i in indices else "conv" for i in range(layers(c))]
    if kinds is None:
        raise c.error("has no layer_types: add them")
    n_head_kv = heads(c)[1]
    h.key("attention.head_count_kv", [n_head_kv if each == FULL else 0 for each in kinds])
    h.key("shortconv.l_cache", c.count("conv_L_cache"))
    return kinds


def _lfm2_layer(c: Config, h: ShapeHeader, b: str, kind: str) -> None:
    n_embd = c.count("hidden_size")
    norms(h, b, n_embd, "attn_norm", "ffn_norm")
    if kind == FULL:
        attention(c, h, b, head_norm=True)
    else:
        h.weight(f"{b}.shortconv.conv", c.count("conv_L_cache"), n_embd)
        h.weight(f"{b}.shortconv.in_proj", n_embd, 3 * n_embd)
        h.weight(f"{b}.shortconv.out_proj", n_embd, n_embd)


def lfm2moe(c: Config) -> ShapeHeader:
    """LFM2 with experts."""
    c.must_be(conv_bias=False, use_expert_bias=True)
    c.value("norm_topk_prob", "routed_scaling_factor")
    h = begin(c, "lfm2moe")
    dimensions(c, h)
    n_expert, n_ff = routed(c, h)
    n_dense = c.count("num_dense_layers", least=0)
    h.keys(leading_dense_block_count=n_dense, expert_gating_func=2)
    ends_of_lfm2(c, h)
    for i, kind in enumerate(_lfm2_layers(c, h)):
        b = f"blk.{i}"
        _lfm2_layer(c, h, b, kind)
        if i < n_dense:
            feed_forward(c, h, b)
        else:
            experts(c, h, b, n_expert, n_ff, probability_bias=True)
    return h
