"""Models whose layers have a state, such as Mamba, and those layers for other models."""

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
)
from fitter.model.shapes.config import Config

ANY_CONTEXT = 1 << 20
"""The converter's context of models without a limit."""


def mamba2_layer(
    h: ShapeHeader, b: str, n_embd: int, inner: int, n_group: int, state: int, n_head: int, conv: int
) -> None:
    """Add a Mamba-2 layer."""
    wide = inner + 2 * n_group * state
    h.weight(f"{b}.ssm_in", n_embd, inner + wide + n_head)
    h.weight(f"{b}.ssm_conv1d", conv, wide)
    h.bias(f"{b}.ssm_conv1d", wide)
    h.bias(f"{b}.ssm_dt", n_head)
    h.tensor(f"{b}.ssm_a", 1, n_head)
    h.tensor(f"{b}.ssm_d", 1, n_head)
    h.weight(f"{b}.ssm_norm", inner // n_group, n_group)
    h.weight(f"{b}.ssm_out", inner, n_embd)


def jamba(c: Config) -> ShapeHeader:
    """Jamba."""
    c.must_be(hidden_act="silu", mamba_proj_bias=False, mamba_conv_bias=True, mamba_inner_layernorms=True)
    c.must_be(sliding_window=())
    c.value("use_mamba_kernels", "num_logits_to_keep", "calc_logits_for_entire_prompt", "n_ctx")
    n_layer, n_embd, n_ff = layers(c), c.count("hidden_size"), c.count("intermediate_size")
    at, period = c.count("attn_layer_offset", least=0), c.count("attn_layer_period")
    expert_at, expert_period = c.count("expert_layer_offset", least=0), c.count("expert_layer_period")
    n_expert, used = c.count("num_experts", most=1024), c.count("num_experts_per_tok")
    inner, state = c.count("mamba_expand") * n_embd, c.count("mamba_d_state")
    conv, rank = c.count("mamba_d_conv"), -(-n_embd // 16)
    if c.value("mamba_dt_rank") != "auto":
        rank = c.count("mamba_dt_rank", default=rank)
    n_head_kv = heads(c)[1]
    h = begin(c, "jamba")
    dimensions(c, h)
    h.keys(
        attention__head_count_kv=[n_head_kv if i % period == at else 0 for i in range(n_layer)],
        ssm__conv_kernel=conv,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=rank,
        expert_count=n_expert,
        expert_used_count=used,
    )
    ends(c, h, tied=is_tied(c, False))
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, "attn_norm", "ffn_norm")
        if i % period == at:
            attention(c, h, b)
        else:
            _mamba(h, b, n_embd, inner, state, rank, conv)
            for name, size in (("dt", rank), ("b", state), ("c", state)):
                h.weight(f"{b}.ssm_{name}_norm", size)
        if n_expert > 1 and i >= expert_at and (i - expert_at) % expert_period == 0:
            experts(c, h, b, n_expert, n_ff)
        else:
            feed_forward(c, h, b)
    return h


def _mamba(h: ShapeHeader, b: str, n_embd: int, inner: int, state: int, rank: int, conv: int) -> None:
    h.weight(f"{b}.ssm_in", n_embd, 2 * inner)
    h.weight(f"{b}.ssm_conv1d", conv, inner)
    h.bias(f"{b}.ssm_conv1d", inner)
    h.weight(f"{b}.ssm_x", inner, rank + 2 * state)
    h.weight(f"{b}.ssm_dt", rank, inner)
    h.bias(f"{b}.ssm_dt", inner)
    h.tensor(f"{b}.ssm_a", state, inner)
    h.tensor(f"{b}.ssm_d", inner)
    h.weight(f"{b}.ssm_out", inner, n_embd)


def _stateful(c: Config, h: ShapeHeader, inner: int, state: int, conv: int, rank: int) -> None:
    h.keys(
        vocab_size=c.count("vocab_size"),
        context_length=ANY_CONTEXT,
        embedding_length=c.count("hidden_size", "d_model"),
        feed_forward_length=0,
        attention__head_count=0,
        block_count=layers(c),
        ssm__conv_kernel=conv,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=rank,
        attention__layer_norm_rms_epsilon=c.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
    )


def mamba(c: Config) -> ShapeHeader:
    """Mamba, and Falcon Mamba."""
    c.must_be(hidden_act="silu", use_bias=False, use_conv_bias=True)
    _training(c)
    n_embd, state = c.count("hidden_size", "d_model"), c.count("state_size", "d_state", default=16)
    conv, inner = (
        c.count("conv_kernel", "d_conv", default=4),
        c.count("intermediate_size", "d_inner", default=2 * n_embd),
    )
    rank = -(-n_embd // 16)
    if c.value("time_step_rank", "dt_rank") != "auto":
        rank = c.count("time_step_rank", "dt_rank", default=rank)
    if inner != 2 * n_embd:
        raise c.unknown(f"an intermediate_size {inner} that is not twice the hidden_size")
    h = begin(c, "mamba")
    _stateful(c, h, inner, state, conv, rank)
    h.key("ssm.dt_b_c_rms", c.text("model_type", "mamba") == "falcon_mamba")
    ends(c, h, tied=is_tied(c, True))
    for i in range(layers(c)):
        norms(h, f"blk.{i}", n_embd, "attn_norm")
        _mamba(h, f"blk.{i}", n_embd, inner, state, rank, conv)
    return h


def mamba2(c: Config) -> ShapeHeader:
    """Mamba-2, such as Codestral Mamba."""
    c.must_be(hidden_act="silu", use_bias=False, use_conv_bias=True)
    _training(c)
    c.value("chunk_size", "norm_before_gate", "rms_norm", "time_step_limit")
    n_embd, state = c.count("hidden_size", "d_model"), c.count("state_size", "d_state", default=128)
    conv, inner = c.count("conv_kernel", "d_conv", default=4), c.count("expand", default=2) * n_embd
    n_head, n_group = inner // c.count("head_dim", default=64), c.count("n_groups", default=1)
    c.must_be(intermediate_size=inner)
    c.value("num_heads")
    h = begin(c, "mamba2")
    _stateful(c, h, inner, state, conv, n_head)
    h.key("ssm.group_count", n_group)
    ends(c, h, tied=is_tied(c, False))
    for i in range(layers(c)):
        norms(h, f"blk.{i}", n_embd, "attn_norm")
        mamba2_layer(h, f"blk.{i}", n_embd, inner, n_group, state, n_head, conv)
    return h


def _training(c: Config) -> None:
    """Read the hyperparameters that matter only in training."""
    for name in ("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"):
        c.value(name)
    c.value("residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "use_associative_scan", "fused_add_norm")
    c.value("ssm_cfg", "expand", "rms_norm", "n_layer")
    if c.count("vocab_size") % c.count("pad_vocab_size_multiple", default=1):
        raise c.error("has a vocab_size that is no multiple of pad_vocab_size_multiple: give the padded one")
