"""Loads whose bytes on real CUDA devices are known (see data/cuda/README.md)."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fitter.llama.types import Params, TensorBuftOverride, VirtualDevice

_DATA = Path(__file__).parent / "data" / "cuda"
_FLASH_ATTN = {"-1": "auto", "0": "off", "1": "on"}


@dataclass(frozen=True)
class Load:
    """``rows`` maps a buffer type to its (model, context, compute) bytes; ``None`` where llama.cpp says ``failure``."""

    name: str
    model: str
    devices: tuple[VirtualDevice, ...]
    params: Params
    rows: dict[str, tuple[int, ...]] | None
    failure: str


def write_model(name: str, directory: Path) -> Path:
    """A sparse GGUF file of the model's real size."""
    path = directory / f"{name}.gguf"
    path.write_bytes(gzip.decompress((_DATA / f"{name}.head.gz").read_bytes()))
    with path.open("r+b") as file:
        file.truncate(json.loads((_DATA / "file_bytes.json").read_text())[name])
    return path


@cache
def loads() -> tuple[Load, ...]:
    with (_DATA / "bytes.csv").open(newline="") as file:
        return tuple(_load(number, row) for number, row in enumerate(csv.DictReader(file), 2))


def _load(number: int, row: dict[str, str]) -> Load:
    layers, _, override = row["placement"].partition(";")
    pattern, _, buffer_type = override.rpartition("=")
    n_ubatch = int(row["n_ubatch"])
    failed = row["result"].startswith("FAIL ")
    return Load(
        name=f"{row['model']}-line{number}",
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
        ),
        rows=None if failed else dict(_bytes(field) for field in row["result"].split()),
        failure=row["result"].partition(": ")[2] if failed else "",
    )


def _devices(count: int, capabilities: list[str]) -> tuple[VirtualDevice, ...]:
    memory = 2_000_000 * 2**20
    return tuple(
        VirtualDevice(f"CUDA{i}", "fake", "cuda", int(capabilities[i % len(capabilities)]) * 10, memory, memory)
        for i in range(count)
    )


def _bytes(field: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = field.rpartition("=")
    return name, tuple(map(int, numbers.split("/")))
