"""Real LoRA adapters for the tiny models, every value random."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TARGETS = ("attn_q", "attn_v", "ffn_up", "ffn_up_exps")
"""Tensors that get an adapter, those of them that the model has."""


def write_lora(
    path: Path, model: Path, rank: int = 8, targets: tuple[str, ...] = TARGETS, architecture: str | None = None
) -> Path:
    """Write an adapter of ``rank`` for ``targets`` in the model at ``model`` to ``path``, and return the path.

    ``architecture`` is written in place of the model's own.
    """
    reader = gguf.GGUFReader(model)
    field = reader.fields["general.architecture"]
    rng = np.random.default_rng(rank)
    writer = gguf.GGUFWriter(path, architecture or str(bytes(field.parts[-1]), "utf-8"))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for tensor in reader.tensors:
        name, _, suffix = tensor.name.rpartition(".")
        if suffix != "weight" or name.rpartition(".")[2] not in targets or len(tensor.shape) < 2:
            continue
        n_in, n_out, *experts = (int(n) for n in tensor.shape)
        # a row of A per token, where rows of the tensor are looked up
        shapes = ((*experts, rank, n_in), (*experts, n_out, rank))
        if tensor.name == "token_embd.weight":
            shapes = ((n_out, rank), (n_in, rank))
        for part, shape in zip(("lora_a", "lora_b"), shapes, strict=True):
            data = rng.standard_normal(shape, dtype=np.float32) / np.float32(10)
            writer.add_tensor(f"{tensor.name}.{part}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
