"""Models that differ from Llama in one point, and Hunyuan."""

from __future__ import annotations

from fitter.model.shapes.common import (
    ShapeHeader,
    attention,
    begin,
    dimensions,
    ends,
    experts,
    feed_forward,
    heads,
    is_tied,
    layers,
    norms,
    rope,
    rope_part,
    rope_type,
    rotary,
    sections,
)
from fitter.model.shapes.config import MOST_EXPERTS, Config
from fitter.model.shapes.llama import dense, qwen2, renamed

_HUNYUAN_CONTEXT = 256 << 10
"""The converter's context, whatever the config.json says."""


def arcee(c: Config) -> ShapeHeader:
    """Arcee's AFM, whose feed-forward network has no gate."""
    c.must_be("hidden_act", "relu2")
    c.must_be("attention_bias", False)
    c.must_be("mlp_bias", False)
    return _without_gate(c, _dense_header(c, "arcee"), head_norm=False)


def apertus(c: Config) -> ShapeHeader:
    """Apertus, whose feed-forward network has no gate, but an activation with four numbers for each layer."""
    c.must_be("hidden_act", "xielu")
    c.must_be("attention_bias", False)
    c.must_be("mlp_bias", False)
    c.must_be("post_norm", False)
    c.must_be("qk_norm", True)
    h = _dense_header(c, "apertus")
    # the numbers are in the weights; only their count matters here
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        h.metadata[f"xielu.{name}"] = [0.5] * layers(c)
    return _without_gate(c, h, head_norm=True)


def _dense_header(c: Config, architecture: str) -> ShapeHeader:
    h = begin(c, architecture)
    dimensions(c, h)
    size = rotary(c, heads(c)[2])
    h.key("rope.dimension_count", size)
    rope(c, h, size)
    return h


def _without_gate(c: Config, h: ShapeHeader, *, head_norm: bool) -> ShapeHeader:
    ends(c, h, tied=is_tied(c, False))
    for i in range(layers(c)):
        b = f"blk.{i}"
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b, head_norm=head_norm)
        feed_forward(c, h, b, gated=False)
    return h


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
    c.must_be("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_mla", "moe_layer_num_skipped", "position_embedding_xdrope"):
        c.must_be(name, False)
    c.must_be("use_mixed_mlp_moe", True)
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
    h = _dense_header(c, "hunyuan-moe")
    h.keys(
        expert_count=n_expert,
        expert_used_count=n_used,
        expert_shared_count=n_shared,
        expert_feed_forward_length=n_ff,
        expert_shared_feed_forward_length=c.count("intermediate_size"),
        **stretched,
    )
    ends(c, h, tied=is_tied(c, False))
    for i in range(layers(c)):
        b = f"blk.{i}"
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
    c.must_be("use_qk_norm", True)
    c.must_be("use_cla", False)
    c.must_be("norm_type", "rms")
    c.must_be("attention_head_dim", head)
    c.must_be("org_vocab_size", c.count("vocab_size"))
    c.must_be("use_rotary_pos_emb", True)
    c.must_be("add_classification_head", False)
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
