"""Small real models whose memory is of another kind than an ordinary cache: windows, states. No tensor is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType

from examples.tiny_moe import TOKENS, TinyModel, add_metadata, add_tokenizer

N_SWA = 256
"""Tokens of the window of ``write_swa``."""

_SWA = TinyModel("tiny swa", n_layer=6, n_embd=128, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=256, n_expert=0)
_HYBRID = TinyModel("tiny hybrid", n_layer=6, n_embd=256, n_head=4, n_head_kv=2, n_embd_head=64, n_ff=256, n_expert=0)
_VISION = TinyModel("tiny vision", n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=256, n_expert=0)
_MOE = TinyModel("tiny half moe", n_layer=3, n_embd=256, n_head=4, n_head_kv=1, n_embd_head=64, n_ff=256, n_expert=8)
_BERT = TinyModel(
    "tiny bert",
    n_layer=2,
    n_embd=128,
    n_head=4,
    n_head_kv=4,
    n_embd_head=32,
    n_ff=256,
    n_expert=0,
    n_ctx_train=1024,
)
_WITH_ATTENTION = (2, 4)
_L_CACHE = 4


def write_swa(path: Path) -> Path:
    """A ``gemma3``: five layers with a sliding window, then one without."""
    model = _SWA
    writer, add = _begun(path, "gemma3", model)
    writer.add_sliding_window(N_SWA)
    add("output_norm", model.n_embd)
    for i in range(model.n_layer):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"blk.{i}.{norm}", model.n_embd)
        _add_attention(add, model, i)
        _add_ffn(add, model, i)
    return _finished(writer, path)


def write_hybrid(path: Path) -> Path:
    """An ``lfm2``: layers with a short convolution, whose state is recurrent, and two with attention."""
    model = _HYBRID
    writer, add = _begun(path, "lfm2", replace(model, n_head_kv=[2 * (i in _WITH_ATTENTION) for i in range(6)]))  # type: ignore[arg-type]
    writer.add_shortconv_l_cache(_L_CACHE)
    writer.add_vocab_size(len(TOKENS))
    add("token_embd_norm", model.n_embd)
    for i in range(model.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}", model.n_embd)
        if i in _WITH_ATTENTION:
            _add_attention(add, model, i)
        else:
            add(f"blk.{i}.shortconv.conv", model.n_embd, _L_CACHE)
            add(f"blk.{i}.shortconv.in_proj", 3 * model.n_embd, model.n_embd)
            add(f"blk.{i}.shortconv.out_proj", model.n_embd, model.n_embd)
        _add_ffn(add, model, i)
    return _finished(writer, path)


def write_vision(path: Path) -> Path:
    """A ``qwen3vl``, whose positions have several dimensions."""
    model = _VISION
    writer, add = _begun(path, "qwen3vl", model)
    writer.add_rope_dimension_sections([4, 4, 4, 4])
    writer.add_num_deepstack_layers(0)
    add("output_norm", model.n_embd)
    for i in range(model.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}", model.n_embd)
        _add_attention(add, model, i)
        _add_ffn(add, model, i)
    return _finished(writer, path)


def write_half_moe(path: Path) -> Path:
    """A ``qwen3moe`` whose weights are all f16, as a converted model has them."""
    model = _MOE
    writer, add = _begun(path, "qwen3moe", model)
    add("output", len(TOKENS), model.n_embd)
    add("output_norm", model.n_embd)
    for i in range(model.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}", model.n_embd)
        _add_attention(add, model, i)
        add(f"blk.{i}.ffn_gate_inp", model.n_expert, model.n_embd)
        for kind, shape in (
            ("gate", (model.n_ff, model.n_embd)),
            ("up", (model.n_ff, model.n_embd)),
            ("down", (model.n_embd, model.n_ff)),
        ):
            add(f"blk.{i}.ffn_{kind}_exps", model.n_expert, *shape)
    return _finished(writer, path)


def write_bert(path: Path, pooling: PoolingType = PoolingType.MEAN) -> Path:
    """A ``bert``, which embeds texts of up to 1024 tokens."""
    model = _BERT
    writer, add = _begun(path, "bert", model)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    add("token_types", 2, model.n_embd)
    add("position_embd", model.n_ctx_train, model.n_embd)
    for norm in ("token_embd_norm", *(f"blk.{i}.{kind}_output_norm" for i in range(2) for kind in ("attn", "layer"))):
        add(norm, model.n_embd)
        add(f"{norm}.bias", model.n_embd)
    for i in range(model.n_layer):
        for kind in ("q", "k", "v", "output"):
            add(f"blk.{i}.attn_{kind}", model.n_embd, model.n_embd)
            add(f"blk.{i}.attn_{kind}.bias", model.n_embd)
        for kind, shape in (("up", (model.n_ff, model.n_embd)), ("down", (model.n_embd, model.n_ff))):
            add(f"blk.{i}.ffn_{kind}", *shape)
            add(f"blk.{i}.ffn_{kind}.bias", shape[0])
    return _finished(writer, path)


def _begun(path: Path, architecture: str, model: TinyModel) -> tuple[GGUFWriter, Callable[..., None]]:
    """A file with metadata, tokenizer and embeddings, and what adds a tensor of a shape to it."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    add_metadata(writer, model)
    add_tokenizer(writer)

    def add(name: str, *shape: int) -> None:
        is_norm = len(shape) == 1
        data = np.ones(shape) if is_norm else rng.standard_normal(shape) / shape[-1] ** 0.5
        is_exact = is_norm or name.endswith((".conv", "token_types", "position_embd"))
        writer.add_tensor(
            name if name.endswith(".bias") else f"{name}.weight", data.astype(np.float32 if is_exact else np.float16)
        )

    add("token_embd", len(TOKENS), model.n_embd)
    return writer, add


def _add_attention(add: Callable[..., None], model: TinyModel, i: int) -> None:
    q, kv = model.n_head * model.n_embd_head, model.n_head_kv * model.n_embd_head
    for norm in ("attn_q_norm", "attn_k_norm"):
        add(f"blk.{i}.{norm}", model.n_embd_head)
    add(f"blk.{i}.attn_q", q, model.n_embd)
    add(f"blk.{i}.attn_k", kv, model.n_embd)
    add(f"blk.{i}.attn_v", kv, model.n_embd)
    add(f"blk.{i}.attn_output", model.n_embd, q)


def _add_ffn(add: Callable[..., None], model: TinyModel, i: int) -> None:
    add(f"blk.{i}.ffn_gate", model.n_ff, model.n_embd)
    add(f"blk.{i}.ffn_up", model.n_ff, model.n_embd)
    add(f"blk.{i}.ffn_down", model.n_embd, model.n_ff)


def _finished(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
