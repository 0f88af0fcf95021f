"""Sparse GGUF files with the headers of real models: every tensor described, not a byte of weights written.

A dummy load reads nothing but the header, so llama.cpp plans on such a file exactly as on the real one. Dimensions are
those of the published models; the quantization mixes are those that ``llama-quantize`` (``Q4_K_M``) or common
downloads have.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

Value = int | float | bool | str | list[int] | list[bool]

F32 = GGMLQuantizationType.F32
Q5_0 = GGMLQuantizationType.Q5_0
Q4_0 = GGMLQuantizationType.Q4_0
Q8_0 = GGMLQuantizationType.Q8_0
Q4_K = GGMLQuantizationType.Q4_K
Q5_K = GGMLQuantizationType.Q5_K
Q6_K = GGMLQuantizationType.Q6_K
MXFP4 = GGMLQuantizationType.MXFP4

ALIGNMENT = 32


@dataclass(frozen=True)
class Tensor:
    """One tensor; ``shape`` in ggml's order (the row length first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType = F32

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        block, size = GGML_QUANT_SIZES[self.type]
        if self.shape[0] % block:
            raise ValueError(
                f"{self.name}: rows of {self.shape[0]} are no multiple of {block}, {self.type.name}'s block"
            )
        return int(np.prod(self.shape, dtype=object)) // block * size


