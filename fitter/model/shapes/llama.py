"""Dense models like Llama, with a norm before attention and before the feed-forward network."""

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
    rope,
    rope_part,
    rope_type,
    rotary,
    routed,
    sections,
    stack,
    start,
)
from fitter.model.shapes.config import Config

SLIDING, FULL = "sliding_attention", "full_attention"


def dense(
    c: Config,
    architecture: str,
    *,
    tied: bool = False,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    head_norm: bool = False,
    turned: float = 1.0,
    second_norm: str = "ffn_norm",
) -> ShapeHeader:
    """A model with Llama's tensors, by default with only those biases that its file names.

    ``turned``: share of a head that rope rotates, if the file does not say.
    """
    h = start(c, architecture, turned=turned)
    bias = c.flag("attention_bias", False)
    return stack(
        c,
        h,
        *("attn_norm", second_norm),
        tied=is_tied(c, tied),
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        out_bias=bias if out_bias is None else out_bias,
        head_norm=head_norm,
        bias=c.flag("mlp_bias", False),
    )


def llama(c: Config) -> ShapeHeader:
    """Llama 2 to 3.3, Yi, SmolLM2, and other models that say that they are one of those."""
    c.must_be(mlp_type="")
    return dense(c, "llama")


def mistral(c: Config) -> ShapeHeader:
    """Mistral 7B and those that followed; llama.cpp looks at all tokens, whatever the window."""
    c.value("sliding_window")
    return dense(c, "llama", qkv_bias=False, out_bias=False)


def ministral(c: Config) -> ShapeHeader:
    """The text part of Mistral Small 3.1 and Ministral 3."""
    c.value("sliding_window")
    h = dense(c, "mistral3", qkv_bias=False, out_bias=False)
    part = rope_part(c)
    if part is not None and part.has("llama_4_scaling_beta"):
        h.key("attention.temperature_scale", part.number("llama_4_scaling_beta"))
        h.key("rope.scaling.yarn_log_multiplier", part.number("mscale_all_dim"))
    return h


def qwen2(c: Config) -> ShapeHeader:
    """Qwen2, Qwen2.5 and QwQ."""
    _check_window(c)
    return dense(c, "qwen2", qkv_bias=True, out_bias=False)


_RANK = 4
"""llama.cpp's number for a score of the whole text."""


def qwen3(c: Config) -> ShapeHeader:
    """Qwen3, dense. The converter knows its rerankers by their name, and gives them a head with two rows."""
    _check_window(c)
    c.must_be(attention_bias=False)
    h = dense(c, "qwen3", head_norm=True)
    if "qwen3-reranker" in f"{c.where} {c.text('_name_or_path', '')}".lower():
        h.keys(pooling_type=_RANK, classifier__output_labels=["yes", "no"])
        h.tensors = [each for each in h.tensors if each.name != "output.weight"]
        h.weight("cls.output", c.count("hidden_size"), 2)
    return h


def qwen3vl(c: Config) -> ShapeHeader:
    """The text part of Qwen3-VL, whose first layers take features of images, too."""
    h = qwen3(c)
    return seeing(c, renamed(h, "qwen3vl"))


def seeing(c: Config, h: ShapeHeader) -> ShapeHeader:
    """Add the metadata of an image part."""
    vision = c.part("vision_config")
    h.key("rope.dimension_sections", sections(c) or [0] * 4)
    depths = vision.numbers("deepstack_visual_indexes") if vision is not None else None
    h.key("n_deepstack_layers", len(depths or ()))
    return h


def renamed(h: ShapeHeader, architecture: str) -> ShapeHeader:
    """Change the architecture of a header."""
    other = ShapeHeader(architecture, h.type)
    for key, value in h.metadata.items():
        if key.startswith(f"{h.architecture}."):
            other.key(key.removeprefix(f"{h.architecture}."), value)
    other.tensors = h.tensors
    return other


def _check_window(c: Config) -> None:
    """Raise ``ModelError`` for a sliding window: llama.cpp has none for Qwen, and no published model uses it."""
    c.value("sliding_window", "max_window_layers")
    every(c, "layer_types", layers(c), (FULL,))
    if c.flag("use_sliding_window", False):
        raise c.unknown("use_sliding_window true")


def internlm2(c: Config) -> ShapeHeader:
    """InternLM2 and 2.5, whose dynamic scaling of rope is not in the file."""
    c.must_be(bias=False)
    c.value("attn_implementation")
    part = rope_part(c)
    if part is not None and rope_type(c, part) == "dynamic":
        part.number("factor")
        c = c.without("rope_scaling")
    return dense(c, "internlm2")


def smollm3(c: Config) -> ShapeHeader:
    """SmolLM3: every fourth layer has no rope."""
    c.value("no_rope_layers", "no_rope_layer_interval")
    _check_window(c)
    return dense(c, "smollm3", tied=True)


def seed_oss(c: Config) -> ShapeHeader:
    """Seed-OSS."""
    c.must_be(attention_out_bias=False)
    bias = c.flag("attention_bias", True)
    return dense(c, "seed_oss", qkv_bias=bias, out_bias=False, second_norm="post_attention_norm")


