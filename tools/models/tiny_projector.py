"""Real projectors of a few hundred kilobytes: a SigLIP tower with random weights, every tensor present."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


@dataclass(frozen=True)
class TinyProjector:
    """Dimensions. ``n_embd_text`` is the embedding length of the model that it belongs to, by default ``TINY_DENSE``'s.

    An image of ``image_size`` pixels a side becomes ``(image_size / patch_size / scale_factor) ** 2`` tokens for
    ``gemma3``; ``lfm2`` takes images of 64 to 256 tokens, unless it is told otherwise.
    """

    kind: str = "gemma3"
    n_layer: int = 2
    n_embd: int = 96
    n_head: int = 4
    n_ff: int = 200
    image_size: int = 112
    patch_size: int = 14
    scale_factor: int = 4
    n_embd_text: int = 128


def write_projector(path: Path, projector: TinyProjector | None = None, seed: int = 0) -> Path:
    """Write ``projector`` to ``path``, in milliseconds, and return the path."""
    p = projector or TinyProjector()
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name("tiny projector")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", p.kind)
    writer.add_uint32("clip.vision.image_size", p.image_size)
    writer.add_uint32("clip.vision.patch_size", p.patch_size)
    writer.add_uint32("clip.vision.embedding_length", p.n_embd)
    writer.add_uint32("clip.vision.feed_forward_length", p.n_ff)
    writer.add_uint32("clip.vision.projection_dim", p.n_embd_text)
    writer.add_uint32("clip.vision.block_count", p.n_layer)
    writer.add_uint32("clip.vision.attention.head_count", p.n_head)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_uint32("clip.vision.projector.scale_factor", p.scale_factor)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_bool("clip.use_gelu", True)

    f32, f16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16

    def add(name: str, shape: tuple[int, ...], type_: GGMLQuantizationType = f32) -> None:
        data = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        writer.add_tensor(name, quantize(data, type_), raw_dtype=type_)

    def linear(name: str, n_out: int, n_in: int) -> None:
        add(f"{name}.weight", (n_out, n_in), f16)
        add(f"{name}.bias", (n_out,))

    def norm(name: str) -> None:
        add(f"{name}.weight", (p.n_embd,))
        add(f"{name}.bias", (p.n_embd,))

    add("v.patch_embd.weight", (p.n_embd, 3, p.patch_size, p.patch_size), f16)
    add("v.patch_embd.bias", (p.n_embd,))
    add("v.position_embd.weight", ((p.image_size // p.patch_size) ** 2, p.n_embd))
    for i in range(p.n_layer):
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"v.blk.{i}.{part}", p.n_embd, p.n_embd)
        linear(f"v.blk.{i}.ffn_up", p.n_ff, p.n_embd)
        linear(f"v.blk.{i}.ffn_down", p.n_embd, p.n_ff)
    norm("v.post_ln")
    if p.kind == "gemma3":
        add("mm.input_projection.weight", (p.n_embd, p.n_embd_text), f16)
        add("mm.soft_emb_norm.weight", (p.n_embd,))
    else:
        linear("mm.1", p.n_ff, p.n_embd * p.scale_factor**2)
        linear("mm.2", p.n_embd_text, p.n_ff)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
