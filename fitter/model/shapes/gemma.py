"""Google's Gemma, most of whose layers have a window."""

from __future__ import annotations

from fitter.model.shapes.common import (
    ShapeHeader,
    attention,
    begin,
    dimensions,
    ends,
    every,
    feed_forward,
    heads,
    is_tied,
    layers,
    norms,
    rope,
    rope_part,
    stack,
)
from fitter.model.shapes.config import MOST_EXPERTS, Config
from fitter.model.shapes.llama import FULL, SLIDING

_FOUR_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_GELU = ("gelu_pytorch_tanh", "gelu")


def _start(c: Config, architecture: str) -> ShapeHeader:
    c.must_be(hidden_act=_GELU, hidden_activation=_GELU, attention_bias=False)
    c.value("sliding_window_size", "query_pre_attn_scalar", "use_bidirectional_attention", "use_bidirectional_attn")
    if not is_tied(c, True):
        raise c.unknown("tie_word_embeddings false")
    h = begin(c, architecture)
    dimensions(c, h)
    return h


def gemma(c: Config) -> ShapeHeader:
    """The first Gemma."""
    h = _start(c, "gemma")
    rope(c, h, heads(c)[2])
    return stack(c, h, "attn_norm", "ffn_norm", tied=True)


def gemma2(c: Config) -> ShapeHeader:
    """Gemma 2: every other layer has a window."""
    _check_order(c, 2)
    h = _start(c, "gemma2")
    rope(c, h, heads(c)[2])
    h.keys(
        attn_logit_softcapping=c.number("attn_logit_softcapping"),
        final_logit_softcapping=c.number("final_logit_softcapping"),
        attention__sliding_window=c.count("sliding_window"),
    )
    return stack(c, h, *_FOUR_NORMS, tied=True)


def gemma3(c: Config) -> ShapeHeader:
    """Gemma 3, also the text part: five layers of six have a window."""
    c.must_be(attn_logit_softcapping=())
    pattern = c.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    _check_order(c, 6 if pattern == 6 else 0)
    h = _start(c, "gemma3")
    theta = _thetas(c, h)
    h.keys(
        rope__freq_base=theta[0],
        rope__freq_base_swa=theta[1],
        attention__sliding_window=c.count("sliding_window"),
    )
    if soft := c.number("final_logit_softcapping", default=0.0):
        h.key("final_logit_softcapping", soft)
    return stack(c, h, *_FOUR_NORMS, tied=True, head_norm=True)


def _check_order(c: Config, every_nth: int) -> None:
    kinds = every(c, "layer_types", layers(c), (SLIDING, FULL))
    usual = [FULL if every_nth and i % every_nth == every_nth - 1 else SLIDING for i in range(layers(c))]
    if not every_nth or (kinds is not None and kinds != usual):
        raise c.unknown("another order of layers with and without a window than was published")


def _thetas(c: Config, h: ShapeHeader) -> tuple[float, float | None]:
    """Return the bases of rope, of layers without and with a window, and write its scaling."""
    part = rope_part(c)
    full, window = (part.part(FULL), part.part(SLIDING)) if part is not None else (None, None)
    scaling = full if full is not None else part
    if scaling is not None and (kind := scaling.text("rope_type", scaling.text("type", "default"))) != "default":
        scaling.value("type")
        if kind != "linear":
            raise c.unknown(f"a rope scaling of type '{kind}'")
        h.keys(rope__scaling__type=kind, rope__scaling__factor=scaling.number("factor"))
    if window is not None:
        window.must_be(rope_type="default")
    theta = c.number("rope_theta", default=1e6)
    local = c.number("rope_local_base_freq", default=1e4)
    return (
        theta if full is None else full.number("rope_theta", default=theta),
        local if window is None else window.number("rope_theta", default=local),
    )


