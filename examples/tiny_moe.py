"""Write a real small mixture-of-experts model: random weights, every tensor present, a tokenizer that works.

    python examples/tiny_moe.py tiny-moe.gguf

It takes a second or two and some 130 MB. What the model says is gibberish, always the same for the same seed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


@dataclass(frozen=True)
class TinyModel:
    """Dimensions, named as in llama.cpp. Without experts (``n_expert`` 0) it is a dense model.

    ``n_ff`` is that of one expert where there are any. All row lengths must be multiples of 32, the block of
    ``q4_0`` and ``q8_0``.
    """

    name: str = "Tiny MoE"
    n_layer: int = 12
    n_embd: int = 512
    n_head: int = 8
    n_head_kv: int = 4
    n_embd_head: int = 64
    n_ff: int = 512
    n_expert: int = 16
    n_expert_used: int = 4
    n_ctx_train: int = 16384

    @property
    def architecture(self) -> str:
        """``qwen3moe`` or ``qwen3``, which differ in nothing but the experts."""
        return "qwen3moe" if self.n_expert else "qwen3"


def write(path: str | os.PathLike[str], model: TinyModel | None = None, seed: int = 0) -> Path:
    """Write ``model`` as GGUF to ``path``, all of it or nothing, and return the path.

    The weights depend on ``seed`` and the dimensions alone. Raises ``OSError`` where the file cannot be written.
    """
    path, model = Path(path), model or TinyModel()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # where it cannot be written, say so before the seconds that the weights take
        partial.touch()
        writer = GGUFWriter(None, model.architecture)
        add_metadata(writer, model)
        add_tokenizer(writer)
        _add_tensors(writer, model, np.random.default_rng(seed))
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    """What llama.cpp needs to know of a llama model."""
    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_block_count(model.n_layer)
    writer.add_context_length(model.n_ctx_train)
    writer.add_embedding_length(model.n_embd)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_key_length(model.n_embd_head)
    writer.add_value_length(model.n_embd_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if model.n_expert:
        writer.add_expert_count(model.n_expert)
        writer.add_expert_used_count(model.n_expert_used)
        writer.add_expert_feed_forward_length(model.n_ff)


SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
WORDS = [*SYLLABLES, *("\N{LOWER ONE EIGHTH BLOCK}" + syllable for syllable in SYLLABLES)]
TOKENS = [*SPECIAL, *BYTES, *WORDS]


def add_tokenizer(writer: GGUFWriter) -> None:
    """SentencePiece's kind: any text can be written in bytes, and syllables make what the model says readable."""
    unknown, normal, control, byte = 2, 1, 3, 6
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([unknown, control, control, *[byte] * len(BYTES), *[normal] * len(WORDS)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_tensors(writer: GGUFWriter, model: TinyModel, rng: np.random.Generator) -> None:
    f32, f16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
    q4_0, q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
    n_embd, n_ff = model.n_embd, model.n_ff
    q, kv = model.n_head * model.n_embd_head, model.n_head_kv * model.n_embd_head

    def add(name: str, data: np.ndarray, type_: GGMLQuantizationType) -> None:
        writer.add_tensor(f"{name}.weight", quantize(data, type_), raw_dtype=type_)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    # the special and byte tokens get no weight in the output, so that it is printable
    output = random(len(TOKENS), n_embd)
    output[: -len(WORDS)] = 0
    add("token_embd", random(len(TOKENS), n_embd), f16)
    add("output_norm", ones(n_embd), f32)
    add("output", output, f16)
    for i in range(model.n_layer):
        b = f"blk.{i}"
        add(f"{b}.attn_norm", ones(n_embd), f32)
        add(f"{b}.attn_q", random(q, n_embd), f16)
        add(f"{b}.attn_k", random(kv, n_embd), f16)
        add(f"{b}.attn_v", random(kv, n_embd), f16)
        add(f"{b}.attn_output", random(n_embd, q), f16)
        add(f"{b}.attn_q_norm", ones(model.n_embd_head), f32)
        add(f"{b}.attn_k_norm", ones(model.n_embd_head), f32)
        add(f"{b}.ffn_norm", ones(n_embd), f32)
        if model.n_expert:
            add(f"{b}.ffn_gate_inp", random(model.n_expert, n_embd), f32)
            add(f"{b}.ffn_gate_exps", random(model.n_expert, n_ff, n_embd), q4_0)
            add(f"{b}.ffn_up_exps", random(model.n_expert, n_ff, n_embd), q4_0)
            add(f"{b}.ffn_down_exps", random(model.n_expert, n_embd, n_ff), q8_0)
        else:
            add(f"{b}.ffn_gate", random(n_ff, n_embd), q4_0)
            add(f"{b}.ffn_up", random(n_ff, n_embd), q4_0)
            add(f"{b}.ffn_down", random(n_embd, n_ff), q8_0)


def main(arguments: list[str]) -> int:
    """Write the model to the path that is the only argument."""
    if len(arguments) != 1:
        print("usage: python examples/tiny_moe.py PATH", file=sys.stderr)
        return 2
    try:
        path = write(arguments[0])
    except OSError as error:
        print(f"cannot write {arguments[0]}: {error.strerror}", file=sys.stderr)
        return 3
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