def ernie(c: Config) -> ShapeHeader:
    """ERNIE 4.5, dense."""
    c.must_be(use_bias=False)
    return dense(c, "ernie4_5", tied=True)


def granite(c: Config) -> ShapeHeader:
    """Granite 3 and 3.x, dense."""
    h = dense(c, "granite")
    scales(c, h)
    return h


def scales(c: Config, h: ShapeHeader) -> None:
    """Write the factors of Granite."""
    for name, key in (
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        h.key(key, c.number(name, default=1.0))


def exaone4(c: Config) -> ShapeHeader:
    """EXAONE 4, with norms after attention and the feed-forward network."""
    c.must_be(hidden_act="silu")
    h = begin(c, "exaone4")
    dimensions(c, h)
    n_layer, (_, _, head) = layers(c), heads(c)
    h.key("rope.dimension_count", head)
    rope(c, h, head)
    kinds = every(c, "layer_types", n_layer, (SLIDING, FULL))
    pattern = c.value("sliding_window_pattern")
    if c.value("sliding_window") is not None:
        h.key("attention.sliding_window", c.count("sliding_window"))
        if kinds is None and pattern and isinstance(pattern, str):
            kinds = [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(n_layer)]
        if kinds is None:
            raise c.unknown("a sliding_window without layer_types")
        h.key("attention.sliding_window_pattern", [each == SLIDING for each in kinds])
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(n_layer):
        attention(c, h, b, head_norm=True)
        feed_forward(c, h, b)
        norms(h, b, c.count("hidden_size"), "post_attention_norm", "post_ffw_norm")
    return h


def olmo2(c: Config) -> ShapeHeader:
    """OLMo 2 and 3, with norms after attention and the feed-forward network, over all heads."""
    c.must_be(hidden_act="silu", attention_bias=False)
    h = begin(c, "olmo2")
    dimensions(c, h)
    n_layer, n_embd, (n_head, n_head_kv, head) = layers(c), c.count("hidden_size"), heads(c)
    rope(c, h, head)
    kinds = every(c, "layer_types", n_layer, (SLIDING, FULL))
    if c.value("sliding_window") is not None:
        h.key("attention.sliding_window", c.count("sliding_window"))
        kinds = kinds or [FULL if i % 4 == 3 else SLIDING for i in range(n_layer)]
        h.key("attention.sliding_window_pattern", [each == SLIDING for each in kinds])
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(n_layer):
        attention(c, h, b)
        h.weight(f"{b}.attn_q_norm", n_head * head)
        h.weight(f"{b}.attn_k_norm", n_head_kv * head)
        feed_forward(c, h, b)
        norms(h, b, n_embd, "post_attention_norm", "post_ffw_norm")
    return h


def glm4(c: Config) -> ShapeHeader:
    """GLM-4 of 2025, with norms before and after."""
    h = start(c, "glm4", turned=0.5)
    ends(c, h, tied=is_tied(c, False))
    bias = c.flag("attention_bias", False)
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        attention(c, h, b, qkv_bias=bias)
        _fused_feed_forward(c, h, b)
    return h


def phi3(c: Config) -> ShapeHeader:
    """Phi-3, 3.5 and 4, with attention and the feed-forward network each in one tensor."""
    c.must_be(hidden_act="silu", attention_bias=False, full_attn_mod=1, interpolate_factor=1)
    h = begin(c, "phi3")
    dimensions(c, h)
    n_head, _, _ = heads(c)
    size = int(rotary(c, 1 << 20) * c.count("hidden_size") / (1 << 20)) // n_head
    window = c.value("sliding_window")
    h.keys(rope__dimension_count=size, attention__sliding_window=0 if window is None else c.count("sliding_window"))
    _long_rope(c, h, size)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b, fused=True)
        _fused_feed_forward(c, h, b)
    return h


def _fused_feed_forward(c: Config, h: ShapeHeader, b: str) -> None:
    n_embd, n_ff = c.count("hidden_size"), c.count("intermediate_size")
    h.weight(f"{b}.ffn_up", n_embd, 2 * n_ff)
    h.weight(f"{b}.ffn_down", n_ff, n_embd)


