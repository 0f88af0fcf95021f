"""Loads with ``-sm tensor``: which are compared, and what real and virtual cards say of them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fitter.errors import LlamaCppError
from fitter.llama.build.virtual_backends import CudaLibrary
from fitter.llama.client import Worker
from fitter.llama.processes.interpreter import worker_variables
from fitter.llama.types import Params, TensorBuftOverride, describe
from tools.comparisons.cuda_reference import card
from tools.models import shapes

LAYERS = {
    "llama-3.1-70b": 3,
    "qwen3-32b": 4,
    "qwen3-30b-a3b": 5,
    "gpt-oss-20b": 4,
    "gemma3-12b": 7,
    "qwen3-next-80b-a3b": 4,
    "nemotron-h-9b": 4,
}
"""The shapes and how many of their layers are loaded: all would read as many zeros as the model has bytes."""

_TYPES = ("f16", "f16", "f16", "bf16", "q8_0", "q4_0", "f32")
_OVERRIDES = (
    *("",) * 8,
    r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
    "ffn_.*=CPU",
    r"blk\.[0-3]\.ffn_.*=CPU",
    "output=CPU",
)
_CAPABILITIES = (61, 75, 80, 86, 86, 89, 90, 120)
"""Not 70: a library of CUDA 13 has no code for it."""
_SPLITS = ((1.0, 1.0), (3.0, 1.0), (1.0, 0.0), (2.0, 3.0, 4.0), (24.0, 24.0, 12.0, 8.0), (0.55, 0.45), (7.0, 1.0, 5.0))


@dataclass(frozen=True)
class SplitLoad:
    """A load of the first layers of a shape. ``cards``: their compute capabilities, times ten."""

    shape: str
    cards: tuple[int, ...]
    params: Params


def draw(count: int, seed: int) -> list[SplitLoad]:
    """``count`` loads; the same seed draws the same ones. None with a cache on the host, which is refused."""
    chance = random.Random(seed)
    drawn = (_load(chance) for _ in itertools.count())
    return list(itertools.islice((load for load in drawn if load.params.offload_kqv), count))


def _load(chance: random.Random) -> SplitLoad:
    shape = chance.choice([*list(LAYERS)[:-1] * 6, *LAYERS])
    override = chance.choice(_OVERRIDES)
    n_cards = chance.choice((2, 2, 2, 3, 4, 4, 5, 6, 7, 8))
    split = chance.choice([None, None, *_SPLITS, tuple(chance.randint(1, 30) + 0.0 for _ in range(8))])
    pattern, _, buffer_type = override.rpartition("=")
    type_k = chance.choice(_TYPES)
    same = chance.choice(_CAPABILITIES)
    is_same = chance.random() < 0.7
    params = Params(
        n_ctx=chance.choice((512, 2048, 4096, 8192, 10000, 32768)),
        n_gpu_layers=chance.choice((99, 99, 99, 99, 2, 4)),
        tensor_split=None if split is None else (split * 4)[:n_cards],
        tensor_buft_overrides=(TensorBuftOverride(pattern, buffer_type),) if override else (),
        n_ubatch=chance.choice((1, 64, 512, 512, 2048)),
        n_seq_max=chance.choice((1, 1, 1, 2, 4)),
        kv_unified=chance.random() < 0.3,
        type_k=type_k,
        type_v=type_k if chance.random() < 0.8 else chance.choice(_TYPES),
        flash_attn=chance.choice(("auto", "auto", "auto", "auto", "on", "on", "off")),
        offload_kqv=chance.random() < 0.9,
        op_offload=chance.random() < 0.9,
        swa_full=chance.random() < 0.4,
        split_mode="tensor",
    )
    return SplitLoad(shape, tuple(same if is_same else chance.choice(_CAPABILITIES) for _ in range(n_cards)), params)


def write_model(name: str, directory: Path) -> Path:
    """A sparse file of the first layers of a shape; a file already there is kept."""
    path = directory / f"{name}-{LAYERS[name]}.gguf"
    if not path.exists():
        shapes.write_shape(first_layers(shapes.SHAPES[name], LAYERS[name]), path, vocab=False)
    return path


def first_layers(shape: shapes.Shape, n_layer: int) -> shapes.Shape:
    """The shape with no more layers than ``n_layer``, of the same width."""

    def is_kept(tensor: shapes.Tensor) -> bool:
        prefix, _, rest = tensor.name.partition(".")
        return prefix != "blk" or int(rest.partition(".")[0]) < n_layer

    metadata = {
        key: value[:n_layer] if isinstance(value, list) and len(value) == shape.n_layer else value
        for key, value in shape.metadata.items()
    }
    tensors = tuple(filter(is_kept, shape.tensors))
    return replace(shape, metadata={**metadata, ".block_count": n_layer}, tensors=tensors)


@dataclass(frozen=True)
class Held:
    """What each card holds once the model is loaded, and how much more with its context, before anything is computed.

    ``failure``: why there is no such load, "" where there is one.
    """

    model: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    failure: str = ""


def real(
    loads: Sequence[SplitLoad], library: CudaLibrary, models: Path, llama_cpp: str | None = None, jobs: int = 1
) -> list[Held]:
    """What the host code of ``library`` allocates for each load, with the ``llama_cpp`` that it belongs to."""
    for shape in LAYERS:
        write_model(shape, models)
    named = worker_variables(llama_cpp)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda load: _ask(load, library, write_model(load.shape, models), named), loads))


def store(path: Path, found: Sequence[Held]) -> None:
    """Keep what was found, a line for each load."""
    lines = [json.dumps([each.model, each.context, each.failure]) for each in found]
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", 9, mtime=0))


def stored(path: Path) -> list[Held]:
    """What ``store`` has kept."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [Held(tuple(model), tuple(context), failure) for model, context, failure in map(json.loads, lines)]


