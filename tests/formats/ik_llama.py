"""Arguments as ik_llama.cpp parses them, by the list of its options in ``tests/data/ik_llama``, and how it cuts layers.

The rule is that of its source at commit 8337e4c, with the lines of src/llama.cpp beside it, re-stated in numpy's
numbers of 32 bits. fitter has one of its own (``fitter.programs.ik_llama``), which takes caches from llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tools.models.shapes import Shape

LIST = Path(__file__).parent.parent / "data" / "ik_llama" / "options.txt"

_NUMBER = r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?"
_KINDS = {
    "text": r"(?s:.*)",
    "scaled": rf"(?s:.*):{_NUMBER}",
    "int": r"[-+]?\d+",
    "float": _NUMBER,
    "floats": rf"{_NUMBER}([,/]+{_NUMBER}){{0,14}}",
    "pairs": r"-?\d+,-?\d+(,-?\d+,-?\d+)*",
    "devices": r"[^- ,]+(,[^- ,]+)*",
    "overrides": r"[^,=]+=(CPU|(CUDA|ROCm|Vulkan)\d+)(,[^,=]+=(CPU|(CUDA|ROCm|Vulkan)\d+))*",
    "cache": r"f32|f16|bf16|q8_0|q4_0|q4_1|iq4_nl|q5_0|q5_1|q6_0|q8_KV",
}


def options() -> dict[str, str | None]:
    """The regular expression of every option's value by its names, ``None`` for a flag."""
    found: dict[str, str | None] = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("-"):
            names, _, kind = line.partition(": ")
            found.update(dict.fromkeys(names.split(), _KINDS.get(kind, kind) if kind else None))
    return found


REPEATED = ("--spec-type", "--lora", "--lora-scaled")


def parse(words: Sequence[str]) -> dict[str, str]:
    """The value of every option, empty for a flag. Fails where the fork would refuse a word."""
    known = options()
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        assert word in known, f"ik_llama.cpp has no option {word}"
        assert word not in found or word in REPEATED, f"{word} is there twice"
        kind = known[word]
        found[word] = "" if kind is None else next(rest)
        if kind == _KINDS["scaled"]:
            found[word] += f":{next(rest)}"
        assert kind is None or re.fullmatch(kind, found[word]), f"{word} takes no {found[word]!r}"
    return found


_ROW = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18), "q5_1": (32, 24)}
"""Elements and bytes of a block of each cache type."""

MLA = ("deepseek2", "glm-dsa", "mistral4", "bailingmoe3")
"""``is_mla_model`` (src/llama-model.h, line 593)."""


def row(kind: str, elements: int) -> int:
    """``ggml_row_size``."""
    block, size = _ROW[kind]
    return elements // block * size


