"""A header while it is made, and parts that most architectures share: dimensions, rope, attention and feed-forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fitter.llama.header.gguf_writer import Tensor, Value
from fitter.model.shapes.config import MOST_EXPERTS, MOST_LAYERS, Config

_ALWAYS_F32 = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "ssm_conv1d_q",
    "ssm_conv1d_k",
    "ssm_conv1d_v",
    "shortconv.conv",
    "time_mix_first",
    "time_mix_w1",
    "time_mix_w2",
    "time_mix_decay_w1",
    "time_mix_decay_w2",
    "time_mix_lerp_fused",
    "altup_correct_coef",
    "altup_predict_coef",
    "indexer.proj",
)
"""Matrices that the converter leaves in F32."""


class ShapeHeader:
    """Metadata and tensors of a model. ``type`` is the type of its matrices, ``bf16`` or ``f16``."""

    def __init__(self, architecture: str, type: str = "bf16") -> None:
        self.architecture = architecture
        self.type = type
        self.metadata: dict[str, Value] = {"general.architecture": architecture, "general.type": "model"}
        self.tensors: list[Tensor] = []

    def key(self, name: str, value: Value | None) -> None:
        """Set a key of the architecture; ``None`` sets nothing."""
        if value is not None and not (isinstance(value, Sequence) and not value):
            self.metadata[f"{self.architecture}.{name}"] = value

    def keys(self, **values: Value | None) -> None:
        """Set several keys; ``__`` in a name becomes a dot."""
        for name, value in values.items():
            self.key(name.replace("__", "."), value)

    def weight(self, name: str, *shape: int, type: str | None = None) -> None:
        """Add the tensor ``name.weight``; ``shape`` in ggml's order."""
        self.tensor(f"{name}.weight", *shape, type=type)

    def bias(self, name: str, *shape: int) -> None:
        """Add the tensor ``name.bias``."""
        self.tensor(f"{name}.bias", *shape)

    def tensor(self, name: str, *shape: int, type: str | None = None) -> None:
        """Add a tensor, by default of the converter's type."""
        self.tensors.append(Tensor(name, _without_ones(shape), type or self._type_of(name, shape)))

    def number(self, name: str) -> int:
        """Return the number at a key of the architecture; 0 without one."""
        value = self.metadata.get(f"{self.architecture}.{name}", 0)
        return value if isinstance(value, int) else 0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def of_type(self, type: str) -> ShapeHeader:
        """Return the header with matrices of another type; those that are published quantized stay so."""
        if type == self.type:
            return self
        other = ShapeHeader(self.architecture, type)
        other.metadata = self.metadata
        other.tensors = [replace(each, type=type) if each.type == self.type else each for each in self.tensors]
        return other

    def _type_of(self, name: str, shape: Sequence[int]) -> str:
        stem = name.removesuffix(".weight")
        short_name = stem.split(".", 2)[-1] if stem.startswith("blk.") else stem
        is_f32 = len(shape) == 1 or stem == name or name.endswith("_norm.weight") or short_name in _ALWAYS_F32
        return "f32" if is_f32 else self.type


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n]


_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f16"}
"""The converter's type of matrices, by their published type."""


def begin(c: Config, architecture: str) -> ShapeHeader:
    """Start a header whose matrices have the converter's type."""
    dtype = c.text("torch_dtype", c.text("dtype", "bfloat16"))
    c.value("dtype")
    if dtype not in _DTYPES:
        raise c.unknown(f"torch_dtype '{dtype}'")
    return ShapeHeader(architecture, _DTYPES[dtype])


def start(
    c: Config,
    architecture: str,
    *,
    act: str = "silu",
    turned: float = 1.0,
    eps: str = "layer_norm_rms_epsilon",
    writes_turned: bool = True,
) -> ShapeHeader:
    """Start a header with dimensions and rope; ``turned``: share of a head that it rotates, if the file says none."""
    c.must_be(hidden_act=act)
    h = begin(c, architecture)
    dimensions(c, h, eps=eps)
    size = rotary(c, heads(c)[2], turned)
    if writes_turned:
        h.key("rope.dimension_count", size)
    rope(c, h, size)
    return h


def blocks(n_layer: int) -> Iterator[str]:
    """Yield the prefix of each layer."""
    return (f"blk.{i}" for i in range(n_layer))


def layers(c: Config) -> int:
    """Return the number of layers."""
    return c.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MOST_LAYERS)


def following(c: Config, name: str = "num_nextn_predict_layers") -> int:
    """Return the number of layers for multi-token prediction after the last one."""
    return c.count(name, default=0, least=0, most=MOST_LAYERS - layers(c))