def _long_rope(c: Config, h: ShapeHeader, size: int) -> None:
    """Rope with a factor for each frequency, and another set for long contexts."""
    part = rope_part(c)
    rope(c, h, size, ("default", "longrope"))
    limit = c.count("max_position_embeddings")
    before = limit if part is None else part.count("original_max_position_embeddings", default=limit)
    original = c.count("original_max_position_embeddings", default=before)
    h.key("rope.scaling.original_context_length", original)
    if part is None or rope_type(c, part) != "longrope":
        return
    for name, tensor in (("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")):
        factors = part.numbers(name)
        if factors is None or len(factors) != size // 2:
            raise c.error(f"has no {name} with {size // 2} numbers: add them")
        h.weight(tensor, size // 2)
    part.value("short_mscale", "long_mscale", "factor", "attention_factor")


def phi2(c: Config) -> ShapeHeader:
    """Phi-1.5 and 2, with one norm for attention and feed-forward, and biases everywhere."""
    c.must_be(qk_layernorm=False)
    h = start(c, "phi2", act="gelu_new", turned=0.5, eps="layer_norm_epsilon")
    biases = {"output_bias": True, "norm_bias": True, "qkv_bias": True, "out_bias": True, "bias": True}
    return stack(c, h, "attn_norm", tied=is_tied(c, False), gated=False, **biases)


def starcoder2(c: Config) -> ShapeHeader:
    """StarCoder2."""
    c.must_be(hidden_act="gelu_pytorch_tanh", use_bias=True, mlp_type="default", activation_function="gelu")
    c.value("sliding_window", "norm_type")
    h = begin(c, "starcoder2")
    dimensions(c, h, eps="layer_norm_epsilon")
    rope(c, h, heads(c)[2])
    biases = {"norm_bias": True, "qkv_bias": True, "out_bias": True, "bias": True}
    return stack(c, h, "attn_norm", "ffn_norm", tied=is_tied(c, True), gated=False, **biases)


def stablelm(c: Config) -> ShapeHeader:
    """StableLM and Stable Code."""
    c.must_be(hidden_act="silu", use_parallel_residual=False, qk_layernorm=False)
    h = begin(c, "stablelm")
    dimensions(c, h, eps="layer_norm_epsilon")
    size = rotary(c, heads(c)[2], 0.25)
    h.keys(rope__dimension_count=size, use_parallel_residual=False)
    rope(c, h, size)
    bias = c.flag("use_qkv_bias", False)
    return stack(c, h, "attn_norm", "ffn_norm", tied=is_tied(c, False), norm_bias=True, qkv_bias=bias)


def command_r(c: Config) -> ShapeHeader:
    """Command R, with one norm for attention and feed-forward."""
    c.must_be(hidden_act="silu", attention_bias=False)
    h = begin(c, "command-r")
    dimensions(c, h, eps="layer_norm_epsilon")
    n_head, n_head_kv, head = heads(c)
    h.keys(logit_scale=c.number("logit_scale"), rope__scaling__type="none")
    h.key("context_length", c.count("model_max_length", "max_position_embeddings"))
    rope(c, h, head)
    ends(c, h, tied=is_tied(c, True))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm")
        attention(c, h, b)
        if c.flag("use_qk_norm", False):
            h.weight(f"{b}.attn_q_norm", head, n_head)
            h.weight(f"{b}.attn_k_norm", head, n_head_kv)
        feed_forward(c, h, b)
    return h


def cohere2(c: Config) -> ShapeHeader:
    """Command R7B and Command A: three layers of four have a sliding window."""
    c.must_be(hidden_act="silu", attention_bias=False, use_qk_norm=False, use_parallel_block=True)
    c.must_be(use_parallel_embedding=True, use_gated_activation=True, use_embedding_sharing=True)
    c.must_be(sliding_window_pattern=4)
    kinds = every(c, "layer_types", layers(c), (SLIDING, FULL))
    if kinds is not None and kinds != [FULL if i % 4 == 3 else SLIDING for i in range(layers(c))]:
        raise c.unknown("layer_types in another order than three with a window and one without")
    c.value("order_of_interleaved_layers", "position_embedding_type", "layer_switch")
    h = begin(c, "cohere2")
    dimensions(c, h, eps="layer_norm_epsilon")
    size = rotary(c, heads(c)[2])
    h.keys(
        logit_scale=c.number("logit_scale"),
        attention__sliding_window=c.count("sliding_window"),
        rope__dimension_count=size,
        rope__scaling__type="none",
    )
    rope(c, h, size)
    return stack(c, h, "attn_norm", tied=is_tied(c, True))


def nemotron(c: Config) -> ShapeHeader:
    """Nemotron 4 and Minitron."""
    c.must_be(hidden_act="relu2", attention_bias=False, mlp_bias=False, kv_channels=heads(c)[2])
    h = begin(c, "nemotron")
    dimensions(c, h, eps="layer_norm_epsilon")
    size = rotary(c, heads(c)[2], c.number("rope_percent", default=0.5))
    h.keys(rope__dimension_count=size, rope__scaling__type="none")
    rope(c, h, size)
    return stack(c, h, "attn_norm", "ffn_norm", tied=is_tied(c, False), norm_bias=True, gated=False)


def mixtral(c: Config) -> ShapeHeader:
    """Mixtral, with Llama's attention."""
    c.must_be(hidden_act="silu")
    c.value("sliding_window")
    h = begin(c, "llama")
    dimensions(c, h)
    head = heads(c)[2]
    h.key("rope.dimension_count", head)
    rope(c, h, head)
    n_expert, n_ff = routed(c, h)
    ends(c, h, tied=is_tied(c, False))
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), "attn_norm", "ffn_norm")
        attention(c, h, b)
        experts(c, h, b, n_expert, n_ff)
    return h
