"""Loads whose bytes builds of llama.cpp have told themselves (tests/data/llama_builds/README.md), and new ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Params, TensorBuftOverride
from tools.comparisons.load_answers import MODELS, draw_params, params_of, params_text, read_table, text_of, write_table
from tools.models import shapes
from tools.models.tiny import write_tiny

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "llama_builds"
COLUMNS = ("model", "params", "result")
TINY = "tiny"
"""The model that is loaded for real."""
REFUSED = "FAIL"

_ON_CPU = ("exps=CPU", r"ffn_(up|gate)=CPU", r"blk\.[0-9]\.=CPU", "attn_.*=CPU")
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Load:
    """A load of one of ``tools.comparisons.load_answers.MODELS`` that allocates nothing, or of ``TINY`` that does."""

    model: str
    params: Params

    def write(self, directory: Path) -> Path:
        """The model's file in ``directory``; one that is there is kept."""
        if self.model != TINY:
            return shapes.write(self.model, directory, vocab=False)
        path = directory / f"{TINY}.gguf"
        return path if path.exists() else write_tiny(path)

    def line(self, directory: Path) -> str:
        """The load as ``program.cpp`` reads it."""
        params = self.params
        override = params.tensor_buft_overrides[0] if params.tensor_buft_overrides else TensorBuftOverride("", "")
        return "\t".join(
            (
                *(str(self.write(directory)), str(int(self.model == TINY)), str(params.n_gpu_layers)),
                *(override.pattern, override.buffer_type),
                *map(str, (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max)),
                *(params.type_k, params.type_v, str(_FLASH_ATTN[params.flash_attn])),
                *(str(int(flag)) for flag in (params.kv_unified, params.offload_kqv, params.op_offload)),
                *(str(int(flag)) for flag in (params.swa_full, params.embeddings)),
            )
        )

    def __str__(self) -> str:
        return f"{self.model} {params_text(self.params)}".strip()


def draw(count: int, seed: int, has_devices: bool = False) -> Iterator[Load]:
    """``count`` loads, on the CPU or with ``has_devices`` also beside it, spread evenly over the models."""
    dice = random.Random(seed)
    models = (*MODELS, TINY)
    for number in range(count):
        model = models[number % len(models)]
        params = draw_params(dice, "llama-3.1-8b" if model == TINY else model)
        pattern, _, buffer_type = dice.choice(_ON_CPU).rpartition("=") if dice.random() < 0.3 else ("", "", "")
        params = replace(
            params,
            n_gpu_layers=params.n_gpu_layers if has_devices else -1,
            tensor_buft_overrides=(TensorBuftOverride(pattern, buffer_type),) if pattern else (),
            embeddings=dice.random() < 0.1,
        )
        # That one is allocated.
        yield Load(model, replace(params, n_ctx=min(params.n_ctx, 8192)) if model == TINY else params)


def measured(worker: Worker, load: Load, directory: Path) -> str:
    """What fitter says of a load on all of a worker's devices, as ``program.cpp`` would write it."""
    try:
        return text_of(worker.measure(load.write(directory), load.params, reserve=load.model == TINY).real)
    except LlamaCppError as error:
        return REFUSED if "was ended by" not in str(error) else f"{REFUSED} {error}"


def table(build: str) -> Path:
    """Where a build's answers are stored."""
    return DATA / f"{build}.csv.gz"


@cache
def known(build: str) -> tuple[tuple[Load, str], ...]:
    """The loads that are stored for a build, with its answers."""
    rows = read_table(table(build))
    return tuple((Load(row["model"], params_of(row["params"])), row["result"]) for row in rows)


def store(build: str, loads: Sequence[Load], answers: Iterable[str]) -> None:
    """Write a build's table; the same answers make the same file."""
    rows = ((load.model, params_text(load.params), said) for load, said in zip(loads, answers, strict=True))
    write_table(table(build), (COLUMNS, *rows))