@dataclass(frozen=True)
class Shape:
    """A model's header. Keys of ``metadata`` that start with a dot get the architecture before them."""

    architecture: str
    title: str
    n_vocab: int
    pre: str
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...] = field(repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def n_layer(self) -> int:
        """``<arch>.block_count``."""
        count = self.metadata[".block_count"]
        assert isinstance(count, int)
        return count


def write(shape_name: str, directory: Path, vocab: bool = True) -> Path:
    """Write the shape as one sparse GGUF file into ``directory`` and return its path; a file already there is kept.

    Without ``vocab`` the file says ``no_vocab`` and has no tokens, as in a test of everything but the tokenizer.
    """
    path = directory / (f"{shape_name}.gguf" if vocab else f"{shape_name}-no-vocab.gguf")
    if not path.exists():
        write_shape(SHAPES[shape_name], path, vocab)
    return path


def write_split(shape_name: str, directory: Path, n_files: int, vocab: bool = True) -> Path:
    """Write the shape as llama.cpp's split model of ``n_files`` files, and return the path of the first."""
    shape = SHAPES[shape_name]
    per_file = -(-len(shape.tensors) // n_files)
    parts = [shape.tensors[i * per_file : (i + 1) * per_file] for i in range(n_files)]
    if not all(parts):
        raise ValueError(f"{shape_name} cannot be split into {n_files} files")
    paths = [directory / f"{shape_name}-{i + 1:05d}-of-{n_files:05d}.gguf" for i in range(n_files)]
    for i, (path, part) in enumerate(zip(paths, parts, strict=True)):
        writer = GGUFWriter(None, shape.architecture)
        if i == 0:
            _add_metadata(writer, shape, vocab)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n_files)
        writer.add_int32("split.tensors.count", len(shape.tensors))
        _finish(writer, part, path)
    return paths[0]


def write_shape(shape: Shape, path: Path, vocab: bool = True) -> None:
    """Write ``shape`` as one sparse GGUF file to ``path``."""
    writer = GGUFWriter(None, shape.architecture)
    _add_metadata(writer, shape, vocab)
    _finish(writer, shape.tensors, path)


def _add_metadata(writer: GGUFWriter, shape: Shape, vocab: bool) -> None:
    writer.add_string("general.type", "model")
    writer.add_string("general.name", shape.title)
    for key, value in shape.metadata.items():
        key = shape.architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_uint32(f"{shape.architecture}.vocab_size", shape.n_vocab)
    if vocab:
        add_vocabulary(writer, shape.n_vocab, shape.pre)
    else:
        writer.add_string("tokenizer.ggml.model", "no_vocab")


def _finish(writer: GGUFWriter, tensors: Sequence[Tensor], path: Path) -> None:
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), tensor.bytes, tensor.type)
    # a second pytest process that finds the path must find all of it
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = -(-partial.stat().st_size // ALIGNMENT) * ALIGNMENT
    data = sum(-(-tensor.bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    os.truncate(partial, header + data)
    partial.replace(path)


# ---- vocabulary


def add_vocabulary(writer: GGUFWriter, n_vocab: int, pre: str = "default") -> None:
    """Add a byte-level BPE tokenizer of ``n_vocab`` made-up tokens that llama.cpp accepts."""
    tokens, merges = _vocabulary(n_vocab)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_key_value("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.add_key_value(
        "tokenizer.ggml.token_type", [1] * (n_vocab - 2) + [3, 3], GGUFValueType.ARRAY, GGUFValueType.INT32
    )
    if merges:
        writer.add_key_value("tokenizer.ggml.merges", merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.add_uint32("tokenizer.ggml.bos_token_id", n_vocab - 2)
    writer.add_uint32("tokenizer.ggml.eos_token_id", n_vocab - 1)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)


@functools.cache
def _vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: the 256 bytes, pairs of them, pairs with a third byte, each by a merge, and two specials."""
    letters = _byte_letters()
    tokens, merges = list(letters), []
    for left in _endless(tokens):
        if len(tokens) >= n_vocab - 2:
            break
        for right in letters[: n_vocab - 2 - len(tokens)]:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return [*tokens, "<|begin|>", "<|end|>"], merges


def _endless(tokens: list[str]) -> Iterator[str]:
    index = 0
    while True:
        yield tokens[index]
        index += 1


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2) has for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


# ---- quantization mixes


def more_bits(layer: int, n_layer: int) -> bool:
    """Whether ``Q4_K_M`` gives ``attn_v`` and ``ffn_down`` of this layer ``Q6_K``."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _better(layer: int, n_layer: int) -> GGMLQuantizationType:
    return Q6_K if more_bits(layer, n_layer) else Q4_K


# ---- architectures


def _common(
    n_layer: int, n_ctx: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, **more: Value
) -> dict[str, Value]:
    return {
        ".block_count": n_layer,
        ".context_length": n_ctx,
        ".embedding_length": n_embd,
        ".feed_forward_length": n_ff,
        ".attention.head_count": n_head,
        ".attention.head_count_kv": n_head_kv,
        ".attention.layer_norm_rms_epsilon": 1e-6,
        **{"." + key.replace("__", "."): value for key, value in more.items()},
    }


def _ends(n_embd: int, n_vocab: int) -> list[Tensor]:
    return [
        Tensor("token_embd.weight", (n_embd, n_vocab), Q4_K),
        Tensor("output_norm.weight", (n_embd,)),
        Tensor("output.weight", (n_embd, n_vocab), Q6_K),
    ]


def _attention(
    b: str, n_embd: int, q: int, kv: int, v_type: GGMLQuantizationType, norm: int = 0, gated: bool = False
) -> list[Tensor]:
    """Grouped-query attention of layer prefix ``b``; ``q`` and ``kv`` are heads times head size, ``norm`` of QK-norm.

    Where it is ``gated``, the query projection also makes the output's gate.
    """
    return [
        Tensor(f"{b}.attn_norm.weight", (n_embd,)),
        Tensor(f"{b}.attn_q.weight", (n_embd, 2 * q if gated else q), Q4_K),
        Tensor(f"{b}.attn_k.weight", (n_embd, kv), Q4_K),
        Tensor(f"{b}.attn_v.weight", (n_embd, kv), v_type),
        Tensor(f"{b}.attn_output.weight", (q, n_embd), Q4_K),
        *([Tensor(f"{b}.attn_q_norm.weight", (norm,)), Tensor(f"{b}.attn_k_norm.weight", (norm,))] if norm else []),
    ]


def _ffn(
    b: str, n_embd: int, n_ff: int, gate_up: GGMLQuantizationType, down: GGMLQuantizationType, suffix: str = ""
) -> list[Tensor]:
    return [
        Tensor(f"{b}.ffn_gate{suffix}.weight", (n_embd, n_ff), gate_up),
        Tensor(f"{b}.ffn_up{suffix}.weight", (n_embd, n_ff), gate_up),
        Tensor(f"{b}.ffn_down{suffix}.weight", (n_ff, n_embd), down),
    ]


def _experts(
    b: str, n_embd: int, n_ff_exp: int, n_expert: int, gate_up: GGMLQuantizationType, down: GGMLQuantizationType
) -> list[Tensor]:
    return [
        Tensor(f"{b}.ffn_gate_inp.weight", (n_embd, n_expert)),
        Tensor(f"{b}.ffn_gate_exps.weight", (n_embd, n_ff_exp, n_expert), gate_up),
        Tensor(f"{b}.ffn_up_exps.weight", (n_embd, n_ff_exp, n_expert), gate_up),
        Tensor(f"{b}.ffn_down_exps.weight", (n_ff_exp, n_embd, n_expert), down),
    ]


def llama(
    title: str, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, bigger_v: bool = False
) -> Shape:
    head, n_vocab = 128, 128256
    tensors = [Tensor("rope_freqs.weight", (head // 2,)), *_ends(n_embd, n_vocab)]
    for i in range(n_layer):
        # with eight heads to a KV head attn_v is small, and gets Q5_K at least
        v_type = Q6_K if more_bits(i, n_layer) else Q5_K if bigger_v else Q4_K
        tensors += _attention(f"blk.{i}", n_embd, n_head * head, n_head_kv * head, v_type)
        tensors += [Tensor(f"blk.{i}.ffn_norm.weight", (n_embd,))]
        tensors += _ffn(f"blk.{i}", n_embd, n_ff, Q4_K, _better(i, n_layer))
    metadata = _common(
        n_layer, 131072, n_embd, n_ff, n_head, n_head_kv, rope__freq_base=500000.0, rope__dimension_count=head
    )
    return Shape("llama", title, n_vocab, "llama-bpe", metadata, tuple(tensors))


def qwen3(title: str, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_ff_exp: int = 0) -> Shape:
    """Dense without ``n_ff_exp``; with it experts in all layers."""
    head, n_vocab, n_expert = 128, 151936, 128
    tensors = _ends(n_embd, n_vocab)
    for i in range(n_layer):
        b, better = f"blk.{i}", _better(i, n_layer)
        tensors += _attention(b, n_embd, n_head * head, n_head_kv * head, better, head)
        tensors += [Tensor(f"{b}.ffn_norm.weight", (n_embd,))]
        if n_ff_exp:
            tensors += _experts(b, n_embd, n_ff_exp, n_expert, Q4_K, better)
        else:
            tensors += _ffn(b, n_embd, n_ff, Q4_K, better)
    experts = {"expert_count": n_expert, "expert_used_count": 8, "expert_feed_forward_length": n_ff_exp}
    metadata = _common(
        n_layer,
        40960,
        n_embd,
        n_ff,
        n_head,
        n_head_kv,
        rope__freq_base=1000000.0,
        attention__key_length=head,
        attention__value_length=head,
        **(experts if n_ff_exp else {}),
    )
    return Shape("qwen3moe" if n_ff_exp else "qwen3", title, n_vocab, "qwen2", metadata, tuple(tensors))


def _deepseek2(
    title: str,
    n_vocab: int,
    pre: str,
    n_head: int,
    n_dense: int,
    n_expert: int,
    scale: float,
    rope_base: float,
    rope_factor: float,
    n_ctx: int,
) -> Shape:
    """DeepSeek-V3 and its kin: latent attention, a few dense layers, then experts with one shared."""
    n_layer, n_embd, n_ff, n_ff_exp = 61, 7168, 18432, 2048
    q_rank, kv_rank, rope, nope, v_head = 1536, 512, 64, 128, 128
    tensors = _ends(n_embd, n_vocab)
    for i in range(n_layer):
        b = f"blk.{i}"
        tensors += [
            Tensor(f"{b}.attn_norm.weight", (n_embd,)),
            Tensor(f"{b}.attn_q_a_norm.weight", (q_rank,)),
            Tensor(f"{b}.attn_kv_a_norm.weight", (kv_rank,)),
            Tensor(f"{b}.attn_q_a.weight", (n_embd, q_rank), Q8_0),
            Tensor(f"{b}.attn_q_b.weight", (q_rank, n_head * (nope + rope)), Q8_0),
            Tensor(f"{b}.attn_kv_a_mqa.weight", (n_embd, kv_rank + rope), Q8_0),
            Tensor(f"{b}.attn_k_b.weight", (nope, kv_rank, n_head), Q8_0),
            Tensor(f"{b}.attn_v_b.weight", (kv_rank, v_head, n_head), Q8_0),
            Tensor(f"{b}.attn_output.weight", (n_head * v_head, n_embd), Q8_0),
            Tensor(f"{b}.ffn_norm.weight", (n_embd,)),
        ]
        if i < n_dense:
            tensors += _ffn(b, n_embd, n_ff, Q8_0, Q8_0)
        else:
            tensors += _experts(b, n_embd, n_ff_exp, n_expert, Q4_K, Q6_K)
            tensors += [Tensor(f"{b}.exp_probs_b.bias", (n_expert,))]
            tensors += _ffn(b, n_embd, n_ff_exp, Q8_0, Q8_0, "_shexp")
    metadata = _common(
        n_layer,
        n_ctx,
        n_embd,
        n_ff,
        n_head,
        1,
        rope__freq_base=rope_base,
        rope__dimension_count=rope,
        rope__scaling__type="yarn",
        rope__scaling__factor=rope_factor,
        rope__scaling__original_context_length=4096,
        rope__scaling__yarn_log_multiplier=0.1,
        leading_dense_block_count=n_dense,
        attention__q_lora_rank=q_rank,
        attention__kv_lora_rank=kv_rank,
        attention__key_length=kv_rank + rope,
        attention__value_length=kv_rank,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=v_head,
        expert_feed_forward_length=n_ff_exp,
        expert_count=n_expert,
        expert_used_count=8,
        expert_shared_count=1,
        expert_weights_scale=scale,
        expert_weights_norm=True,
        expert_gating_func=2,
    )
    return Shape("deepseek2", title, n_vocab, pre, metadata, tuple(tensors))


def gemma3(title: str, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int) -> Shape:
    """Five layers with a sliding window to one without; the embedding is the output too."""
    head, n_vocab = 256, 262208
    tensors = [Tensor("token_embd.weight", (n_embd, n_vocab), Q6_K), Tensor("output_norm.weight", (n_embd,))]
    for i in range(n_layer):
        b = f"blk.{i}"
        tensors += _attention(b, n_embd, n_head * head, n_head_kv * head, _better(i, n_layer), head)
        tensors += [
            Tensor(f"{b}.post_attention_norm.weight", (n_embd,)),
            Tensor(f"{b}.ffn_norm.weight", (n_embd,)),
            Tensor(f"{b}.post_ffw_norm.weight", (n_embd,)),
        ]
        tensors += _ffn(b, n_embd, n_ff, Q4_K, _better(i, n_layer))
    metadata = _common(
        n_layer,
        131072,
        n_embd,
        n_ff,
        n_head,
        n_head_kv,
        rope__freq_base=1000000.0,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
        attention__key_length=head,
        attention__value_length=head,
        attention__sliding_window=1024,
    )
    return Shape("gemma3", title, n_vocab, "default", metadata, tuple(tensors))


def _glm4_moe(title: str, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_ff_exp: int) -> Shape:
    """One dense layer, then experts with one shared; after ``n_layer`` layers one more, for multi-token prediction."""
    head, n_vocab, n_expert = 128, 151552, 128
    tensors = _ends(n_embd, n_vocab)
    for i in range(n_layer + 1):
        b = f"blk.{i}"
        tensors += _attention(b, n_embd, n_head * head, n_head_kv * head, _better(i, n_layer))
        for name, rows in ("q", n_head * head), ("k", n_head_kv * head), ("v", n_head_kv * head):
            tensors += [Tensor(f"{b}.attn_{name}.bias", (rows,))]
        tensors += [Tensor(f"{b}.post_attention_norm.weight", (n_embd,))]
        # rows of no whole blocks of 256: what llama-quantize takes instead of Q6_K and Q4_K
        down = Q8_0 if _better(i, n_layer) == Q6_K else Q5_0
        if i == 0:
            tensors += _ffn(b, n_embd, n_ff, Q4_K, down)
            continue
        tensors += _experts(b, n_embd, n_ff_exp, n_expert, Q4_K, down)
        tensors += [Tensor(f"{b}.exp_probs_b.bias", (n_expert,))]
        tensors += _ffn(b, n_embd, n_ff_exp, Q4_K, down, "_shexp")
        if i == n_layer:
            tensors += [
                Tensor(f"{b}.nextn.eh_proj.weight", (2 * n_embd, n_embd), Q8_0),
                *(Tensor(f"{b}.nextn.{name}.weight", (n_embd,)) for name in ("enorm", "hnorm", "shared_head_norm")),
                Tensor(f"{b}.nextn.embed_tokens.weight", (n_embd, n_vocab), Q4_K),
                Tensor(f"{b}.nextn.shared_head_head.weight", (n_embd, n_vocab), Q4_K),
            ]
    metadata = _common(
        n_layer + 1,
        131072,
        n_embd,
        n_ff,
        n_head,
        n_head_kv,
        rope__freq_base=1000000.0,
        rope__dimension_count=head // 2,
        attention__key_length=head,
        attention__value_length=head,
        leading_dense_block_count=1,
        expert_feed_forward_length=n_ff_exp,
        expert_count=n_expert,
        expert_used_count=8,
        expert_shared_count=1,
        expert_weights_scale=1.0,
        expert_weights_norm=True,
        expert_gating_func=2,
        nextn_predict_layers=1,
    )
    return Shape("glm4moe", title, n_vocab, "glm4", metadata, tuple(tensors))


def _gpt_oss(title: str, n_layer: int, n_expert: int) -> Shape:
    """Experts in MXFP4 with biases, attention sinks, every second layer with a short window."""
    n_embd, n_ff, n_head, n_head_kv, head, n_vocab = 2880, 2880, 64, 8, 64, 201088
    tensors = [
        Tensor("token_embd.weight", (n_embd, n_vocab), Q8_0),
        Tensor("output_norm.weight", (n_embd,)),
        Tensor("output.weight", (n_embd, n_vocab), Q8_0),
    ]
    for i in range(n_layer):
        b = f"blk.{i}"
        tensors += [Tensor(f"{b}.attn_norm.weight", (n_embd,))]
        for name, rows in ("q", n_head * head), ("k", n_head_kv * head), ("v", n_head_kv * head):
            tensors += [
                Tensor(f"{b}.attn_{name}.weight", (n_embd, rows), Q8_0),
                Tensor(f"{b}.attn_{name}.bias", (rows,)),
            ]
        tensors += [
            Tensor(f"{b}.attn_output.weight", (n_head * head, n_embd), Q8_0),
            Tensor(f"{b}.attn_output.bias", (n_embd,)),
            Tensor(f"{b}.attn_sinks.weight", (n_head,)),
            Tensor(f"{b}.post_attention_norm.weight", (n_embd,)),
            *_experts(b, n_embd, n_ff, n_expert, MXFP4, MXFP4),
            Tensor(f"{b}.ffn_gate_inp.bias", (n_expert,)),
            Tensor(f"{b}.ffn_gate_exps.bias", (n_ff, n_expert)),
            Tensor(f"{b}.ffn_up_exps.bias", (n_ff, n_expert)),
            Tensor(f"{b}.ffn_down_exps.bias", (n_embd, n_expert)),
        ]
    metadata = _common(
        n_layer,
        131072,
        n_embd,
        n_ff,
        n_head,
        n_head_kv,
        rope__freq_base=150000.0,
        rope__scaling__type="yarn",
        rope__scaling__factor=32.0,
        rope__scaling__original_context_length=4096,
        attention__key_length=head,
        attention__value_length=head,
        attention__sliding_window=128,
        expert_count=n_expert,
        expert_used_count=4,
        expert_feed_forward_length=n_ff,
    )
    return Shape("gpt-oss", title, n_vocab, "gpt-4o", metadata, tuple(tensors))


def _qwen3next(title: str) -> Shape:
    """Three layers of gated delta net (recurrent) to one of attention, experts in all of them."""
    n_layer, n_embd, n_head, n_head_kv, head, n_vocab = 48, 2048, 16, 2, 256, 151936
    n_expert, n_ff_exp, state, groups, dt_rank, conv = 512, 512, 128, 16, 32, 4
    value, qkv = state * dt_rank, 2 * state * groups + state * dt_rank
    tensors = _ends(n_embd, n_vocab)
    for i in range(n_layer):
        b = f"blk.{i}"
        if (i + 1) % 4 == 0:
            tensors += _attention(b, n_embd, n_head * head, n_head_kv * head, _better(i, n_layer), head, gated=True)
        else:
            tensors += [
                Tensor(f"{b}.attn_norm.weight", (n_embd,)),
                Tensor(f"{b}.attn_qkv.weight", (n_embd, qkv), Q4_K),
                Tensor(f"{b}.attn_gate.weight", (n_embd, value), Q4_K),
                Tensor(f"{b}.ssm_conv1d.weight", (conv, qkv)),
                Tensor(f"{b}.ssm_dt.bias", (dt_rank,)),
                Tensor(f"{b}.ssm_a", (dt_rank,)),
                Tensor(f"{b}.ssm_ba.weight", (n_embd, 2 * dt_rank), Q4_K),
                Tensor(f"{b}.ssm_norm.weight", (state,)),
                Tensor(f"{b}.ssm_out.weight", (value, n_embd), Q4_K),
            ]
        tensors += [
            Tensor(f"{b}.post_attention_norm.weight", (n_embd,)),
            *_experts(b, n_embd, n_ff_exp, n_expert, Q4_K, _better(i, n_layer)),
            Tensor(f"{b}.ffn_gate_inp_shexp.weight", (n_embd,)),
            *_ffn(b, n_embd, n_ff_exp, Q4_K, _better(i, n_layer), "_shexp"),
        ]
    metadata = _common(
        n_layer,
        262144,
        n_embd,
        5120,
        n_head,
        n_head_kv,
        rope__freq_base=10000000.0,
        rope__dimension_count=64,
        attention__key_length=head,
        attention__value_length=head,
        expert_count=n_expert,
        expert_used_count=10,
        expert_feed_forward_length=n_ff_exp,
        expert_shared_feed_forward_length=n_ff_exp,
        ssm__conv_kernel=conv,
        ssm__inner_size=value,
        ssm__state_size=state,
        ssm__time_step_rank=dt_rank,
        ssm__group_count=groups,
    )
    return Shape("qwen3next", title, n_vocab, "qwen2", metadata, tuple(tensors))


def _nemotron_h(title: str) -> Shape:
    """A hybrid: each layer is a Mamba-2 mixer (M), an FFN (-) or attention (*), and nothing else."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    n_embd, n_ff, n_head, n_head_kv, head, n_vocab = 4480, 15680, 40, 8, 128, 131072
    inner, state, dt_rank, groups, conv = 10240, 128, 128, 8, 4
    mixed = inner + 2 * groups * state
    tensors = [
        Tensor("token_embd.weight", (n_embd, n_vocab), Q4_0),
        Tensor("output_norm.weight", (n_embd,)),
        Tensor("output.weight", (n_embd, n_vocab), Q8_0),
    ]
    for i, kind in enumerate(pattern):
        b = f"blk.{i}"
        tensors += [Tensor(f"{b}.attn_norm.weight", (n_embd,))]
        if kind == "M":
            tensors += [
                Tensor(f"{b}.ssm_in.weight", (n_embd, inner + mixed + dt_rank), Q4_0),
                Tensor(f"{b}.ssm_conv1d.weight", (conv, mixed)),
                Tensor(f"{b}.ssm_conv1d.bias", (mixed,)),
                Tensor(f"{b}.ssm_dt.bias", (dt_rank,)),
                Tensor(f"{b}.ssm_a", (1, dt_rank)),
                Tensor(f"{b}.ssm_d", (1, dt_rank)),
                Tensor(f"{b}.ssm_norm.weight", (inner // groups, groups)),
                Tensor(f"{b}.ssm_out.weight", (inner, n_embd), Q4_0),
            ]
        elif kind == "-":
            tensors += [
                Tensor(f"{b}.ffn_up.weight", (n_embd, n_ff), Q4_0),
                Tensor(f"{b}.ffn_down.weight", (n_ff, n_embd), Q4_0),
            ]
        else:
            tensors += [
                Tensor(f"{b}.attn_q.weight", (n_embd, n_head * head), Q4_0),
                Tensor(f"{b}.attn_k.weight", (n_embd, n_head_kv * head), Q4_0),
                Tensor(f"{b}.attn_v.weight", (n_embd, n_head_kv * head), Q4_0),
                Tensor(f"{b}.attn_output.weight", (n_head * head, n_embd), Q4_0),
            ]
    metadata: dict[str, Value] = {
        ".block_count": len(pattern),
        ".context_length": 131072,
        ".embedding_length": n_embd,
        ".feed_forward_length": [n_ff if kind == "-" else 0 for kind in pattern],
        ".attention.head_count": n_head,
        ".attention.head_count_kv": [n_head_kv if kind == "*" else 0 for kind in pattern],
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".attention.layer_norm_epsilon": 1e-5,
        ".attention.key_length": head,
        ".attention.value_length": head,
        ".rope.dimension_count": head,
        ".ssm.conv_kernel": conv,
        ".ssm.inner_size": inner,
        ".ssm.state_size": state,
        ".ssm.time_step_rank": dt_rank,
        ".ssm.group_count": groups,
    }
    return Shape("nemotron_h", title, n_vocab, "tekken", metadata, tuple(tensors))


_BUILDERS: dict[str, Callable[[], Shape]] = {
    "llama-3.1-8b": lambda: llama("Llama 3.1 8B Instruct", 32, 4096, 14336, 32, 8),
    "llama-3.1-70b": lambda: llama("Llama 3.1 70B Instruct", 80, 8192, 28672, 64, 8, bigger_v=True),
    "qwen3-32b": lambda: qwen3("Qwen3 32B", 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": lambda: qwen3("Qwen3 30B A3B", 48, 2048, 6144, 32, 4, 768),
    "qwen3-235b-a22b": lambda: qwen3("Qwen3 235B A22B", 94, 4096, 12288, 64, 4, 1536),
    "deepseek-v3.1": lambda: _deepseek2(
        "DeepSeek V3.1", 129280, "deepseek-v3", 128, 3, 256, 2.5, 10000.0, 40.0, 163840
    ),
    "kimi-k2": lambda: _deepseek2("Kimi K2 Instruct", 163840, "kimi-k2", 64, 1, 384, 2.827, 50000.0, 32.0, 131072),
    "glm45-air": lambda: _glm4_moe("GLM 4.5 Air", 46, 4096, 10944, 96, 8, 1408),
    "gemma3-12b": lambda: gemma3("Gemma 3 12B", 48, 3840, 15360, 16, 8),
    "gpt-oss-20b": lambda: _gpt_oss("gpt-oss 20B", 24, 32),
    "gpt-oss-120b": lambda: _gpt_oss("gpt-oss 120B", 36, 128),
    "qwen3-next-80b-a3b": lambda: _qwen3next("Qwen3 Next 80B A3B"),
    "nemotron-h-9b": lambda: _nemotron_h("Nemotron Nano 9B v2"),
}

SHAPES: dict[str, Shape] = {name: build() for name, build in _BUILDERS.items()}
"""Every shape by the name that tests use."""
