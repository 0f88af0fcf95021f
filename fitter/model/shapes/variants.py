"""Variants of Llama: models that differ in one point, Hunyuan, and encoders, which produce embeddings."""

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
    heads,
    is_tied,
    layers,
    norms,
    rope_part,
    rope_type,
    sections,
    stack,
    start,
)
from fitter.model.shapes.config import MOST_EXPERTS, Config
from fitter.model.shapes.llama import FULL, SLIDING, dense, qwen2, renamed

_HUNYUAN_CONTEXT = 256 << 10
"""The converter's context, whatever the config.json says."""


def arcee(c: Config) -> ShapeHeader:
    """Arcee's AFM, whose feed-forward network has no gate."""
    c.must_be(attention_bias=False, mlp_bias=False)
    h = start(c, "arcee", act="relu2")
    return stack(c, h, "attn_norm", "ffn_norm", tied=is_tied(c, False), gated=False)


def apertus(c: Config) -> ShapeHeader:
    """Apertus, whose feed-forward network has no gate, but an activation with four numbers for each layer."""
    c.must_be(attention_bias=False, mlp_bias=False, post_norm=False, qk_norm=True)
    h = start(c, "apertus", act="xielu")
    # the numbers are in the weights; only their count matters here
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        h.metadata[f"xielu.{name}"] = [0.5] * layers(c)
    return stack(c, h, "attn_norm", "ffn_norm", tied=is_tied(c, False), head_norm=True, gated=False)


def qwen2vl(c: Config) -> ShapeHeader:
    """The text part of Qwen2-VL and Qwen2.5-VL."""
    counts = sections(c)
    if not counts:
        raise c.error("has no mrope_section in its rope_scaling: add it")
    h = renamed(qwen2(c), "qwen2vl")
    h.key("rope.dimension_sections", counts)
    return h


def hunyuan(c: Config) -> ShapeHeader:
    """Hunyuan, dense."""
    head = _check_hunyuan(c)
    c, stretched = _stretched(c, head, 50.0)
    h = dense(c, "hunyuan-dense", head_norm=True)
    h.keys(**stretched)
    return h


def hunyuan_moe(c: Config) -> ShapeHeader:
    """Hunyuan with experts, such as A13B."""
    c.must_be(hidden_act="silu")
    c.must_be(attention_bias=False, mlp_bias=False, use_mla=False, moe_layer_num_skipped=False)
    c.must_be(position_embedding_xdrope=False)
    c.must_be(use_mixed_mlp_moe=True)
    c.value("group_limited_greedy", "moe_drop_tokens", "moe_random_routing_dropped_token", "norm_topk_prob")
    c.value("num_media_embeds", "routed_scaling_factor")
    head = _check_hunyuan(c)
    n_embd, n_expert = c.count("hidden_size"), c.count("num_experts", most=MOST_EXPERTS)
    n_ff, n_used, n_shared = (
        _equal_number(c, "moe_intermediate_size"),
        _equal_number(c, "moe_topk"),
        _equal_number(c, "num_shared_expert"),
    )
    if n_shared != 1 or n_used > n_expert:
        raise c.unknown(f"{n_shared} shared experts and {n_used} used ones of {n_expert}")
    c, stretched = _stretched(c, head, 1000.0)
    h = start(c, "hunyuan-moe")
    h.keys(
        expert_count=n_expert,
        expert_used_count=n_used,
        expert_shared_count=n_shared,
        expert_feed_forward_length=n_ff,
        expert_shared_feed_forward_length=c.count("intermediate_size"),
        **stretched,
    )
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        attention(c, h, b, head_norm=True)
        experts(c, h, b, n_expert, n_ff)
        feed_forward(c, h, b, suffix="_shexp")
    return h


def _equal_number(c: Config, name: str) -> int:
    """Read a number for each layer; the converter accepts only equal ones."""
    values = set(c.counts(name, layers(c), least=1))
    if len(values) > 1:
        raise c.unknown(f"a {name} that differs between layers")
    return values.pop()


