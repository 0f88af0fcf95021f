"""Ask what loads take, a real backend or fitter; write the answers as text, store them as tables, compare them."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, TensorBuftOverride
from tools.models import shapes

MODELS = {
    "llama-3.1-8b": "dense",
    "qwen3-32b": "dense, with norms of Q and K",
    "qwen3-30b-a3b": "experts, softmax routing",
    "gemma3-12b": "sliding windows",
    "deepseek-v3.1": "latent attention, experts with sigmoid routing",
    "gpt-oss-20b": "experts with biases, attention sinks, sliding windows",
    "qwen3-next-80b-a3b": "gated delta net and attention, experts",
    "nemotron-h-9b": "Mamba-2 and attention",
}
"""The shapes that ``draw_params`` is used with, and why each is among them."""

_OVERRIDES = ("", "exps=CPU", r"ffn_(up|gate|down)=CPU", r"blk\.[0-9]\.=CPU", r"ffn_down.*weight=CPU", r"attn_.*=CPU")
_CACHE_TYPES = ("f16", "q8_0", "q4_0", "q5_1", "iq4_nl", "bf16", "f32")
_SHOWN = 10


def text_of(breakdown: Breakdown) -> str:
    """Write a measurement as ``buffer type=model/context/compute`` words, in bytes and in the order of their names."""
    return " ".join(sorted(f"{row.buffer_type}={row.model}/{row.context}/{row.compute}" for row in breakdown.rows))


def answer(worker: Worker, model: Path, params: Params) -> str:
    """Measure a load: ``text_of`` and its graph splits, or ``FAIL`` and llama.cpp's reason."""
    try:
        breakdown = worker.measure(model, params)
    except LlamaCppError as error:
        # The folder in which llama.cpp was compiled is left out.
        return "FAIL " + re.sub(r"/\S*/(\S+:\d+: )", r"\1", str(error).removeprefix(f"{model}: "))
    assert breakdown.n_splits is not None
    return "{} splits={}/{}".format(text_of(breakdown), *breakdown.n_splits)


def compare(title: str, loads: Sequence[object], expected: Sequence[object], actual: Sequence[object]) -> int:
    """Print the first loads whose answers differ, and a line with the counts. Returns how many differ."""
    different = [each for each in zip(loads, expected, actual, strict=True) if each[1] != each[2]]
    for load, one, other in different[:_SHOWN]:
        print(f"different: {load}\n  expected {one}\n  actual   {other}")
    refused = sum(bool(re.search("FAIL|failure='[^']", str(one))) for one in expected)
    print(
        f"{title}: {len(loads)} loads, {refused} of them refused by llama.cpp, different: {len(different)}", flush=True
    )
    return len(different)


def draw_params(dice: random.Random, model: str) -> Params:
    """Draw parameters that change the bytes of a load of a shape of ``MODELS``."""
    n_layer = int(shapes.SHAPES[model].metadata[".block_count"])  # type: ignore[arg-type]
    pattern, _, buffer_type = dice.choice(_OVERRIDES).rpartition("=")
    type_k = dice.choice(_CACHE_TYPES) if dice.random() < 0.4 else "f16"
    type_v = type_k if model == "deepseek-v3.1" or dice.random() < 0.7 else dice.choice(_CACHE_TYPES)
    flash_attn = dice.choice(("auto", "auto", "on", "off"))
    if type_v not in ("f16", "bf16", "f32") and dice.random() < 0.9:
        flash_attn = "on"  # llama.cpp refuses a quantized V without it
    n_ubatch = dice.choice((1, 16, 31, 32, 128, 512, 512, 512, 2048))
    n_seq_max = dice.choice((1, 1, 1, 2, 4))
    return Params(
        n_ctx=dice.choice((256, 2048, 4096, 8192, 32768, 131072)) * (1 if n_seq_max == 1 else n_seq_max),
        n_gpu_layers=dice.choice((-1, -1, -1, 0, 1, n_layer // 2, n_layer - 1, n_layer)),
        tensor_buft_overrides=(TensorBuftOverride(pattern, buffer_type),) if pattern else (),
        n_batch=max(2048, n_ubatch),
        n_ubatch=n_ubatch,
        n_seq_max=n_seq_max,
        kv_unified=dice.random() < 0.3,
        type_k=type_k,
        type_v=type_v,
        flash_attn=flash_attn,  # type: ignore[arg-type]
        offload_kqv=dice.random() < 0.85,
        op_offload=dice.random() < 0.85,
        swa_full=dice.random() < 0.2,
    )


# ---- tables


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a table, packed (``.gz``) or not."""
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a packed table, the names of its columns first; the same rows make the same file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def params_text(params: Params) -> str:
    """Write the parameters that differ from the defaults as ``name=value`` words."""
    words = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "tensor_buft_overrides":
            words += [f"override={o.pattern}={o.buffer_type}" for o in value]
        elif value != field.default:
            words.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
    return " ".join(words)


def params_of(text: str) -> Params:
    """Read the text that ``params_text`` wrote."""
    defaults = Params()
    values: dict[str, Any] = {}
    overrides = []
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "override":
            pattern, _, buffer_type = value.rpartition("=")
            overrides.append(TensorBuftOverride(pattern, buffer_type))
        elif isinstance(getattr(defaults, name), bool):
            values[name] = value == "1"
        elif isinstance(getattr(defaults, name), int):
            values[name] = int(value)
        else:
            values[name] = value
    return dataclasses.replace(defaults, tensor_buft_overrides=tuple(overrides), **values)
