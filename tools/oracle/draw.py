"""Random loads in the columns of the tables: any settings, on devices from Pascal to Blackwell, or Vega to RDNA4."""

from __future__ import annotations

import random
from collections.abc import Sequence

CAPABILITIES = (60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
ARCHITECTURES = (
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx90c", "gfx942", "gfx950"),
    *("gfx1010", "gfx1030", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"),
)
_TYPES = ("f16",) * 6 + ("q8_0",) * 4 + ("q4_0",) * 3 + ("bf16", "f32", "q4_1", "q5_0", "q5_1", "iq4_nl")
_N_UBATCH = (1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 128, 512, 512, 1024, 2048, 4096)
_N_CTX = (256, 512, 1000, 2048, 4096, 5000, 8192, 32768, 65536, 131072)
_N_GPU_LAYERS = (999, 999, 999, 0, 1, 2, 5, 12, 20, 30)
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
_OVERRIDES = (
    *("",) * 8,
    r"\.ffn_(up|down|gate)\.weight=CPU",
    _EXPERTS,
    r"blk\.[0-9]*[13579]\..*=CPU",
    r"blk\.[2-9]\.ffn_.*_exps=CPU",
    "attn_.*=CPU",
    "ffn_down=CPU",
    "ffn_gate_inp=CPU",
    "norm=CPU",
    "output.*=CPU",
    "ssm.*=CPU",
)
_ENVIRONMENTS = (
    "GGML_CUDA_DISABLE_FUSION=1",
    "GGML_CUDA_GRAPH_OPT=1",
    "GGML_CUDA_DISABLE_GRAPHS=1 GGML_CUDA_GRAPH_OPT=1",
    "GGML_CUDA_NO_PINNED=1",
    "GGML_OP_OFFLOAD_MIN_BATCH=1",
    "GGML_OP_OFFLOAD_MIN_BATCH=1000",
)
_ON_EACH = 12
"""Loads on the same devices: another set of them is another process."""


def draw(
    models: Sequence[str], count: int, seed: int, known: Sequence[int | str] = CAPABILITIES
) -> list[dict[str, str]]:
    """``count`` rows without results, on devices of the ``known`` ones. The same seed draws the same rows."""
    chance = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        capabilities = _capabilities(chance, known)
        environment = chance.choice(_ENVIRONMENTS) if chance.random() < 0.35 else ""
        for _ in range(min(_ON_EACH, count - len(rows))):
            row = {"environment": environment} | _row(chance, models, capabilities)
            if "GRAPH_OPT" in environment and chance.random() < 0.8:
                # It is about graphs of one token, which decide the bytes only where there are no others.
                row |= {"n_ubatch": "1", "n_seq_max": "1"}
            rows.append(row)
    return rows


def with_expert_caches(rows: Sequence[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """The rows with caches of experts, whose experts are on the host in most of them."""
    chance = random.Random(seed)
    drawn = []
    for row in rows:
        layers = row["placement"].partition(";")[0]
        moved = f"{layers};{_EXPERTS}" if chance.random() < 0.8 else row["placement"]
        drawn.append(row | {"placement": moved, "moe_cache_size": str(int(2 ** chance.uniform(5, 14)) << 20)})
    return drawn


def _capabilities(chance: random.Random, known: Sequence[int | str]) -> list[int | str]:
    count = chance.choice((1, 1, 2, 2, 3, 4))
    one = chance.choice(known)
    same = chance.random() < 0.5
    return [one if same else chance.choice(known) for _ in range(count)]


def _row(chance: random.Random, models: Sequence[str], capabilities: Sequence[int | str]) -> dict[str, str]:
    def maybe(probability: float) -> str:
        return str(int(chance.random() < probability))

    override = chance.choice(_OVERRIDES)
    type_k = chance.choice(_TYPES)
    type_v = type_k if chance.random() < 0.6 else chance.choice(_TYPES)
    # Without flash attention a quantized V is refused.
    flash_attn = chance.choice(("-1", "-1", "1", "0" if type_v in ("f16", "bf16", "f32") else "1"))
    return {
        "model": chance.choice(list(models)),
        "placement": f"n_gpu_layers={chance.choice(_N_GPU_LAYERS)}" + (f";{override}" if override else ""),
        "n_devices": str(len(capabilities)),
        "compute_capability": "/".join(map(str, capabilities)),
        "n_ctx": str(chance.choice(_N_CTX)),
        "type_k": type_k,
        "type_v": type_v,
        "flash_attn": flash_attn,
        "n_ubatch": str(chance.choice(_N_UBATCH)),
        "n_seq_max": str(chance.choice((1, 1, 1, 2, 3, 4, 8, 16))),
        "kv_unified": maybe(0.3),
        "op_offload": maybe(0.85),
        "offload_kqv": maybe(0.85),
        "swa_full": maybe(0.5),
        "result": "",
        "splits": "",
    }