def _ask(load: SplitLoad, library: CudaLibrary, path: Path, named: Mapping[str, str]) -> Held:
    cards = describe([card(i, str(capability)) for i, capability in enumerate(load.cards)])
    question = json.dumps({"path": str(path), "params": asdict(load.params)})
    with tempfile.TemporaryDirectory() as links:
        done = subprocess.run(
            [sys.executable, "-m", "tools.splits.real", str(library.path), str(int(library.plugin))],
            input=question + "\n",
            env={**os.environ, "GGML_NO_BACKTRACE": "1", **named, **library.environment(Path(links), cards)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return Held(failure=f"crash: {_said(done.stderr)}")
    answer = json.loads(done.stdout)
    if "failure" in answer:
        return Held(failure=answer["failure"])
    return Held(tuple(answer["model"]), tuple(answer["context"]))


def _said(text: str) -> str:
    lines = [line for line in text.splitlines() if "GGML_ASSERT" in line or "error" in line.lower()]
    return lines[-1] if lines else text.strip().splitlines()[-1] if text.strip() else ""


def virtual(loads: Sequence[SplitLoad], models: Path, llama_cpp: str | None = None) -> list[Held]:
    """What fitter's own rules say of each load on virtual cards."""
    found = []
    with Worker(llama_cpp=llama_cpp) as worker:
        for load in loads:
            worker.configure([card(i, str(capability)) for i, capability in enumerate(load.cards)])
            found.append(_measured(worker, load, write_model(load.shape, models)))
    return found


def _measured(worker: Worker, load: SplitLoad, path: Path) -> Held:
    try:
        breakdown = worker.measure(path, load.params, reserve=True)
    except LlamaCppError as error:
        said = str(error).removeprefix(f"{path}: ")
        quoted = re.search(r"'(ggml-backend-meta\.cpp:\d+: .*)'", said)
        # the same in fewer words
        refused = re.search(r"cannot split the tensors of architecture '(.*)' over", said)
        if refused:
            said = f"LLAMA_SPLIT_MODE_TENSOR not implemented for architecture '{refused[1]}'"
        return Held(failure=quoted[1] if quoted else said)
    model, context = [], []
    for name in breakdown.devices:
        rows = [row for row in breakdown.rows if row.device == name and not row.is_host]
        model.append(sum(row.model for row in rows))
        # room for sums is taken with the first one
        reserved = sum(row.reserved or 0 for row in rows if row.buffer_type == name)
        context.append(sum(row.context for row in rows) + reserved)
    return Held(tuple(model), tuple(context))