def gemma3n(c: Config) -> ShapeHeader:
    """Gemma 3n, whose layers have own embeddings and share caches."""
    n_layer, n_embd, n_vocab = layers(c), c.count("hidden_size"), c.count("vocab_size")
    c.must_be(altup_num_inputs=4, hidden_activation=_GELU, attention_bias=False)
    if not is_tied(c, True):
        raise c.unknown("tie_word_embeddings false")
    c.value("query_pre_attn_scalar")
    c.must_be(attn_logit_softcapping=())
    c.value("vocab_size_per_layer_input", "altup_coef_clip", "altup_correct_scale", "altup_lr_multiplier")
    n_ff = c.counts("intermediate_size", n_layer, least=1)
    if len(set(n_ff)) > 1:
        raise c.unknown("an intermediate_size that differs between layers")
    kinds = every(c, "layer_types", n_layer, (SLIDING, FULL))
    if kinds is None:
        kinds = [FULL if i % 5 == 4 else SLIDING for i in range(n_layer)]
    n_own = c.count("hidden_size_per_layer_input")
    sparse = c.value("activation_sparsity_pattern")
    sparse = sparse if isinstance(sparse, list) else [0.0 if sparse is None else sparse] * n_layer
    h = begin(c, "gemma3n")
    n_head, n_head_kv, head = heads(c)
    theta = _thetas(c, h)
    h.keys(
        vocab_size=n_vocab,
        block_count=n_layer,
        context_length=c.count("max_position_embeddings"),
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__layer_norm_rms_epsilon=c.number("rms_norm_eps"),
        attention__sliding_window=c.count("sliding_window"),
        attention__sliding_window_pattern=[each == SLIDING for each in kinds],
        attention__shared_kv_layers=c.count("num_kv_shared_layers", least=0),
        rope__freq_base=theta[0],
        rope__freq_base_swa=theta[1],
        altup__active_idx=c.count("altup_active_idx", least=0),
        altup__num_inputs=4,
        embedding_length_per_layer_input=n_own,
        # the sparsity of activations; only the number of layers matters here
        activation_sparsity_scale=[float("-inf") if not each else 1.6448535 for each in sparse],
        final_logit_softcapping=c.number("final_logit_softcapping", default=0.0) or None,
    )
    h.weight("token_embd", n_embd, n_vocab)
    h.weight("per_layer_token_embd", n_own * n_layer, n_vocab)
    h.weight("per_layer_model_proj", n_embd, n_own * n_layer)
    h.weight("per_layer_proj_norm", n_own)
    h.weight("altup_proj", n_embd, n_embd, 3)
    h.weight("altup_unembd_proj", n_embd, n_embd, 3)
    h.weight("output_norm", n_embd)
    for i in range(n_layer):
        b = f"blk.{i}"
        norms(h, b, n_embd, *_FOUR_NORMS)
        attention(c, h, b, head_norm=True)
        feed_forward(c, h, b, n_ff[i])
        h.weight(f"{b}.inp_gate", n_embd, n_own)
        h.weight(f"{b}.proj", n_own, n_embd)
        _gemma3n_layer(h, b, n_embd, c.count("laurel_rank"))
    return h


def _gemma3n_layer(h: ShapeHeader, b: str, n_embd: int, n_laurel: int) -> None:
    """Add the tensors of a layer that only Gemma 3n has."""
    norms(h, b, n_embd, "post_norm", "altup_router_norm", "altup_correct_scale", "laurel_post_norm")
    h.weight(f"{b}.altup_correct_coef", 4, 4)
    h.weight(f"{b}.altup_predict_coef", 4, 16)
    h.weight(f"{b}.altup_router", n_embd, 4)
    h.weight(f"{b}.laurel_l", n_embd, n_laurel)
    h.weight(f"{b}.laurel_r", n_laurel, n_embd)


