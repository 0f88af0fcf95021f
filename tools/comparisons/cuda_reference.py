"""Loads whose bytes on CUDA and ROCm devices are known (tests/data/cuda/README.md, tests/data/rocm/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, TensorBuftOverride, VirtualDevice
from fitter.machine.gpu_catalogue import capability
from tools.builds.environment import with_variables
from tools.comparisons.load_answers import read_table
from tools.models import shapes

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "cuda"
TABLES = {
    "published": DATA / "published.csv.gz",
    "drawn": DATA / "drawn.csv.gz",
    **{path.name.partition(".")[0]: path for path in sorted(DATA.glob("real-*.csv*"))},
}
ROCM_TABLES = {"rocm": DATA.parent / "rocm" / "drawn.csv.gz"}
MEMORY = 2_000_000 * 2**20
"""Bytes that every device of the tables has."""

_FLASH_ATTN = {"-1": "auto", "0": "off", "1": "on"}


@dataclass(frozen=True)
class Load:
    """A row of a table. ``environment`` is what the process has beside the usual variables.

    ``rows`` maps a buffer type to its (model, context, compute) bytes; ``None`` where llama.cpp says ``failure``,
    which is empty where it crashes.
    """

    name: str
    model: str
    devices: tuple[VirtualDevice, ...]
    params: Params
    environment: tuple[tuple[str, str], ...]
    rows: dict[str, tuple[int, int, int]] | None
    n_splits: tuple[int, int] | None
    failure: str


def write_model(name: str, directory: Path) -> Path:
    """A sparse GGUF file of the model's real size; a file already there is kept."""
    head = DATA / f"{name}.head.gz"
    if not head.exists():
        return shapes.write(name, directory, vocab=False)
    path = directory / f"{name}.gguf"
    if not path.exists():
        path.write_bytes(gzip.decompress(head.read_bytes()))
        with path.open("r+b") as file:
            file.truncate(json.loads((DATA / "file_bytes.json").read_text())[name])
    return path


@cache
def loads(table: str = "published") -> tuple[Load, ...]:
    """All rows of a table, those of the same devices and model next to each other."""
    rows = [
        load_of(f"{table}-{number}", row) for number, row in enumerate(read_table((TABLES | ROCM_TABLES)[table]), 2)
    ]
    return tuple(sorted(rows, key=cheapest_order))


def load_of(name: str, row: dict[str, str]) -> Load:
    """What a row of a table says."""
    layers, _, override = row["placement"].partition(";")
    pattern, _, buffer_type = override.rpartition("=")
    n_ubatch = int(row["n_ubatch"])
    failed = row["result"].startswith("FAIL ")
    return Load(
        name=f"{name}-{row['model']}",
        model=row["model"],
        devices=_devices(int(row["n_devices"]), row["compute_capability"].split("/")),
        params=Params(
            n_ctx=int(row["n_ctx"]),
            n_gpu_layers=int(layers.partition("=")[2]),
            tensor_buft_overrides=(TensorBuftOverride(pattern, buffer_type),) if override else (),
            n_batch=max(2048, n_ubatch),
            n_ubatch=n_ubatch,
            n_seq_max=int(row["n_seq_max"]),
            kv_unified=row["kv_unified"] == "1",
            type_k=row["type_k"],
            type_v=row["type_v"],
            flash_attn=_FLASH_ATTN[row["flash_attn"]],  # type: ignore[arg-type]
            offload_kqv=row["offload_kqv"] == "1",
            op_offload=row["op_offload"] == "1",
            swa_full=row["swa_full"] == "1",
            moe_cache_size=int(row.get("moe_cache_size") or 0),
        ),
        environment=_environment(row.get("environment", "")),
        rows=None if failed else dict(_bytes(field) for field in row["result"].split()),
        n_splits=_splits(row["splits"]) if row["splits"] else None,
        failure=row["result"].partition(": ")[2] if failed else "",
    )


def splits_of(breakdown: Breakdown) -> str:
    """The column ``splits`` for a load that succeeded, as llama.cpp logs it."""
    assert breakdown.n_splits is not None
    prompt, generation = breakdown.n_splits
    return str(prompt) if prompt == generation else f"{prompt} / {generation}"


def bytes_of(breakdown: Breakdown) -> dict[str, tuple[int, int, int]]:
    """A measurement as ``Load.rows`` has it."""
    return {row.buffer_type: (row.model, row.context, row.compute) for row in breakdown.rows}


def difference(worker: Worker, directory: Path, load: Load) -> str:
    """What ``worker`` says of ``load`` that its row does not; empty where they agree. Models are in ``directory``."""
    path = write_model(load.model, directory)
    try:
        breakdown = worker.measure(path, load.params)
    except LlamaCppError as error:
        expected = f"{path}: {load.failure}" if load.failure else "llama.cpp was ended by SIGABRT"
        is_said = str(error) == expected if load.failure else str(error).startswith(expected)
        if load.rows is not None or not is_said:
            return f"{load.name}: {error}"
        is_logged = not load.failure or any(load.failure in line for line in error.log)
        return "" if is_logged else f"{load.name}: the log has not '{load.failure}'"
    found = bytes_of(breakdown), breakdown.n_splits
    return "" if found == (load.rows, load.n_splits) else f"{load.name}: {found} is not {load.rows}, {load.n_splits}"


class Workers:
    """A worker for each environment that loads have. Its process starts with the first question, or after a crash."""

    def __init__(self) -> None:
        self._started: dict[tuple[tuple[str, str], ...], Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started.values():
            worker.close()

    def difference(self, directory: Path, load: Load) -> str:
        """``difference`` on the profile's devices."""
        with with_variables(dict(load.environment)):
            worker = self._started.setdefault(load.environment, Worker())
            worker.configure(load.devices)
            return difference(worker, directory, load)


def spread(loads: Iterable[Load], step: int) -> list[Load]:
    """Every ``step``-th of them: some of every model, devices and placement."""
    return list(loads)[::step]


def cheapest_order(load: Load) -> tuple[object, ...]:
    """By what another load costs: a process, a description of devices, a model, only a context."""
    params = load.params
    devices = [device.compute_capability for device in load.devices]
    return load.environment, devices, load.model, str(params.tensor_buft_overrides), params.n_gpu_layers


def _devices(count: int, capabilities: list[str]) -> tuple[VirtualDevice, ...]:
    return tuple(card(i, capabilities[i % len(capabilities)]) for i in range(count))


def card(index: int, text: str) -> VirtualDevice:
    """A device of the tables: a compute capability (``89``), or an architecture of AMD's (``gfx1100``)."""
    if text.startswith("gfx"):
        return VirtualDevice(f"ROCm{index}", "fake", "rocm", capability(text), MEMORY, MEMORY)
    return VirtualDevice(f"CUDA{index}", "fake", "cuda", int(text) * 10, MEMORY, MEMORY)


def _environment(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [variable.partition("=") for variable in text.split()]
    return tuple((name, value) for name, _, value in pairs)


def _splits(text: str) -> tuple[int, int]:
    prompt, _, generation = text.partition(" / ")
    return int(prompt), int(generation or prompt)


def _bytes(field: str) -> tuple[str, tuple[int, int, int]]:
    name, _, numbers = field.rpartition("=")
    model, context, compute = map(int, numbers.split("/"))
    return name, (model, context, compute)