def cache_size(shape: Shape, il: int, found: Mapping[str, str]) -> int:
    """``llama_model::cache_size`` (src/llama-model.cpp, line 2463), with flash attention and -mla 3."""
    of = shape.metadata

    def number(key: str) -> int:
        value = of[key]
        value = value[il] if isinstance(value, list) else value
        assert isinstance(value, int)
        return value

    n_ctx, type_k, type_v = int(found["-c"]), found.get("-ctk", "f16"), found.get("-ctv", "f16")
    if shape.architecture == "qwen3next" and (il + 1) % 4:
        # lines 2466 to 2469, and n_embd_v_s in src/llama-hparams.h: full attention is in each fourth layer
        inner, state, rank = number(".ssm.inner_size"), number(".ssm.state_size"), number(".ssm.time_step_rank")
        conv = (number(".ssm.conv_kernel") - 1) * (2 * state * number(".ssm.group_count") + inner)
        return (conv + (inner // rank) ** 2 * rank) * int(found.get("-np", "1")) * 4
    if shape.architecture in MLA:
        # line 2490
        return row(type_k, number(".attention.kv_lora_rank") + number(".rope.dimension_count")) * n_ctx
    # lines 2526 to 2531: no sliding window makes it smaller without --swa-compress
    heads = number(".attention.head_count_kv")
    whole = number(".embedding_length") // number(".attention.head_count")
    n_k = number(".attention.key_length") if ".attention.key_length" in of else whole
    n_v = number(".attention.value_length") if ".attention.value_length" in of else whole
    return (row(type_k, n_k) * heads + row(type_v, n_v * heads)) * n_ctx


def layer_sizes(shape: Shape, found: Mapping[str, str]) -> tuple[list[float], float]:
    """``get_layer_sizes`` (lines 3938 to 4174): each layer with its cache, the output, and the compute buffer."""
    n_layer, n_ubatch = shape.n_layer, int(found.get("-ub", "512"))
    nextn = shape.metadata.get(".nextn_predict_layers", 0)
    assert isinstance(nextn, int)
    result, compute, ends = [0.0] * (n_layer + 1), [0.0] * n_layer, {}
    ffn = {kind: [0.0] * n_layer for kind in ("exps", "shexp", "")}
    latent: list[dict[str, tuple[int, ...]]] = [{} for _ in range(n_layer)]
    for tensor in shape.tensors:
        match = re.match(r"blk\.(\d+)\.(.*)", tensor.name)
        if not match:
            ends[tensor.name] = tensor.bytes
            continue
        il, name = int(match[1]), match[2]
        if "mtp" not in found.get("--spec-type", "") and il >= n_layer - nextn:
            # line 4042
            continue
        result[il] += tensor.bytes
        if part := re.fullmatch(r"ffn_(?:gate_up|gate|up|down)(?:_(exps|shexp))?\.weight", name):
            # lines 4070 to 4095
            kind = part[1] or ""
            used = shape.metadata[".expert_used_count"] if kind == "exps" else 1
            assert isinstance(used, int)
            ffn[kind][il] += tensor.shape[1] * n_ubatch * used * 4
        if part := re.fullmatch(r"attn_([kv])_b\.weight", name):
            latent[il][part[1]] = tensor.shape
    n_embd = shape.metadata[".embedding_length"]
    assert isinstance(n_embd, int)
    for il in range(n_layer):
        # lines 4112 to 4118: with a norm the input counts twice
        compute[il] = max(each[il] for each in ffn.values()) + n_embd * n_ubatch * 4 * (2 if result[il] else 1)
        if len(latent[il]) == 2 and shape.architecture in MLA:
            k, v = latent[il]["k"], latent[il]["v"]
            # lines 4123 to 4126, of a quantized attn_k_b
            result[il] += row("q8_0", v[0]) * (v[1] + k[1]) * v[2] * 2
            # lines 4132 to 4147
            size, heads = 2 * v[1] * v[2] * int(found["-c"]) * 4 / 1024**2, v[2]
            if size > 256:
                heads = next((v[2] // n for n in range(2, v[2]) if v[2] % n == 0 and size / n <= 256), 1)
            compute[il] = max(compute[il], 2.0 * v[1] * heads * int(found["-c"]) * 4)
    largest = max(compute)
    for il in range(n_layer):
        result[il] += cache_size(shape, il, found)
    # lines 4151 to 4169
    result[n_layer] = ends.get("output.weight", 0) or ends["token_embd.weight"]
    result[n_layer] += max(float(shape.n_vocab * n_ubatch * 4), largest) - largest
    return result, largest


def counts(shape: Shape, words: Sequence[str]) -> list[int]:
    """The layers on each device by ``-dev``, ``-ngl`` and ``-ts``, the output as the last one if it is on a device."""
    found = parse(words)
    n_devices = len([name for name in found.get("-dev", "none").split(",") if name != "none"])
    layers = int(found["-ngl"])
    # line 4318, and lines 4435 to 4436
    first, last = max(shape.n_layer - layers, 0), shape.n_layer + (layers > shape.n_layer)
    if not layers or not n_devices:
        return [0] * n_devices
    if n_devices == 1:
        return [last - first]
    sizes, compute = layer_sizes(shape, found)
    # lines 4353 to 4362, in numbers of 32 bits
    points = np.cumsum([np.float32(share) for share in found["-ts"].split(",")], dtype=np.float32)
    points = (points / points[-1]).astype(np.float32)
    # lines 4434 to 4465
    total = compute * n_devices + sum(sizes[first:last])
    home, loaded, il = [n_devices - 1] * (last - first), np.float32(0), first
    for device in range(n_devices):
        loaded = np.float32(loaded + np.float64(compute))
        limit = np.float32(np.float64(points[device]) * total)
        while il < last:
            after = np.float64(loaded) + sizes[il]
            if after > limit and not after - np.float64(limit) < np.float64(limit) - np.float64(loaded):
                break
            home[il - first] = device
            loaded, il = np.float32(after), il + 1
            if after > limit:
                break
    return [home.count(device) for device in range(n_devices)]