def gemma4(c: Config) -> ShapeHeader:
    """Gemma 4, whose layers without a window have larger heads, and some of which also have experts."""
    n_layer, n_embd, n_vocab = layers(c), c.count("hidden_size"), c.count("vocab_size")
    kinds = every(c, "layer_types", n_layer, (SLIDING, FULL))
    if kinds is None:
        raise c.error("has no layer_types: add them")
    if kinds[-1] != FULL:
        # transformers would change the last layer, which then has other tensors
        raise c.unknown("a window in its last layer")
    n_head, n_head_kv, head = heads(c)
    head_full = c.count("global_head_dim")
    kv_full = c.count("num_global_key_value_heads", default=n_head_kv)
    n_shared, n_own = c.count("num_kv_shared_layers", default=0, least=0), c.value("hidden_size_per_layer_input") or 0
    n_own = c.count("hidden_size_per_layer_input", default=0, least=0) if n_own else 0
    c.value("vocab_size_per_layer_input", "expert_intermediate_size")
    wide = c.flag("use_double_wide_mlp", False)
    n_ff = [c.count("intermediate_size") * (2 if wide and i >= n_layer - n_shared else 1) for i in range(n_layer)]
    h = _start(c, "gemma4")
    full, window = _gemma4_rope(c)
    h.keys(
        feed_forward_length=n_ff if wide else n_ff[0],
        attention__head_count_kv=n_head_kv
        if kv_full == n_head_kv
        else [n_head_kv if each == SLIDING else kv_full for each in kinds],
        attention__key_length=head_full,
        attention__value_length=head_full,
        attention__key_length_swa=head,
        attention__value_length_swa=head,
        attention__sliding_window=c.count("sliding_window"),
        attention__sliding_window_pattern=[each == SLIDING for each in kinds],
        attention__shared_kv_layers=n_shared,
        embedding_length_per_layer_input=n_own,
        rope__freq_base=full,
        rope__freq_base_swa=window,
        rope__dimension_count=head_full,
        rope__dimension_count_swa=head,
        final_logit_softcapping=c.number("final_logit_softcapping", default=0.0) or None,
    )
    has_experts = _gemma4_routes(c, h)
    h.weight("rope_freqs", head_full // 2)
    ends(c, h, tied=True)
    if n_own:
        h.weight("per_layer_token_embd", n_own * n_layer, n_vocab)
        h.weight("per_layer_model_proj", n_embd, n_own * n_layer)
        h.weight("per_layer_proj_norm", n_own)
    same = c.flag("attention_k_eq_v", False)
    for i, kind in enumerate(kinds):
        b = f"blk.{i}"
        norms(h, b, n_embd, *_FOUR_NORMS)
        h.weight(f"{b}.layer_output_scale", 1)
        size, n_kv = (head, n_head_kv) if kind == SLIDING else (head_full, kv_full)
        _gemma4_attention(h, b, n_embd, n_head, n_kv, size, shares=i >= n_layer - n_shared, same=same and kind == FULL)
        feed_forward(c, h, b, n_ff[i])
        if has_experts:
            _gemma4_experts(c, h, b)
        if n_own:
            h.weight(f"{b}.inp_gate", n_embd, n_own)
            h.weight(f"{b}.proj", n_own, n_embd)
            norms(h, b, n_embd, "post_norm")
    return h


def _gemma4_rope(c: Config) -> tuple[float, float]:
    """Return the bases of rope, of layers without and with a window."""
    part = rope_part(c)
    full = part.part(FULL) if part is not None else None
    window = part.part(SLIDING) if part is not None else None
    if full is None or window is None or full.text("rope_type", "") != "proportional":
        raise c.unknown("rope_parameters that are not 'proportional' for full_attention")
    full.number("partial_rotary_factor", default=1.0)
    window.must_be(rope_type="default")
    return full.number("rope_theta"), window.number("rope_theta")


def _gemma4_routes(c: Config, h: ShapeHeader) -> bool:
    """Write the metadata of routed experts; return whether there are any."""
    c.value("num_experts", "moe_intermediate_size", "top_k_experts")
    if not c.flag("enable_moe_block", False):
        return False
    n_expert = c.count("num_experts", most=MOST_EXPERTS)
    h.keys(
        expert_count=n_expert,
        expert_used_count=c.count("top_k_experts", most=n_expert),
        expert_feed_forward_length=c.count("moe_intermediate_size"),
    )
    return True


def _gemma4_experts(c: Config, h: ShapeHeader, b: str) -> None:
    n_embd, n_expert, n_ff = c.count("hidden_size"), c.count("num_experts"), c.count("moe_intermediate_size")
    h.weight(f"{b}.ffn_gate_inp", n_embd, n_expert)
    h.tensor(f"{b}.ffn_gate_inp.scale", n_embd)
    h.weight(f"{b}.ffn_gate_up_exps", n_embd, 2 * n_ff, n_expert)
    h.weight(f"{b}.ffn_down_exps", n_ff, n_embd, n_expert)
    h.tensor(f"{b}.ffn_down_exps.scale", n_expert)
    norms(h, b, n_embd, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")


def _gemma4_attention(
    h: ShapeHeader, b: str, n_embd: int, n_head: int, n_head_kv: int, head: int, *, shares: bool, same: bool
) -> None:
    """Add attention; ``shares``: it has the keys and values of an earlier layer. ``same``: its values are its keys."""
    h.weight(f"{b}.attn_q", n_embd, n_head * head)
    h.weight(f"{b}.attn_q_norm", head)
    h.weight(f"{b}.attn_output", n_head * head, n_embd)
    if not shares:
        h.weight(f"{b}.attn_k", n_embd, n_head_kv * head)
        h.weight(f"{b}.attn_k_norm", head)
        if not same:
            h.weight(f"{b}.attn_v", n_embd, n_head_kv * head)