def heads(c: Config) -> tuple[int, int, int]:
    """Return the number of query heads, of key and value heads, and the size of a head."""
    n_head = c.count("num_attention_heads", "n_head", most=1 << 16)
    n_head_kv = c.count("num_key_value_heads", default=n_head, most=1 << 16)
    n_embd = c.count("hidden_size", "n_embd", "d_model")
    if n_head % n_head_kv:
        raise c.error(f"has {n_head} heads for {n_head_kv} heads of keys: give a multiple")
    if n_embd % n_head and not c.has("head_dim"):
        raise c.error(f"has a hidden_size of {n_embd} for {n_head} heads: give a multiple, or a head_dim")
    return n_head, n_head_kv, c.count("head_dim", default=max(1, n_embd // n_head), most=1 << 16)


def dimensions(c: Config, h: ShapeHeader, *, n_layer: int | None = None, eps: str = "layer_norm_rms_epsilon") -> None:
    """Write the metadata that nearly every architecture has."""
    n_head, n_head_kv, head = heads(c)
    h.keys(
        vocab_size=c.count("vocab_size"),
        block_count=layers(c) if n_layer is None else n_layer,
        context_length=c.count("max_position_embeddings", "n_positions", "n_ctx"),
        embedding_length=c.count("hidden_size", "n_embd", "d_model"),
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
    )
    if c.has("intermediate_size"):
        h.key("feed_forward_length", c.count("intermediate_size"))
    h.key(f"attention.{eps}", c.number(*EPSILONS, default=1e-5))
    h.keys(attention__key_length=head, attention__value_length=head)


EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


_YARN = {
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attn_factor",
    "extrapolation_factor": "ext_factor",
}


def rope(c: Config, h: ShapeHeader, size: int, known: Sequence[str] = ("default", "llama3", "linear", "yarn")) -> None:
    """Write the metadata of rope, and the tensors of its factors; ``size`` elements of a head are rotated."""
    part = rope_part(c)
    theta = c.number("rope_theta", "rotary_emb_base", default=0.0)
    scaling = c.part("rope_scaling")
    kind = rope_type(c, part)
    if part is not None:
        theta = part.number("rope_theta", default=theta)
        # the caller knows how much of a head is rotated
        part.value("partial_rotary_factor", "mrope_section", "mrope_interleaved", "truncate")
    if scaling is not None:
        scaling.value("mrope_section", "mrope_interleaved", "truncate")
    h.key("rope.freq_base", theta or None)
    if kind not in known:
        raise c.unknown(f"a rope scaling of type '{kind}'")
    if kind in ("linear", "yarn") and part is not None:
        factor = part.number("factor")
        h.keys(rope__scaling__type=kind, rope__scaling__factor=factor)
        if kind == "yarn":
            original = part.count(
                "original_max_position_embeddings", default=c.count("max_position_embeddings", most=1 << 30)
            )
            h.key("rope.scaling.original_context_length", original)
            for name, key in _YARN.items():
                if part.has(name):
                    h.key(f"rope.scaling.yarn_{key}", part.number(name))
            part.value("mscale", "mscale_all_dim")
    if kind == "llama3" and part is not None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            part.number(name, default=1.0)
        part.count("original_max_position_embeddings", default=8192)
        h.weight("rope_freqs", size // 2)


def rope_part(c: Config) -> Config | None:
    """Return the scaling of rope; newer files call it ``rope_parameters``."""
    part = c.part("rope_parameters")
    return part if part is not None else c.part("rope_scaling")


def rope_type(c: Config, part: Config | None) -> str:
    """Return the kind of scaling."""
    if part is None:
        return "default"
    kind = part.text("rope_type", part.text("type", "default"))
    part.value("type")
    return {"mrope": "default", "su": "longrope"}.get(kind, kind)


def sections(c: Config) -> list[int]:
    """Return how many frequencies of rope each of a token's positions has; empty for one position."""
    part = rope_part(c)
    said = c if part is None or not part.has("mrope_section") else part
    numbers = said.numbers("mrope_section")
    return [*said.counts("mrope_section", len(numbers)), 0, 0, 0, 0][:4] if numbers else []


def routed(c: Config, h: ShapeHeader) -> tuple[int, int]:
    """Write the metadata of routed experts; return their number and width."""
    n_expert = c.count("num_local_experts", "num_experts", "n_routed_experts", most=MOST_EXPERTS)
    n_ff = c.count("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    h.keys(
        expert_count=n_expert,
        expert_used_count=c.count("num_experts_per_tok", "num_experts_per_token", "moe_topk", most=n_expert),
        expert_feed_forward_length=n_ff,
    )
    return n_expert, n_ff


def every(c: Config, name: str, n_layer: int, kinds: Sequence[str]) -> list[str] | None:
    """Return the kind of each layer if the file lists them; only ``kinds`` are known."""
    texts = c.texts(name)
    if texts is None:
        return None
    if len(texts) != n_layer:
        raise c.error(f"has {len(texts)} {name} for {n_layer} layers: give one for each")
    if other := next((each for each in texts if each not in kinds), None):
        raise c.unknown(f"a layer of type '{other[:40]}'")
    return texts


def is_tied(c: Config, default: bool) -> bool:
    """Return whether the output has the weights of the token embedding."""
    return c.flag("tie_word_embeddings", default)


def ends(c: Config, h: ShapeHeader, *, tied: bool, bias: bool = False, norm_bias: bool = False) -> None:
    """Add the token embedding, and the output with its norm."""
    n_embd, n_vocab = c.count("hidden_size", "n_embd", "d_model"), c.count("vocab_size")
    h.weight("token_embd", n_embd, n_vocab)
    h.weight("output_norm", n_embd)
    if norm_bias:
        h.bias("output_norm", n_embd)
    if not tied:
        h.weight("output", n_embd, n_vocab)
        if bias:
            h.bias("output", n_vocab)


def attention(
    c: Config,
    h: ShapeHeader,
    b: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norm: bool = False,
    fused: bool = False,
    gated: bool = False,
    sizes: tuple[int, int, int] | None = None,
) -> None:
    """Add attention with grouped queries to the layer ``b``.

    Args:
        c: The hyperparameters.
        h: The header.
        b: The layer's prefix.
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: Whether the output has a bias.
        head_norm: Whether each head's query and key have norms.
        fused: Whether queries, keys and values are one tensor.
        gated: Whether the query's tensor also makes the output's gate.
        sizes: Heads, key heads and size of a head, if not the model's.
    """
    n_embd = c.count("hidden_size", "n_embd", "d_model")
    n_head, n_head_kv, head = sizes or heads(c)
    q, kv = n_head * head, n_head_kv * head
    parts = (("qkv", q + 2 * kv),) if fused else (("q", 2 * q if gated else q), ("k", kv), ("v", kv))
    for name, rows in parts:
        h.weight(f"{b}.attn_{name}", n_embd, rows)
        if qkv_bias:
            h.bias(f"{b}.attn_{name}", rows)
    if head_norm:
        h.weight(f"{b}.attn_q_norm", head)
        h.weight(f"{b}.attn_k_norm", head)
    h.weight(f"{b}.attn_output", q, n_embd)
    if out_bias:
        h.bias(f"{b}.attn_output", n_embd)


def stack(
    c: Config,
    h: ShapeHeader,
    *names: str,
    tied: bool,
    output_bias: bool = False,
    norm_bias: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norm: bool = False,
    bias: bool = False,
    gated: bool = True,
) -> ShapeHeader:
    """Add equal layers with norms (``names``), attention and a feed-forward network between embedding and output."""
    ends(c, h, tied=tied, bias=output_bias, norm_bias=norm_bias)
    for b in blocks(layers(c)):
        norms(h, b, c.count("hidden_size"), *names, bias=norm_bias)
        attention(c, h, b, qkv_bias=qkv_bias, out_bias=out_bias, head_norm=head_norm)
        feed_forward(c, h, b, bias=bias, gated=gated)
    return h


def feed_forward(
    c: Config,
    h: ShapeHeader,
    b: str,
    n_ff: int | None = None,
    *,
    bias: bool = False,
    gated: bool = True,
    suffix: str = "",
    type: str | None = None,
) -> None:
    """Add a feed-forward network to the layer ``b``; ``type``: of its matrices, if not the model's."""
    n_embd, n_ff = c.count("hidden_size", "n_embd", "d_model"), n_ff or c.count("intermediate_size")
    parts = ("gate", "up") if gated else ("up",)
    for name in parts:
        h.weight(f"{b}.ffn_{name}{suffix}", n_embd, n_ff, type=type)
        if bias:
            h.bias(f"{b}.ffn_{name}{suffix}", n_ff)
    h.weight(f"{b}.ffn_down{suffix}", n_ff, n_embd, type=type)
    if bias:
        h.bias(f"{b}.ffn_down{suffix}", n_embd)


def experts(
    c: Config, h: ShapeHeader, b: str, n_expert: int, n_ff: int, *, gated: bool = True, probability_bias: bool = False
) -> None:
    """Add routed experts with their router to the layer ``b``; ``probability_bias``: a bias corrects the router."""
    n_embd = c.count("hidden_size")
    h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert)
    for name in ("gate", "up") if gated else ("up",):
        h.weight(f"{b}.ffn_{name}_exps", n_embd, n_ff, n_expert)
    h.weight(f"{b}.ffn_down_exps", n_ff, n_embd, n_expert)
    if probability_bias:
        h.bias(f"{b}.exp_probs_b", n_expert)


def norms(h: ShapeHeader, b: str, n_embd: int, *names: str, bias: bool = False) -> None:
    """Add norms to the layer ``b``."""
    for name in names:
        h.weight(f"{b}.{name}", n_embd)
        if bias:
            h.bias(f"{b}.{name}", n_embd)


def rotary(c: Config, size: int, default: float = 1.0) -> int:
    """Return how many elements of a head of this size rope rotates."""
    part = rope_part(c)
    inner = part.number("partial_rotary_factor", default=default) if part is not None else default
    factor = c.number("partial_rotary_factor", "rotary_pct", "rope_pct", default=inner)
    if not 0 < factor <= 1 or not math.isfinite(factor):
        raise c.error(f"has partial_rotary_factor {factor}: give a share of at most 1")
    return int(size * factor)
