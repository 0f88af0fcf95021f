"""Measure attention on the processor: prompts and generation, with flash attention and without.

    python -m tools.measurements.host_attention [--threads 2] [--depth 4096]

Models of two layers with random weights are computed by the installed llama-cpp-python, at the beginning of a context
and at a depth of it: attention takes the difference. Prints lines of ``tests/data/speeds/host_attention.csv``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

HEADS = ((32, 8, 64), (16, 4, 128), (16, 2, 128), (16, 16, 128))
"""Heads, heads of the cache, and the size of a head."""
TOKENS = (1, 16, 64, 512)
_LAYERS, _FFN, _VOCABULARY = 2, 256, 256


def write_model(path: Path, heads: int, kv_heads: int, size: int) -> None:
    """Write a model without a tokenizer whose time is mostly that of attention."""
    n_embd, random = heads * size, np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(1 << 16)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    writer.add_rope_dimension_count(size)
    shapes = {"token_embd": (_VOCABULARY, n_embd), "output": (_VOCABULARY, n_embd), "output_norm": (n_embd,)}
    of_layer = {
        "attn_norm": (n_embd,),
        "ffn_norm": (n_embd,),
        "attn_q": (n_embd, n_embd),
        "attn_output": (n_embd, n_embd),
        "attn_k": (kv_heads * size, n_embd),
        "attn_v": (kv_heads * size, n_embd),
        "ffn_gate": (_FFN, n_embd),
        "ffn_up": (_FFN, n_embd),
        "ffn_down": (n_embd, _FFN),
    }
    shapes |= {f"blk.{i}.{name}": shape for i in range(_LAYERS) for name, shape in of_layer.items()}
    for name, shape in shapes.items():
        weights = random.standard_normal(shape) * 0.02
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(f"{name}.weight", weights.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gflops(path: Path, flash: bool, cache: int, threads: int, depth: int) -> dict[int, float]:
    """Measure the speed of attention for each number of tokens, in GFLOP per second and thread."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = depth + 1024, 512, 512
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type, params.type_k, params.type_v = int(flash), cache, cache
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)

    def seconds(count: int, position: int) -> float:
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = 5, position + i, 1, 0
            batch.logits[i] = i == count - 1
        started = time.monotonic()
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)
        taken = time.monotonic() - started
        llama_cpp.llama_batch_free(batch)
        return taken

    times: dict[tuple[int, int], float] = {}
    for start in (0, depth):
        llama_cpp.llama_memory_clear(memory, True)
        for position in range(0, start, 512):
            seconds(512, position)
        for count in TOKENS:
            tries = []
            for _ in range(2 if count == max(TOKENS) else 5):
                tries.append(seconds(count, start))
                llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)
            times[start, count] = min(tries)
    per_token = 4 * llama_cpp.llama_model_n_embd(model) * depth * _LAYERS / threads / 1e9
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return {count: count * per_token / (times[depth, count] - times[0, count]) for count in TOKENS}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4096)
    options = parser.parse_args()
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as directory:
        for heads in HEADS:
            path = Path(directory) / "model.gguf"
            write_model(path, *heads)
            for name, cache, flash in (("f16", 1, True), ("f16", 1, False), ("q8_0", 8, True)):
                for count, speed in gflops(path, flash, cache, options.threads, options.depth).items():
                    row = (*heads, name, options.threads, options.depth, count, int(flash), round(speed, 2))
                    print(",".join(map(str, row)), flush=True)


if __name__ == "__main__":
    main()