def _check_hunyuan(c: Config) -> int:
    """Raise ``ModelError`` for features that no published Hunyuan has; return the size of a head."""
    head = heads(c)[2]
    c.must_be(use_qk_norm=True, use_cla=False, norm_type="rms", attention_head_dim=head)
    c.must_be(org_vocab_size=c.count("vocab_size"), use_rotary_pos_emb=True, add_classification_head=False)
    c.value("cla_share_factor")
    if head < 4:
        raise c.error(f"has a head_dim of {head}: give the dimensions of a real model")
    return head


def _stretched(c: Config, head: int, alpha: float) -> tuple[Config, dict[str, int | float | str]]:
    """Remove the scaling of rope that the converter puts into its base; return the rest and the metadata for it.

    ``alpha``: the default factor.
    """
    part = rope_part(c)
    if part is None or rope_type(c, part) != "dynamic":
        return c, {}
    base, trained = part.number("rope_theta", default=c.number("rope_theta")), c.count("max_position_embeddings")
    if base != 10000 or trained not in (32 << 10, _HUNYUAN_CONTEXT):
        raise c.unknown(f"a rope scaling of type 'dynamic' from {base:g} for {trained} positions")
    part.value("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    factor = part.number("alpha", default=alpha)
    if not 1 <= factor <= 1e6:
        raise c.error(f"has alpha {factor:g} in its rope_scaling: give a number from 1 to 1000000")
    return c.without("rope_scaling").without("rope_parameters"), {
        "context_length": _HUNYUAN_CONTEXT,
        "rope__freq_base": base * factor ** (head / (head - 2)),
        "rope__scaling__type": "none",
        "rope__scaling__factor": 1.0,
        "rope__scaling__original_context_length": _HUNYUAN_CONTEXT,
    }


_MEAN = 1
"""llama.cpp's number for the mean of all tokens' embeddings."""


def bert(c: Config) -> ShapeHeader:
    """BERT, such as bge and E5 in English."""
    return _bert(c, c.count("max_position_embeddings"))


def roberta(c: Config) -> ShapeHeader:
    """RoBERTa and XLM-RoBERTa, such as bge-m3 and E5 in many languages; their first positions are unused."""
    unused = c.count("pad_token_id", default=1, least=0) + 1
    return _bert(c, c.count("max_position_embeddings", least=unused + 1) - unused)


def roberta_rank(c: Config) -> ShapeHeader:
    """Rerankers on RoBERTa, such as bge-reranker-v2-m3, with a head that has a row for each label.

    The converter writes no pooling for them.
    """
    labels = c.value("id2label")
    if not isinstance(labels, dict) or not labels:
        raise c.error("has no id2label: add it")
    h, n_embd = roberta(c), c.count("hidden_size")
    if len(labels) == 2:
        raise c.unknown("two labels in id2label, which may be none")
    h.key("classifier.output_labels", [str(label) for _, label in sorted(labels.items())])
    for name, rows in (("cls", n_embd), ("cls.output", len(labels))):
        h.weight(name, n_embd, rows)
        h.bias(name, rows)
    return h


def _bert(c: Config, n_ctx: int) -> ShapeHeader:
    c.must_be(hidden_act="gelu", position_embedding_type="absolute")
    c.value("gradient_checkpointing", "hidden_dropout_prob", "attention_probs_dropout_prob", "add_pooling_layer")
    c.value("output_past", "tie_word_embeddings", "pad_token_id")
    n_embd, n_vocab = c.count("hidden_size"), c.count("vocab_size")
    h = begin(c, "bert")
    dimensions(c, h, eps="layer_norm_epsilon")
    h.keys(context_length=n_ctx, attention__causal=False)
    h.metadata["tokenizer.ggml.token_type_count"] = n_types = c.count("type_vocab_size", default=1)
    h.weight("token_embd", n_embd, n_vocab)
    h.weight("token_types", n_embd, n_types)
    h.weight("position_embd", n_embd, n_ctx)
    h.weight("token_embd_norm", n_embd)
    h.bias("token_embd_norm", n_embd)
    for b in blocks(layers(c)):
        attention(c, h, b, qkv_bias=True, out_bias=True)
        feed_forward(c, h, b, bias=True, gated=False)
        norms(h, b, n_embd, "attn_output_norm", "layer_output_norm", bias=True)
    return h


def nomic_bert(c: Config) -> ShapeHeader:
    """nomic-embed-text; 1 and 1.5 were trained with 2048 tokens."""
    c.must_be(activation_function="swiglu", moe_every_n_layers=())
    c.value("pad_vocab_size_multiple", "rotary_scaling_factor")
    c.must_be(use_rms_norm=False, parallel_block=False, causal=False, qkv_proj_bias=False, mlp_fc1_bias=False)
    c.must_be(mlp_fc2_bias=False, prenorm=False, rotary_emb_interleaved=False)
    c.must_be(rotary_emb_fraction=1, rotary_emb_scale_base=())
    if (c.count("n_positions"), c.count("max_trained_positions", default=2048)) != (8192, 2048):
        raise c.unknown("another n_positions than 8192, trained with 2048")
    n_embd, n_ff = c.count("n_embd"), c.count("n_inner")
    n_head = c.count("n_head")
    h = begin(c, "nomic-bert")
    h.keys(
        vocab_size=c.count("vocab_size"),
        block_count=layers(c),
        context_length=2048,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__layer_norm_epsilon=c.number("layer_norm_epsilon"),
        attention__causal=False,
        pooling_type=_MEAN,
        rope__freq_base=c.number("rotary_emb_base"),
    )
    h.metadata["tokenizer.ggml.token_type_count"] = n_types = c.count("type_vocab_size")
    h.weight("token_embd", n_embd, c.count("vocab_size"))
    h.weight("token_types", n_embd, n_types)
    h.weight("token_embd_norm", n_embd)
    h.bias("token_embd_norm", n_embd)
    for b in blocks(layers(c)):
        attention(c, h, b, fused=True, sizes=(n_head, n_head, n_embd // n_head))
        feed_forward(c, h, b, n_ff)
        norms(h, b, n_embd, "attn_output_norm", "layer_output_norm", bias=True)
    return h


def modern_bert(c: Config) -> ShapeHeader:
    """ModernBERT: two layers of three have a window."""
    c.must_be(hidden_activation=("gelu", "silu"), attention_bias=False, mlp_bias=False, norm_bias=False)
    c.value("classifier_pooling", "classifier_activation", "decoder_bias", "sparse_prediction", "reference_compile")
    # its positions are rope's, although the file says otherwise
    c.value("tie_word_embeddings", "position_embedding_type", "deterministic_flash_attn", "gradient_checkpointing")
    n_embd, n_ff = c.count("hidden_size"), c.count("intermediate_size")
    period = c.count("global_attn_every_n_layers", default=3)
    kinds = every(c, "layer_types", layers(c), (SLIDING, FULL))
    if kinds is not None and kinds != [SLIDING if i % period else FULL for i in range(layers(c))]:
        raise c.unknown("layer_types in another order than every global_attn_every_n_layers-th")
    part = c.part("rope_parameters")
    full, window = (part.part(FULL), part.part(SLIDING)) if part is not None else (None, None)
    for each in (full, window):
        if each is not None:
            each.must_be(rope_type="default")
    h = begin(c, "modern-bert")
    dimensions(c, h)
    h.key("attention.layer_norm_epsilon", c.number("norm_eps", "layer_norm_eps", default=1e-5))
    h.keys(
        attention__causal=False,
        attention__sliding_window=c.count("local_attention"),
        attention__sliding_window_pattern=period,
        rope__freq_base=(full or c).number("rope_theta", "global_rope_theta", default=160000.0),
        rope__freq_base_swa=(window or c).number("rope_theta", "local_rope_theta", default=10000.0),
        rope__scaling__type="none",
        hidden_activation=c.text("hidden_activation", "gelu"),
    )
    h.weight("token_embd", n_embd, c.count("vocab_size"))
    h.weight("token_embd_norm", n_embd)
    h.weight("output_norm", n_embd)
    for i in range(layers(c)):
        b = f"blk.{i}"
        norms(h, b, n_embd, *(["attn_norm"] if i else []), "ffn_norm")
        attention(c, h, b, fused=True)
        h.weight(f"{b}.ffn_up", n_embd, 2 * n_ff)
        h.weight(f"{b}.ffn_down", n_ff, n_embd)
    return h
