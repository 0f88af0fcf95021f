"""Loads whose bytes on the real ggml-vulkan are known (see tests/data/vulkan/README.md)."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Params, TensorBuftOverride, VirtualDevice
from tools import shapes

TABLE = Path(__file__).resolve().parents[2] / "tests" / "data" / "vulkan" / "bytes.csv.gz"
COLUMNS = ("model", "driver", "n_devices", "environment", "params", "result")
DRIVERS = ("radv", "nvidia", "anv", "lavapipe")
MEMORY = 2_000_000 * 2**20

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

ENVIRONMENTS = (
    "GGML_VK_DISABLE_GRAPH_OPTIMIZE=1",
    "GGML_VK_SUBALLOCATION_BLOCK_SIZE=268435456",
    "GGML_VK_FORCE_MAX_ALLOCATION_SIZE=400000000",
    "GGML_VK_FORCE_MAX_BUFFER_SIZE=300000000",
    "GGML_OP_OFFLOAD_MIN_BATCH=1",
    "GGML_VK_DISABLE_F16=1",
)

_OVERRIDES = ("", "exps=CPU", r"ffn_(up|gate|down)=CPU", r"blk\.[0-9]\.=CPU", r"ffn_down.*weight=CPU", r"attn_.*=CPU")
_CACHE_TYPES = ("f16", "q8_0", "q4_0", "q5_1", "iq4_nl", "bf16", "f32")


@dataclass(frozen=True)
class Load:
    """One load, on ``n_devices`` devices of a driver; ``environment`` is ``NAME=value`` or empty."""

    model: str
    driver: str
    n_devices: int
    environment: str
    params: Params

    @property
    def session(self) -> tuple[str, str, int]:
        """What loads on the same devices in one process have in common."""
        return self.environment, self.driver, self.n_devices

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The virtual devices that stand for the real ones."""
        return tuple(
            VirtualDevice(f"Vulkan{i}", "fake", f"vulkan-{self.driver}", 0, MEMORY, MEMORY)
            for i in range(self.n_devices)
        )

    def __str__(self) -> str:
        words = (self.model, self.driver, f"x{self.n_devices}", self.environment, params_text(self.params))
        return " ".join(word for word in words if word)


def corners() -> Iterator[Load]:
    """Loads at the limits: of caches, buffers and chunks of buffers, of devices, of models; on each driver."""
    experts_on_host = (TensorBuftOverride("exps", "CPU"),)
    large = Params(n_ctx=131072, flash_attn="off", n_batch=4096, n_ubatch=2048)
    for driver in DRIVERS:
        # K of a layer takes 2 KiB per token: just below 4 GiB, and as much.
        yield Load("llama-3.1-8b", driver, 1, "", Params(n_ctx=2**21 - 256))
        yield Load("llama-3.1-8b", driver, 1, "", Params(n_ctx=2**21))
        yield Load("qwen3-30b-a3b", driver, 1, "", large)
        yield Load("qwen3-30b-a3b", driver, 2, "GGML_VK_SUBALLOCATION_BLOCK_SIZE=17179869184", large)
        yield Load(
            "qwen3-next-80b-a3b", driver, 1, "GGML_VK_FORCE_MAX_BUFFER_SIZE=100000000", Params(n_ctx=2048, n_seq_max=2)
        )
        yield Load(
            "nemotron-h-9b", driver, 1, "GGML_VK_FORCE_MAX_BUFFER_SIZE=300000000", Params(n_ctx=2048, n_seq_max=8)
        )
        yield Load("nemotron-h-9b", driver, 1, "", Params(n_ctx=2048, n_seq_max=8))
        yield Load(
            "deepseek-v3.1", driver, 4, "", replace(large, flash_attn="on", tensor_buft_overrides=experts_on_host)
        )
        yield Load("kimi-k2", driver, 3, "", Params(n_ctx=65536, flash_attn="off"))
        yield Load("gpt-oss-120b", driver, 4, "GGML_VK_DISABLE_GRAPH_OPTIMIZE=1", Params(n_ctx=65536))
        yield Load(
            "qwen3-235b-a22b", driver, 5, "", Params(n_ctx=65536, n_gpu_layers=20, split_mode="none", main_gpu=1)
        )
        yield Load("llama-3.1-70b", driver, 8, "", Params(n_ctx=8192))


def answer(worker: Worker, model: Path, params: Params) -> str:
    """What a worker says to a load: ``buffer type=model/context/compute`` and the graph splits, or ``FAIL`` and why."""
    try:
        breakdown = worker.measure(model, params)
    except LlamaCppError as error:
        # Where llama.cpp was compiled is none of the answer.
        return "FAIL " + re.sub(r"/\S*/(\S+:\d+: )", r"\1", str(error).removeprefix(f"{model}: "))
    rows = sorted(f"{row.buffer_type}={row.model}/{row.context}/{row.compute}" for row in breakdown.rows)
    assert breakdown.n_splits is not None
    return " ".join([*rows, "splits={}/{}".format(*breakdown.n_splits)])


def draw(count: int, seed: int) -> Iterator[Load]:
    """``count`` loads that use what changes bytes, spread evenly over models and drivers."""
    dice = random.Random(seed)
    for number in range(count):
        model = list(MODELS)[number % len(MODELS)]
        driver = DRIVERS[number // len(MODELS) % len(DRIVERS)]
        yield Load(
            model,
            driver,
            dice.choice((1, 1, 1, 2, 3)),
            dice.choice(ENVIRONMENTS) if dice.random() < 0.25 else "",
            draw_params(dice, model),
        )


def draw_params(dice: random.Random, model: str) -> Params:
    """Parameters of a load that use what changes bytes."""
    n_layer = int(shapes.SHAPES[model].metadata[".block_count"])  # type: ignore[arg-type]
    pattern, _, buffer_type = dice.choice(_OVERRIDES).rpartition("=")
    type_k = dice.choice(_CACHE_TYPES) if dice.random() < 0.4 else "f16"
    type_v = type_k if model == "deepseek-v3.1" or dice.random() < 0.7 else dice.choice(_CACHE_TYPES)
    flash_attn = dice.choice(("auto", "auto", "on", "off"))
    if type_v not in ("f16", "bf16", "f32") and dice.random() < 0.9:
        flash_attn = "on"  # llama.cpp refuses to do without
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


# ---- the table


@cache
def known() -> tuple[tuple[Load, str], ...]:
    """Every load of the table with the real backend's answer, those of one session next to each other."""
    with gzip.open(TABLE, "rt", newline="") as file:
        rows = [
            (
                Load(
                    row["model"],
                    row["driver"],
                    int(row["n_devices"]),
                    row["environment"],
                    params_of(row["params"]),
                ),
                row["result"],
            )
            for row in csv.DictReader(file)
        ]
    return tuple(sorted(rows, key=lambda row: row[0].session))


def store(answers: Iterable[tuple[Load, str]]) -> None:
    """Write the table; the same answers make the same file."""
    rows = (
        (load.model, load.driver, load.n_devices, load.environment, params_text(load.params), result)
        for load, result in answers
    )
    write_table(TABLE, (COLUMNS, *rows))


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a packed table, its columns' names first; the same rows make the same file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def params_text(params: Params) -> str:
    """What differs from the defaults, as ``name=value`` words."""
    words = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "tensor_buft_overrides":
            words += [f"override={o.pattern}={o.buffer_type}" for o in value]
        elif value != field.default:
            words.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
    return " ".join(words)


def params_of(text: str) -> Params:
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
    return replace(defaults, tensor_buft_overrides=tuple(overrides), **values)
